"""Sequences that are longer than a model's positions are refused before vLLM's workers start."""

import json

import pytest
from test_nemo_rl_config import config, problems

from qarl_nemo.nemo_rl.checks.sequence_lengths import length_conflicts, longest_sequence
from qarl_nemo.nemo_rl.config import apply_qarl

LONGEST = "policy.max_total_sequence_length"
SERVED = "policy.generation.vllm_cfg.max_model_len"


@pytest.mark.parametrize(
    ("model", "most"),
    [
        ({"max_position_embeddings": 40960}, 40960),
        ({"max_position_embeddings": 40960, "rope_scaling": None}, 40960),
        ({"max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 40960),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        # Not plain, and so not judged.
        ({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 40960, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, None),
        ({"max_position_embeddings": 40960, "model_max_length": 8192}, None),
        ({}, None),
    ],
)
def test_the_longest_sequence_is_vllms(model, most):
    assert longest_sequence(model) == most


def test_a_sequence_longer_than_the_models_positions_is_refused():
    apply_qarl(config(**{LONGEST: 40960, SERVED: 40960}))
    (line,) = problems(config(**{LONGEST: 61440, SERVED: 61440}))
    assert line.startswith(f"{SERVED}=61440: vLLM serves this model with at most 40960 tokens")
    assert line.endswith(f"set at most 40960 there and in {LONGEST}")
    # Engines hold responses to the smaller of the two.
    apply_qarl(config(**{LONGEST: 61440, SERVED: 40960}))
    assert len(length_conflicts(config(**{LONGEST: 61440}))) == 1


def test_what_lengthens_a_model_counts(monkeypatch):
    said = {LONGEST: 61440, SERVED: 61440}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert length_conflicts(config(**said | {"policy.hf_config_overrides": {"rope_scaling": scaling}})) == []
    allowed = {"policy.generation.vllm_cfg.env_vars": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": 1}}
    assert length_conflicts(config(**said | allowed)) == []
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert length_conflicts(config(**said)) == []


def test_a_model_that_is_not_on_this_machine_is_not_judged(tmp_path):
    said = {LONGEST: 61440, SERVED: 61440}
    assert length_conflicts(config(**said | {"policy.model_name": "nobody/has-this"})) == []
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    assert len(length_conflicts(config(**said | {"policy.model_name": str(tmp_path)}))) == 1
