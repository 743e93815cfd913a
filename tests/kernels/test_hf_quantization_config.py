import json

import pytest
from compressed_tensors.quantization import QuantizationConfig

from qarl_kernels import get_format, quantization_config

IGNORE = ["lm_head", r"re:.*mlp\.gate$", "re:.*self_attn.*"]
PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}


def compressed_tensors_config(quantization_format, weights, input_activations):
    return {
        "quant_method": "compressed-tensors",
        "format": quantization_format,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": IGNORE,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": input_activations,
                "output_activations": None,
                "weights": weights,
            }
        },
    }


def int4(group_size):
    return {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": group_size,
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }


@pytest.mark.parametrize("group_size", [128, 64, 32])
@pytest.mark.parametrize("convention", ["narrow_range", "full_range"])
def test_w4a16_is_the_dictionary_vllm_loads(group_size, convention):
    fmt = get_format("w4a16", group_size=group_size, scale_convention=convention)
    expected = compressed_tensors_config("pack-quantized", int4(group_size), None)
    assert quantization_config(fmt, ignore=IGNORE) == expected


def test_w4a8_adds_per_token_fp8_activations():
    expected = compressed_tensors_config("pack-quantized", int4(128), PER_TOKEN)
    assert quantization_config(get_format("w4a8"), ignore=IGNORE) == expected


ROWS = {"num_bits": 8, "strategy": "channel", "symmetric": True, "dynamic": False}
# Format -> its name in compressed-tensors, what vLLM goes by in its weights, and its activations.
OTHERS = {
    "fp8_channel": ("float-quantized", ROWS | {"type": "float"}, PER_TOKEN),
    "int8": ("int-quantized", ROWS | {"type": "int"}, PER_TOKEN | {"type": "int"}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        None,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_say_what_vllm_goes_by(name):
    config = quantization_config(get_format(name), ignore=IGNORE)
    weights, (stored_as, stated, activations) = config["config_groups"]["group_0"]["weights"], OTHERS[name]
    assert {key: weights[key] for key in stated} == stated
    assert config == compressed_tensors_config(stored_as, weights, activations)


def test_what_else_is_said_of_weights_is_compressed_tensors_own_default():
    weights = quantization_config(get_format("fp8_channel"), ignore=IGNORE)["config_groups"]["group_0"]["weights"]
    defaults = {"group_size": None, "actorder": None, "observer": "minmax"}
    assert {key: weights[key] for key in weights.keys() - OTHERS["fp8_channel"][1].keys()} == defaults


def test_fp8_block_is_vllms_own_method():
    kept = ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj"]
    assert quantization_config(get_format("fp8_block"), ignore=kept) == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": kept,
    }


def test_bf16_needs_no_config():
    assert quantization_config(get_format("bf16"), ignore=IGNORE) is None


@pytest.mark.parametrize(
    "name", ["w4a16", "w3a16", "w2a16", "w5a16", "w6a16", "w7a16", "w8a16", "w4a8", "fp8_channel", "int8", "nvfp4"]
)
def test_compressed_tensors_reads_what_was_written(name):
    fmt = get_format(name)
    written = json.loads(json.dumps(quantization_config(fmt, ignore=IGNORE)))
    scheme = QuantizationConfig.model_validate(written).config_groups["group_0"]
    assert (scheme.weights.num_bits, scheme.weights.symmetric) == (fmt.num_bits, True)
    assert scheme.weights.group_size == (fmt.group_size or None)
    assert (scheme.input_activations is not None) == (fmt.activation_kind != "none")


def test_the_ignore_list_is_a_copy():
    ignore = list(IGNORE)
    config = quantization_config(get_format("w4a16"), ignore=ignore)
    ignore.append("later")
    assert config["ignore"] == IGNORE
