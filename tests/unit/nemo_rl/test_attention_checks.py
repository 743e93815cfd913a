"""Models of whose config.json vLLM's attention follows more than NeMo-RL's learner are refused."""

import pytest
from test_nemo_rl_config import config, problems

from qarl_nemo.nemo_rl.config import apply_qarl

OVERRIDES = "policy.hf_config_overrides"
LONGEST = "policy.max_total_sequence_length"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_only_a_scaling_that_the_learner_follows_is_taken(key):
    for scaling in ({"rope_type": "default", "rope_theta": 1e6}, YARN, None):
        apply_qarl(config(**{OVERRIDES: {key: scaling}}))
    for scaling in ({"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}):
        (line,) = problems(config(**{OVERRIDES: {key: scaling}}))
        kind = scaling.get("rope_type", scaling.get("type"))
        assert line.startswith(f"{OVERRIDES}.{key}.rope_type={kind} (or config.json's): vLLM scales its angles")
        assert line.endswith("set default or yarn")


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
