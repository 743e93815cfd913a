"""Models of whose config.json vLLM's attention follows more than NeMo-RL's learner are refused."""

import pytest
from test_nemo_rl_config import config, problems

from qarl_nemo.nemo_rl.config import apply_qarl

OVERRIDES = "policy.hf_config_overrides"
LONGEST = "policy.max_total_sequence_length"
SHORT_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARN = SHORT_YARN | {"rope_theta": 1e6, "truncate": True, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                     "mscale_all_dim": 0.0}  # fmt: skip


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_only_a_scaling_that_the_learner_follows_is_taken(key):
    for scaling in ({"rope_type": "default", "rope_theta": 1e6}, YARN, None):
        apply_qarl(config(**{OVERRIDES: {key: scaling}}))
    for scaling in ({"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}):
        (line,) = problems(config(**{OVERRIDES: {key: scaling}}))
        kind = scaling.get("rope_type", scaling.get("type"))
        assert line.startswith(f"{OVERRIDES}.{key}.rope_type={kind} (or config.json's): vLLM scales its angles")
        assert line.endswith("set default or yarn")


def test_yarn_of_the_config_has_all_that_nemo_rl_asserts_in_a_worker():
    (line,) = problems(config(**{OVERRIDES: {"rope_scaling": SHORT_YARN}}))
    assert line.startswith(f"{OVERRIDES}.rope_scaling.rope_type=yarn: NeMo-RL needs all of its settings there")
    assert line.endswith("set rope_theta, truncate, beta_fast, beta_slow, mscale, mscale_all_dim, too")


def test_engine_rounding_rotates_by_unscaled_angles():
    apply_qarl(config({"format": "w4a16", "engine_rounding": True}))
    (line,) = problems(config({"format": "w4a16", "engine_rounding": True}, **{OVERRIDES: {"rope_scaling": YARN}}))
    assert "qarl.engine_rounding=true rotates by unscaled angles" in line


def test_sequences_are_no_longer_than_a_window():
    window = {"use_sliding_window": True, "sliding_window": 4096}
    apply_qarl(config(**{OVERRIDES: window, LONGEST: 4096}))
    apply_qarl(config(**{OVERRIDES: window | {"use_sliding_window": False}, LONGEST: 8192}))
    (line,) = problems(config(**{OVERRIDES: window, LONGEST: 8192}))
    assert line == (
        f"{LONGEST}=8192: by its config.json vLLM attends to the last 4096 tokens, and NeMo-RL's learner would to all; "
        "set at most 4096"
    )
