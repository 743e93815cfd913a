"""Adapters beside frozen weights: where they are added, how they round, what is differentiated, how they are named."""

import pytest
import torch
from torch import nn

from qarl_nemo.layers.frozen import FrozenBase, freeze
from qarl_nemo.layers.install import install
from qarl_nemo.layers.lora import Adapter, LoraSettings, adapters, add_adapters, peft_tensors
from qarl_nemo.layers.packed import PackedExperts
from support.asserts import assert_bitwise_equal, assert_snr
from support.engines import PROMPTS, W4A16_G32, tiny_model
from support.formats import FORMATS
from support.layers import E, H, T, routing

RANK = 8
TARGETS = ("experts", "attention")
EXPERTS = "model.layers.0.mlp.experts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def frozen_model(fmt=W4A16_G32, *, alpha=4.0, targets=TARGETS, dtype=torch.float32, seed=0, **sizes):
    model = tiny_model(dtype=dtype, **sizes)
    report = install(model, ("experts",), fmt, plain=("attention",))
    model.requires_grad_(False)
    freeze(model, report)
    add_adapters(model, LoraSettings(RANK, alpha, targets), seed=seed)
    return model


def fill(model, size=0.1):
    """Give B values, which start at zero."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = (size * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPTS[2]])).logits


# Not fp8_block: beside adapters the engine rounds SwiGLU, which it otherwise fuses with the quantizer.
@pytest.mark.parametrize("name", ["w4a16", "fp8_channel", "int8", "nvfp4", "bf16"])
def test_adapters_that_have_learned_nothing_leave_the_base_bit_for_bit(name):
    sizes = {"moe_intermediate_size": 256, "hidden_size": 256}
    base = tiny_model(**sizes)
    install(base, ("experts",), FORMATS[name], plain=("attention",))
    model = frozen_model(FORMATS[name], **sizes)
    assert_bitwise_equal(logits(model), logits(base))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(logits(fill(model)), logits(base))


def test_nothing_but_adapters_is_trained_and_no_master_remains():
    model = frozen_model()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".lora." in name}
    assert not [name for name, _ in model.named_parameters() if name.endswith(("gate_up_proj", "q_proj.weight"))]
    assert FrozenBase.of(model).weights.keys() == {
        f"model.layers.{layer}.{name}"
        for layer in range(2)
        for name in (*(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    }


def test_a_dense_layer_rounds_after_each_product_and_scales_b_in_its_dtype():
    model = fill(frozen_model(dtype=torch.bfloat16, alpha=3.0))
    layer = model.model.layers[0].self_attn.q_proj
    a, b = layer.lora.lora_A["weight"], layer.lora.lora_B["weight"]
    x = torch.randn(5, 128).bfloat16()
    # Rounded to BF16: A x, then B (alpha / r), then their product.
    inner = (x.float() @ a.float().mT).bfloat16().float()
    scaled = (b.float() * 3 / RANK).bfloat16().float()
    # The sums of a product run in another order, which moves a few results to a neighbour.
    assert (layer.lora(x) == (inner @ scaled.mT).bfloat16()).float().mean() > 0.9
    rounded_once = (x.float() @ a.float().mT @ b.float().mT * 3 / RANK).bfloat16()
    assert (layer.lora(x) == rounded_once).float().mean() < 0.8
    adapted, added = layer(x), layer.lora(x)
    layer.lora = None
    base = layer(x)
    assert_bitwise_equal(adapted, base + added)


def expert_layer(fmt, dtype=torch.float32):
    model = fill(frozen_model(fmt, dtype=dtype, hidden_size=H, moe_intermediate_size=128))
    return model.model.layers[0].mlp.experts


def merged_loop(layer, x, index, weight):
    """float64: every choice by itself, each expert with its own merged weights."""
    leaves = [(one.lora_A["weight"], one.lora_B["weight"]) for one in map(layer.lora.get_submodule, PROJECTIONS)]
    leaves = [tuple(factor.detach().double().requires_grad_() for factor in pair) for pair in leaves]
    deltas = [b @ a * layer.lora.gate_proj.scaling for a, b in leaves]
    gate_up, down = (layer.aligned[key].operand().effective_weight().double() for key in ("gate_up_proj", "down_proj"))
    gate_up, down = gate_up + torch.cat(deltas[:2], 1), down + deltas[2]
    rows = []
    for token in range(len(x)):
        choices = []
        for choice, expert in enumerate(index[token].tolist()):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            choices.append(weight[token, choice] * (down[expert] @ (nn.functional.silu(gate) * up)))
        rows.append(sum(choices))
    return torch.stack(rows), leaves


@pytest.mark.parametrize("name", ["w4a16_g32_narrow", "bf16"])
def test_every_expert_has_its_own_adapters_and_their_exact_gradients(name):
    layer, (index, weight) = expert_layer(FORMATS[name]), routing()
    x, grad_out = torch.randn(T, H), torch.randn(T, H)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    layer(leaves[0], index, leaves[1]).backward(grad_out)
    wide = x.double().requires_grad_(), weight.double().requires_grad_()
    out, factors = merged_loop(layer, *wide[:1], index, wide[1])
    out.backward(grad_out.double())
    # FP32 leaves 120 dB; the merged product of two rounded factors differs by that alone.
    assert_snr(layer(x, index, weight), out.detach(), 100)
    for mine, expected in zip(leaves, wide, strict=True):
        assert_snr(mine.grad, expected.grad, 100)
    for key, pair in zip(PROJECTIONS, factors, strict=True):
        adapter = layer.lora.get_submodule(key)
        for mine, expected in zip((adapter.lora_A["weight"], adapter.lora_B["weight"]), pair, strict=True):
            assert_snr(mine.grad, expected.grad, 100)
            # Expert 2 gets no token.
            assert not mine.grad[2].any()
            with pytest.raises(AssertionError, match="SNR"):
                assert_snr(mine.grad, expected.grad.roll(1, 0), 100)


def test_small_swiglu_outputs_beside_adapters_do_not_meet_the_floor_of_the_fused_kernel():
    # Activations of 2^-8 make SwiGLU outputs far below the fused kernel's floor 1 / 512, which the plain one lacks.
    layer, (index, weight) = expert_layer(FORMATS["fp8_block"]), routing()
    packed = PackedExperts(layer.aligned["gate_up_proj"], layer.aligned["down_proj"])
    packed.lora = layer.lora
    x = 2.0**-8 * torch.randn(T, H)
    adapted = layer(x, index, weight)
    assert_bitwise_equal(packed(x, index, weight), adapted)
    # FP8 with scales of its own; under the floor the numbers would be FP8's last bits.
    assert_snr(adapted, merged_loop(layer, x.double(), index, weight.double())[0].detach(), 25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["w4a16", "fp8_block", "fp8_channel", "int8", "nvfp4"])
def test_the_sampler_computes_the_same_bits(name, dtype):
    layer, (index, weight) = expert_layer(FORMATS[name], dtype), routing()
    packed = PackedExperts(layer.aligned["gate_up_proj"], layer.aligned["down_proj"])
    x = torch.randn(T, H).to(dtype)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(packed(x, index, weight), layer(x, index, weight))
    packed.lora = layer.lora
    assert_bitwise_equal(packed(x, index, weight), layer(x, index, weight))


def test_experts_that_are_alike_are_a_dense_mlp_with_its_adapters():
    layer, (index, weight) = expert_layer(FORMATS["bf16"]), routing()
    for slot in layer.aligned.values():
        for tensor in (slot.weight.tensors["weight"], slot._operand.values):
            tensor.copy_(tensor[:1].expand_as(tensor))
    for parameter in layer.lora.parameters():
        parameter.data.copy_(parameter[:1].expand_as(parameter))
    gate_up, down = (layer.aligned[key].operand().values[0] for key in ("gate_up_proj", "down_proj"))

    def dense(weight, adapter, x):
        linear = nn.Linear(*weight.T.shape, bias=False)
        linear.weight.data = weight
        a, b = adapter.factors()
        return linear(x) + x @ a[0].T @ b[0].T

    x = torch.randn(T, H)
    gate, up = (
        dense(half, getattr(layer.lora, key), x) for half, key in zip(gate_up.chunk(2), PROJECTIONS, strict=False)
    )
    expected = dense(down, layer.lora.down_proj, nn.functional.silu(gate) * up)
    assert_snr(layer(x, index, weight), expected.detach(), 90)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(layer(x, index, weight), dense(down, layer.lora.down_proj, nn.functional.silu(up) * gate), 90)


def test_adapters_are_named_as_peft_and_vllm_name_them():
    model = fill(frozen_model())
    named = {name: (a, b) for name, a, b in adapters(model)}
    dense = [f"model.layers.{layer}.self_attn.{x}_proj" for layer in range(2) for x in "qkvo"]
    experts = [
        f"model.layers.{layer}.mlp.experts.{e}.{key}" for layer in range(2) for e in range(E) for key in PROJECTIONS
    ]
    assert named.keys() == {*dense, *experts}
    stacked = model.get_parameter(f"{EXPERTS}.lora.up_proj.lora_B.weight")
    assert_bitwise_equal(named[f"{EXPERTS}.3.up_proj"][1], stacked[3].detach())
    files = peft_tensors(model)
    assert len(files) == 2 * len(named)
    assert files[f"base_model.model.{EXPERTS}.3.up_proj.lora_B.weight"].shape == (128, RANK)
    assert files["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (RANK, 128)


def test_seeds_decide_what_is_drawn_and_bounds_are_pefts():
    first, again, other = (
        dict(frozen_model(seed=seed).named_parameters())[f"{EXPERTS}.lora.up_proj.lora_A.weight"] for seed in (0, 0, 1)
    )
    assert_bitwise_equal(first.detach(), again.detach())
    assert not torch.equal(first, other)
    # Uniform on +-1 / sqrt(128); of 4096 draws the largest is within 1 % of the bound.
    assert 0.99 < first.abs().max() * 128**0.5 <= 1


def test_a_is_drawn_from_both_sides_of_zero_up_to_its_bound():
    adapter = Adapter((16, 64), LoraSettings(rank=8, alpha=8, targets=()), torch.float32, "cpu")
    adapter.draw(torch.Generator().manual_seed(0))
    a = adapter.lora_A["weight"].detach()
    # 512 values between -1/8 and 1/8.
    assert a.abs().max() <= 0.125
    assert a.min() < -0.1
    assert a.max() > 0.1
