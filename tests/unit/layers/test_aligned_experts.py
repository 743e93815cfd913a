from dataclasses import fields

import pytest
import torch

from qarl_kernels import QuantizedWeight
from qarl_nemo.layers.experts import AlignedExperts
from qarl_nemo.layers.packed import PackedExperts, PackedWeight
from qarl_nemo.layers.weight import MasterChanges
from qarl_nemo.refit.publish import publish
from support import layers
from support.asserts import assert_bitwise_equal, assert_snr
from support.formats import FORMATS, quantized_activations
from support.layers import INNER, ExpertGradients, H, StackedExperts, T, closed_form, executed, routing

pytestmark = pytest.mark.usefixtures("poisoned_empty")

BACKWARDS = ["dequantized", "high_precision"]
DTYPES = [torch.float32, torch.bfloat16]
NAME = "model.layers.0.mlp.experts"


def make_layer(fmt, *, dtype=torch.float32, backward="dequantized"):
    return AlignedExperts(StackedExperts(dtype), fmt, MasterChanges(), name=NAME, backward=backward)


def min_db(fmt, dtype, part):
    # FP32 leaves 128 dB; BF16, which rounds fc1, SwiGLU, fc2 and their gradients, 45 dB. What is made of FP8 codes has
    # less: codes are formed from rounded numbers, and some of them fall the other way.
    codes = part in ("out", "router_weight") and fmt.activation_kind != "none"
    if dtype == torch.bfloat16:
        return 30 if codes else 40
    return 60 if codes else 100


def run(layer, dtype, *, size=1.0):
    index, router_weight = routing()
    x, router_weight = (size * torch.randn(T, H)).to(dtype).requires_grad_(), router_weight.requires_grad_()
    out = layer(x, index, router_weight)
    grad_out = torch.randn(T, H).to(dtype)
    out.backward(grad_out)
    actual = ExpertGradients(out, x.grad, layer.gate_up_proj.grad, layer.down_proj.grad, router_weight.grad)
    return actual, (x, index, router_weight, grad_out, layer.aligned["gate_up_proj"].format)


def weights_of(layer, backward):
    masters = layer.gate_up_proj, layer.down_proj
    if backward == "high_precision":
        return tuple(master.detach().double() for master in masters)
    return tuple(executed(master, layer.aligned["gate_up_proj"].format) for master in masters)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_gradients_are_the_straight_through_closed_form(fmt, backward, dtype):
    layer = make_layer(fmt, dtype=dtype, backward=backward)
    actual, inputs = run(layer, dtype)
    expected = closed_form(*inputs, weights_of(layer, "dequantized"), weights_of(layer, backward))
    for part in (field.name for field in fields(ExpertGradients)):
        assert_snr(getattr(actual, part), getattr(expected, part), min_db(fmt, dtype, part))
    # An INT8 weight is as near to its master as BF16 results are to their exact values.
    if dtype == torch.float32 or (fmt.is_quantized and fmt.weight_kind != "int8_rows"):
        other = "dequantized" if backward == "high_precision" else "high_precision"
        wrong = closed_form(*inputs, weights_of(layer, "dequantized"), weights_of(layer, other))
        for part in ("x", "gate_up"):
            with pytest.raises(AssertionError, match="SNR"):
                assert_snr(getattr(actual, part), getattr(wrong, part), min_db(fmt, dtype, part))


def test_small_swiglu_outputs_meet_the_floor_of_the_fused_kernel(monkeypatch):
    # Inputs of 2^-8 make SwiGLU outputs of 1e-5; over the floor 1 / 229376 these are FP8 codes around 2.
    layer = make_layer(FORMATS["fp8_block"])
    actual, inputs = run(layer, torch.float32, size=2.0**-8)
    forward = weights_of(layer, "dequantized")
    assert_snr(actual.out, closed_form(*inputs, forward, forward).out, 60)
    monkeypatch.setattr(layers, "quantized_activations", lambda x, fmt, **_: quantized_activations(x, fmt))
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(actual.out, closed_form(*inputs, forward, forward).out, 60)


def test_the_closed_form_is_the_finite_difference():
    """Without quantization, so that the loss is smooth: central differences along a random direction of each input."""
    fmt, (index, router_weight), grad_out = FORMATS["bf16"], routing(), torch.randn(T, H).double()
    point = [torch.randn(T, H), *(parameter.detach() for parameter in StackedExperts(torch.float32).parameters())]
    point = [*(tensor.double() for tensor in point), router_weight.double()]

    def evaluate(x, gate_up, down, weight):
        return closed_form(x, index, weight, grad_out, fmt, (gate_up, down), (gate_up, down))

    grads = evaluate(*point)
    for position, part in enumerate(("x", "gate_up", "down", "router_weight")):
        direction = torch.randn_like(point[position])
        losses = []
        for step in (1e-5, -1e-5):
            moved = [tensor + step * direction if at == position else tensor for at, tensor in enumerate(point)]
            losses.append((evaluate(*moved).out * grad_out).sum())
        slope = (losses[0] - losses[1]) / 2e-5
        assert (getattr(grads, part) * direction).sum().item() == pytest.approx(slope.item(), rel=1e-6)


