"""Adapters in an update: which tensors they are, their rank, and B as vLLM keeps it."""

import pytest
import torch

from qarl_formats import get_format
from qarl_nemo.refit.adapters import is_adapter, rank_of, scaled
from qarl_nemo.refit.engine_layout import plain_name
from qarl_nemo.refit.engine_methods import ChosenMethod, method_problems, quantized_targets
from qarl_nemo.refit.manifest import Manifest
from support.asserts import assert_bitwise_equal

LAYER = "model.layers.3"
QUERY, EXPERTS, NORM = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.experts.gate_proj", f"{LAYER}.input_layernorm.weight"


def update() -> dict[str, torch.Tensor]:
    shapes = {f"{QUERY}.lora_A": (8, 64), f"{QUERY}.lora_B": (32, 8),
              f"{EXPERTS}.lora_A": (4, 8, 64), f"{EXPERTS}.lora_B": (4, 16, 8)}  # fmt: skip
    tensors = {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    return tensors | {NORM: torch.ones(64).bfloat16()}


def test_factors_are_told_from_weights_and_have_a_rank():
    tensors = update()
    assert [name for name in tensors if not is_adapter(name)] == [NORM]
    manifest = Manifest.of([tensors], version=1, fmt="w4a16")
    assert rank_of(manifest) == 8
    assert rank_of(Manifest.of([{NORM: tensors[NORM]}], version=1, fmt="w4a16")) == 0


@pytest.mark.parametrize("scaling", [1.0, 2.0, 0.3])
def test_only_b_is_scaled_rounded_once_and_never_in_place(scaling):
    tensors = update()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    (found,) = scaled([tensors], scaling)
    for name, tensor in before.items():
        assert_bitwise_equal(tensors[name], tensor)
        # vLLM multiplies by a Python number: BF16 times FP32, rounded to BF16.
        expected = (tensor.float() * scaling).bfloat16() if name.endswith("lora_B.weight") else tensor
        assert_bitwise_equal(found[name], expected)


def test_layers_are_known_by_their_names_without_wrappers():
    assert plain_name(f"{LAYER}.self_attn.qkv_proj.base_layer") == f"{LAYER}.self_attn.qkv_proj"
    assert plain_name(f"{LAYER}.mlp.experts.base_layer.routed_experts") == f"{LAYER}.mlp.experts.routed_experts"
    assert plain_name(NORM) == NORM


def test_a_base_is_held_against_the_format_by_what_the_engine_runs():
    fmt = get_format("w4a16")
    chosen = [
        ChosenMethod(f"{LAYER}.self_attn.qkv_proj", "UnquantizedLinearMethod", ""),
        ChosenMethod(f"{LAYER}.mlp.experts.routed_experts", fmt.vllm.experts.method, "WNA16MoEBackend.MARLIN"),
    ]
    assert quantized_targets(chosen) == ["experts"]
    assert method_problems(chosen, fmt, quantized_targets(chosen)) == []
    (problem,) = method_problems(chosen, get_format("bf16"), quantized_targets(chosen))
    assert "in place of UnquantizedFusedMoEMethod" in problem


def test_kernels_that_take_no_adapters_are_those_of_cutlass():
    without = [name for name in ("w4a16", "w2a16", "w4a8", "fp8_block", "fp8_channel", "int8", "bf16")
               if not get_format(name).vllm.experts.adapters]  # fmt: skip
    assert without == ["w4a8", "fp8_channel"]
