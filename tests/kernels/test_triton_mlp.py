"""The expert MLP on the kernels, forward and backward, against the torch reference and against float64 autograd."""

import pytest
import torch

from qarl_kernels import GemmOperand, expert_mlp, get_format, route_rows
from qarl_kernels.fp8 import encode_int4_as_fp8
from qarl_kernels.ops.adapted_mlp import adapted_mlp_backward
from qarl_kernels.ops.mlp import expert_mlp_backward, expert_mlp_forward
from qarl_kernels.ops.weights import dequantize_operand, operand_from_weight, quantize_with_operand
from qarl_kernels.weights import quantize_weight_reference
from support.asserts import assert_bitwise_equal, assert_snr
from support.formats import moved, uneven_weight
from support.triton_interpreter import DEVICE, INTERPRETED

T, TOP_K, E, H, INNER = (12, 2, 4, 256, 128) if INTERPRETED else (300, 4, 16, 512, 384)
# Tensor cores sum FP8 products in a shorter accumulator than the reference's FP32: last bits of fc1 differ and move FP8
# codes of fc2's input by one.
MIN_DB = {"none": 45, "fp8_token": 34, "fp8_group": 38, "int8_token": 45}


def make_case(fmt):
    """Expert 2 gets no token, expert 0 most; router weights sum to one."""
    x = torch.randn(T, H).bfloat16()
    index = torch.rand(T, E).index_fill(1, torch.tensor([2]), -1).topk(TOP_K).indices
    index[: T // 2, 0] = 0
    index[: T // 2, 1] = 3
    weight = torch.rand(T, TOP_K) + 0.1
    shapes = ((2 * INNER, H), (H, INNER))
    stored = [quantize_weight_reference(3 * uneven_weight(E, *shape), fmt, name="w") for shape in shapes]
    return x, index, weight / weight.sum(-1, keepdim=True), stored


def reference(x, index, weight, stored):
    return expert_mlp(x, index, weight, *(GemmOperand.from_weight(one, torch.bfloat16) for one in stored))


def operands_of(stored, *, packed=False):
    """The GEMMs' operands: from the kernels, but where the interpreter would take most of the test's time for them."""
    if INTERPRETED and stored[0].format.name == "w4a8":
        # The kernels give the same bits: test_triton_integer.py.
        encoded = (encode_int4_as_fp8(one.codes(), one.tensors["weight_scale"]) for one in stored)
        return [GemmOperand(stored[0].format, *one) for one in encoded]
    return [operand_from_weight(moved(one, DEVICE), packed=packed) for one in stored]


def forward(x, index, weight, operands):
    return expert_mlp_forward(x.to(DEVICE), route_rows(index.to(DEVICE), E), weight.to(DEVICE), *operands)


@pytest.mark.usefixtures("poisoned_empty")
def test_the_forward_is_the_references(fmt):
    x, index, weight, stored = make_case(fmt)
    expected = reference(x, index, weight, stored)
    operands = operands_of(stored)
    out, hidden = forward(x, index, weight, operands)
    assert (out.shape, out.dtype, hidden.shape) == ((T, H), torch.bfloat16, (T * TOP_K, 2 * INNER))
    assert_snr(out, expected, MIN_DB[fmt.activation_kind])
    gate_and_up_swapped = quantize_weight_reference(stored[0].dequantize().roll(INNER, -2), fmt, name="w")
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(forward(x, index, weight, operands_of([gate_and_up_swapped, stored[1]]))[0], expected, 20)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(forward(x, index, weight.flip(-1), operands)[0], expected, 20)


@pytest.mark.parametrize(
    ("name", "group_size"), [("w4a16", 128), ("w4a16", 32), pytest.param("nvfp4", None, marks=pytest.mark.slow)]
)
def test_packed_weights_multiply_to_the_same(name, group_size):
    fmt = get_format(name, group_size=group_size)
    x, index, weight, stored = make_case(fmt)
    expected = reference(x, index, weight, stored)
    operands = operands_of(stored, packed=True)
    assert_snr(forward(x, index, weight, operands)[0], expected, 45)
    assert_bitwise_equal(dequantize_operand(operands[1]).cpu(), stored[1].dequantize())
    stored[0].tensors["weight_packed"] ^= 1
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(forward(x, index, weight, operands_of(stored, packed=True))[0], expected, 20)


def by_autograd(x, index, weight, operands, grad_out):
    """float64 autograd through the dequantized weights, on unquantized activations."""
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight, *operands)]
    rows, router, gate_up, down = leaves
    out = torch.zeros(T, H, dtype=torch.float64)
    for choice in range(TOP_K):
        expert = index[:, choice]
        gate, up = torch.einsum("th,tnh->tn", rows, gate_up[expert]).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        out = out + router[:, choice, None] * torch.einsum("ti,thi->th", hidden, down[expert])
    out.backward(grad_out.double())
    return [leaf.grad for leaf in leaves]