@pytest.mark.parametrize("key", ["w4a16", "bf16"])
def test_the_layers_input_gradient_is_the_finite_difference_of_its_forward(key):
    layer, (index, router_weight) = make_layer(FORMATS[key], dtype=torch.float64), routing()
    x, direction = torch.randn(T, H, dtype=torch.float64, requires_grad=True), torch.randn(T, H).double()
    grad_out = torch.randn(T, H).double()

    def slope_of_gradient():
        (grad,) = torch.autograd.grad((layer(x, index, router_weight) * grad_out).sum(), x)
        return (grad * direction).sum().item()

    # The sum over experts is FP32: a step of 2^-10 keeps its rounding at 1e-4 of the difference.
    step = 2.0**-10
    with torch.no_grad():
        plus, minus = (layer(x + sign * step * direction, index, router_weight) for sign in (1, -1))
    slope = ((plus - minus) * grad_out).sum().item() / (2 * step)
    assert slope_of_gradient() == pytest.approx(slope, rel=1e-3)
    layer.backward = "high_precision"
    if key == "w4a16":
        assert slope_of_gradient() != pytest.approx(slope, rel=1e-3)


def test_an_expert_without_tokens_has_exactly_zero_gradient(fmt):
    layer = make_layer(fmt)
    actual, _ = run(layer, torch.float32)
    for grad in (actual.gate_up, actual.down):
        assert not grad[2].any()
        assert all(grad[expert].any() for expert in (0, 1, 3))


def test_no_tokens_at_all(fmt):
    layer, (index, router_weight) = make_layer(fmt), routing()
    out = layer(torch.zeros(0, H), index[:0], router_weight[:0])
    out.sum().backward()
    assert out.shape == (0, H)
    assert not layer.gate_up_proj.grad.any()
    assert not layer.down_proj.grad.any()


def packed_from(layer, dtype, *, keep_operand):
    """A receiver that holds nothing but what `publish` sent."""
    weights = {f"{NAME}.{proj}": weight for proj, weight in layer.aligned.items()}
    update = publish(weights, [], layer.aligned["gate_up_proj"].format, version=0)
    slots = []
    for proj, shape in (("gate_up_proj", (4, 2 * INNER, H)), ("down_proj", (4, H, INNER))):
        prefix = f"{NAME}.{proj}."
        tensors = {
            name.removeprefix(prefix): tensor.clone()
            for name, tensor in update.tensors.items()
            if name.startswith(prefix)
        }
        slots.append(PackedWeight(layer.aligned["gate_up_proj"].format, shape, dtype, keep_operand=keep_operand))
        weight = QuantizedWeight(layer.aligned["gate_up_proj"].format, shape, tensors)
        slots[-1].fill(weight, slots[-1].prepare(weight))
    return PackedExperts(*slots)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("keep_operand", "size"), [(True, 1.0), (True, 2.0**-8), (False, 1.0)])
def test_the_rollout_side_computes_the_same_bits(fmt, dtype, keep_operand, size):
    layer, (index, router_weight) = make_layer(fmt, dtype=dtype), routing()
    x = (size * torch.randn(T, H)).to(dtype)
    packed = packed_from(layer, dtype, keep_operand=keep_operand)
    assert not list(packed.parameters())
    assert_bitwise_equal(packed(x, index, router_weight), layer(x, index, router_weight).detach())
    # After an update that was not published the sides differ.
    with torch.no_grad():
        layer.down_proj *= 1.1
    layer.aligned["down_proj"].changes.bump()
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(packed(x, index, router_weight), layer(x, index, router_weight).detach())


def test_training_and_gradients_do_not_change_the_forward(fmt):
    layer, (index, router_weight) = make_layer(fmt, dtype=torch.bfloat16), routing()
    x = torch.randn(T, H).bfloat16()
    training = layer.train()(x, index, router_weight).detach()
    assert_bitwise_equal(layer.eval()(x, index, router_weight).detach(), training)
    with torch.no_grad():
        assert_bitwise_equal(layer(x, index, router_weight), training)


def test_router_weights_stay_in_fp32(fmt):
    """A weight that BF16 cannot hold changes the result, except where the engine rounds it to BF16 itself."""
    layer, (index, _) = make_layer(fmt, dtype=torch.bfloat16), routing()
    x = torch.randn(T, H).bfloat16()
    fine = torch.full((T, 2), 0.5 + 2.0**-10)
    assert not torch.equal(fine.bfloat16().float(), fine)
    same = torch.equal(layer(x, index, fine), layer(x, index, fine.bfloat16().float()))
    assert same == (fmt.router_weight == "rounded_product")


def test_an_unknown_backward_mode_names_the_legal_ones(fmt):
    with pytest.raises(ValueError, match="unknown backward mode 'ste'; legal: dequantized, high_precision"):
        make_layer(fmt, backward="ste")
