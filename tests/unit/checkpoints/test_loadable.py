"""Values of config.json that are no sizes: what engines could not read is refused before anything is written."""

import pytest
from transformers import Qwen3MoeConfig

from qarl_nemo.checkpoints.loadable import require_loadable
from qarl_nemo.files import FileError


@pytest.fixture
def config():
    return Qwen3MoeConfig(hidden_size=64, num_hidden_layers=1, num_experts=2, vocab_size=64).to_dict()


def test_a_config_that_transformers_wrote_is_loadable(config):
    require_loadable(config, "config.json")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rms_norm_eps": ""}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
        ({"initializer_range": -0.02}, "initializer_range=-0.02"),
        ({"attention_dropout": "none"}, "attention_dropout"),
        ({"eos_token_id": [None]}, "eos_token_id"),
        ({"rope_parameters": {"rope_type": {}, "rope_theta": 1e4}}, "config.json: transformers"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_parameters.rope_theta=0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "TypeError"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10**30}}, "OverflowError"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": "x"}}, "config.json: transformers"),
        ({"rope_parameters": {"rope_type": "unheard_of", "rope_theta": 1e4}}, "unheard_of"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu (silu)"),
        ({"dtype": 3}, "dtype=3"),
        ({"pad_token_id": 64}, "pad_token_id=64 (below vocab_size=64)"),
    ],
)
def test_a_value_that_no_engine_reads_is_refused_by_name(config, values, named):
    with pytest.raises(FileError, match=r"no model has|cannot build|no engine loads") as error:
        require_loadable(config | values, "config.json")
    assert named in str(error.value)
