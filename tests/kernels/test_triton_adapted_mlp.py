"""The expert MLP with adapters on the kernels, against the torch reference and its autograd."""

import pytest
import torch

from qarl_kernels import GemmOperand, expert_mlp, get_format, route_rows
from qarl_kernels.low_rank import ExpertAdapters
from qarl_kernels.ops.adapted_mlp import adapted_mlp_backward, adapted_mlp_forward
from qarl_kernels.ops.weights import dequantize_operand, operand_from_weight
from qarl_kernels.weights import quantize_weight_reference
from support.asserts import assert_snr
from support.formats import moved, uneven_weight
from support.triton_interpreter import DEVICE, INTERPRETED

T, TOP_K, E, H, INNER = (6, 2, 3, 128, 128) if INTERPRETED else (300, 4, 16, 512, 384)
FORMATS = (
    ["w4a16", "fp8_channel"] if INTERPRETED else ["w4a16", "w4a8", "fp8_block", "fp8_channel", "int8", "nvfp4", "bf16"]
)


def make_case(fmt, rank):
    """Expert 2 gets no token."""
    x = torch.randn(T, H).bfloat16()
    index = torch.rand(T, E).index_fill(1, torch.tensor([2]), -1).topk(TOP_K).indices
    weight = torch.rand(T, TOP_K) + 0.1
    stored = [
        quantize_weight_reference(uneven_weight(E, *shape), fmt, name="w") for shape in ((2 * INNER, H), (H, INNER))
    ]
    factors = [
        (size**-0.5 * torch.randn(E, *shape)).bfloat16()
        for rows, columns in ((INNER, H), (INNER, H), (H, INNER))
        for size, shape in ((columns, (rank, columns)), (rank, (rows, rank)))
    ]
    return x, index, weight / weight.sum(-1, keepdim=True), stored, factors


def reference(x, index, weight, stored, factors):
    """On operands in x's dtype."""
    operands = (GemmOperand.from_weight(one, x.dtype) for one in stored)
    return expert_mlp(x, index, weight, *operands, ExpertAdapters.of(*factors))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernels_add_where_the_reference_does(name, rank):
    fmt = get_format(name)
    x, index, weight, stored, factors = make_case(fmt, rank)
    expected = reference(x, index, weight, stored, factors)
    operands = [operand_from_weight(moved(one, DEVICE)) for one in stored]
    routed = route_rows(index.to(DEVICE), E)

    def run(adapters):
        added = ExpertAdapters.of(*(factor.to(DEVICE) for factor in adapters))
        return adapted_mlp_forward(x.to(DEVICE), routed, weight.to(DEVICE), *operands, added)[0]

    # BF16 rounds fc1, SwiGLU, fc2 and both products of each adapter.
    min_db = 40 if fmt.activation_kind == "none" else 30
    assert_snr(run(factors), expected, min_db)
    for wrong in ([*factors[2:4], *factors[:2], *factors[4:]], [*factors[:5], factors[5].roll(1, 0)]):
        with pytest.raises(AssertionError, match="SNR"):
            assert_snr(run(wrong), expected, min_db)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 16] if not INTERPRETED else [1])
@pytest.mark.parametrize("name", ["w4a16"])
def test_the_backward_is_the_references_autograd(name, rank):
    fmt = get_format(name)
    x, index, weight, stored, factors = make_case(fmt, rank)
    grad_out = torch.randn(T, H).bfloat16()
    leaves = [tensor.float().requires_grad_() for tensor in (x, weight, *factors)]
    reference(leaves[0], index, leaves[1], stored, leaves[2:]).backward(grad_out.float())
    operands = [operand_from_weight(moved(one, DEVICE)) for one in stored]
    routed = route_rows(index.to(DEVICE), E)
    x, weight, grad_out = (tensor.to(DEVICE) for tensor in (x, weight, grad_out))
    adapters = ExpertAdapters.of(*(factor.to(DEVICE) for factor in factors))
    _, hidden = adapted_mlp_forward(x, routed, weight, *operands, adapters)
    weights = [dequantize_operand(operand) for operand in operands]
    grads = adapted_mlp_backward(grad_out, x, hidden, routed, weight, *weights, fmt, adapters)
    for actual, leaf in zip(grads, leaves, strict=True):
        assert actual.shape == leaf.shape
        # Every intermediate is rounded to BF16, in the reference none.
        assert_snr(actual, leaf.grad, 35)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(grads[2], leaves[4].grad, 35)
