"""Adapters in an update: which tensors they are, their rank, and B as vLLM keeps it."""

import re
from types import SimpleNamespace

import pytest
import torch

from qarl_formats import get_format
from qarl_nemo.refit.adapters import ADAPTER_ID, Adapters, is_adapter, rank_of, scaled
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


class Manager:
    """What is read of vLLM's manager on the second of two ranks: fused attention, o_proj and experts."""

    def __init__(self):
        qkv = SimpleNamespace(input_size=64, total_num_heads=4, total_num_kv_heads=2, head_size=16, v_head_size=8)
        dense = SimpleNamespace(input_size=48, output_size=64)
        sizes = SimpleNamespace(hidden_dim_unpadded=64, intermediate_size_per_partition_unpadded=12)
        experts = {"moe_config": sizes, "tp_size": 2, "global_num_experts": 6, "w13_lora_a_stacked": ()}
        shard = {"use_ep": True, "ep_rank": 1, "local_num_experts": 3}
        wrappers = {
            f"{LAYER}.self_attn.qkv_proj": SimpleNamespace(base_layer=qkv),
            f"{LAYER}.self_attn.o_proj": SimpleNamespace(base_layer=dense),
            f"{LAYER}.mlp.experts": SimpleNamespace(**experts, **shard),
        }
        self.modules, self.written = wrappers, {}
        for name, wrapper in wrappers.items():
            wrapper.set_lora = lambda *arguments, name=name: self.written.update({name: arguments})
        self.lora_config = SimpleNamespace(max_lora_rank=8, lora_dtype=torch.bfloat16)
        self._registered_adapters, self.lora_index_to_id = {ADAPTER_ID: "kept"}, [None, ADAPTER_ID]

    def activate_adapter(self, number):
        assert (number, self._registered_adapters) == (ADAPTER_ID, {ADAPTER_ID: "kept"})


def test_an_engines_factors_have_the_shapes_of_whole_layers():
    shapes = {}
    for name, (shape, dtype) in Adapters(Manager()).layout(8).items():
        assert dtype == torch.bfloat16
        shapes.setdefault(name.removeprefix(f"{LAYER}.").partition(".lora_")[0], []).append(shape)
    assert shapes == {
        "self_attn.q_proj": [(8, 64), (64, 8)],
        "self_attn.k_proj": [(8, 64), (32, 8)],
        "self_attn.v_proj": [(8, 64), (16, 8)],
        "self_attn.o_proj": [(8, 48), (64, 8)],
        "mlp.experts.gate_proj": [(6, 8, 64), (6, 24, 8)],
        "mlp.experts.down_proj": [(6, 8, 24), (6, 64, 8)],
        "mlp.experts.up_proj": [(6, 8, 64), (6, 24, 8)],
    }


@pytest.mark.parametrize(("rank", "problem"), [(8, []), (9, ["its adapters have rank 9, .*max_lora_rank=8"])])
def test_an_engine_takes_adapters_up_to_its_rank(rank, problem):
    tensors = {f"{EXPERTS}.lora_A.weight": torch.zeros(6, rank, 64)}
    found = Adapters(Manager()).problems(Manifest.of([tensors], version=1, fmt="w4a16"))
    assert len(found) == len(problem)
    assert all(re.fullmatch(pattern, text) for pattern, text in zip(problem, found, strict=True))


def test_a_rank_keeps_its_own_experts_and_the_whole_of_other_layers():
    manager = Manager()
    adapters = Adapters(manager)
    experts, dense = torch.arange(6).view(6, 1, 1), torch.arange(8).view(8, 1)
    assert adapters.part(f"{EXPERTS}.lora_A.weight", experts).flatten().tolist() == [3, 4, 5]
    assert adapters.part(f"{QUERY}.lora_A.weight", dense) is dense
    manager.modules[f"{LAYER}.mlp.experts"].use_ep = False
    assert adapters.part(f"{EXPERTS}.lora_A.weight", experts) is experts


def test_factors_are_written_in_the_order_of_a_layers_parts_whatever_order_they_came_in():
    manager = Manager()
    adapters = Adapters(manager)
    factors = {name: torch.zeros(shape) for name, (shape, _) in reversed(adapters.layout(8).items())}
    adapters.install(factors)
    for module, names in {
        f"{LAYER}.self_attn.qkv_proj": [f"{LAYER}.self_attn.{one}_proj" for one in "qkv"],
        f"{LAYER}.mlp.experts": [f"{LAYER}.mlp.experts.{one}_proj" for one in ("gate", "down", "up")],
    }.items():
        place, *sides = manager.written[module]
        assert place == 1
        for letter, side in zip("AB", sides, strict=True):
            assert all(one is factors[f"{name}.lora_{letter}.weight"] for one, name in zip(side, names, strict=True))
    alone = f"{LAYER}.self_attn.o_proj"
    _, a, b = manager.written[alone]
    assert a is factors[f"{alone}.lora_A.weight"]
    assert b is factors[f"{alone}.lora_B.weight"]