def test_the_backward_is_straight_through(fmt):
    x, index, weight, stored = make_case(fmt)
    grad_out = torch.randn(T, H).bfloat16()
    operands = operands_of(stored)
    weights = [dequantize_operand(operand) for operand in operands]
    expected = by_autograd(x, index, weight, [w.cpu() for w in weights], grad_out)
    routed = route_rows(index.to(DEVICE), E)
    x, weight, grad_out = (tensor.to(DEVICE) for tensor in (x, weight, grad_out))
    _, hidden = expert_mlp_forward(x, routed, weight, *operands)
    grads = expert_mlp_backward(grad_out, x, hidden, routed, weight, *weights, fmt)
    # BF16 rounds every intermediate; FP8 activations move fc1's output, at which SwiGLU is differentiated, by 30 dB,
    # and these weights, larger than a model's, amplify it.
    min_db = {"none": 40, "int8_token": 30}.get(fmt.activation_kind, 23)
    for actual, reference_grad in zip(grads, expected, strict=True):
        assert actual.shape == reference_grad.shape
        assert_snr(actual, reference_grad, min_db)
    if fmt.activation_kind == "none":
        frozen = adapted_mlp_backward(grad_out, x, hidden, routed, weight, *weights, fmt, None)
        for actual_frozen, actual_trained in zip(frozen, grads[:2], strict=True):
            assert_bitwise_equal(actual_frozen, actual_trained)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(actual * 1.09, reference_grad, min_db)
    assert not any(grad[2].any() for grad in grads[2:])


def test_one_pass_makes_the_stored_weight_and_the_operand(fmt):
    if not fmt.is_quantized:
        pytest.skip("quantized by the reference")
    weight = uneven_weight(2, 24, H) if INTERPRETED else uneven_weight(E, 2 * INNER, H)
    expected = quantize_weight_reference(weight, fmt, name="w")
    quantized, operand = quantize_with_operand(weight.to(DEVICE), fmt)
    for suffix, tensor in expected.tensors.items():
        assert_bitwise_equal(quantized.tensors[suffix], tensor)
    other = operand_from_weight(moved(expected, DEVICE))
    assert_bitwise_equal(operand.values, other.values.cpu() if INTERPRETED else other.values)
    assert_bitwise_equal(dequantize_operand(operand), dequantize_operand(other))


@pytest.mark.gpu
def test_a_cuda_graph_replays_it_without_waiting_for_the_device(fmt):
    x, index, weight, stored = make_case(fmt)
    operands = [operand_from_weight(moved(one, DEVICE)) for one in stored]
    x, index, weight = x.cuda(), index.cuda(), weight.cuda()
    grad_out = torch.randn_like(x)
    weights = [dequantize_operand(operand) for operand in operands]

    def step():
        routed = route_rows(index, E)
        out, hidden = expert_mlp_forward(x, routed, weight, *operands)
        grad_x, _, grad_gate_up, _ = expert_mlp_backward(grad_out, x, hidden, routed, weight, *weights, fmt)
        return out, grad_x, grad_gate_up

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(torch.randn_like(x))
    index.copy_(index.flip(-1))
    graph.replay()
    for replayed, eager in zip(captured, step(), strict=True):
        assert_bitwise_equal(replayed, eager)


@pytest.mark.gpu
def test_torch_compile_sees_through_the_operators(fmt):
    x, index, weight, stored = make_case(fmt)
    operands = [operand_from_weight(moved(one, DEVICE)) for one in stored]
    x, index, weight = x.cuda(), index.cuda(), weight.cuda()

    def run(x, index, weight):
        return expert_mlp_forward(x, route_rows(index, E), weight, *operands)[0]

    compiled = torch.compile(run, fullgraph=True)
    assert_bitwise_equal(compiled(x, index, weight), run(x, index, weight))
