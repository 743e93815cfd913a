"""The expert MLP in two halves is the whole one, bit for bit, and differentiates to the same gradients."""

import pytest
import torch

from qarl_kernels import (
    combine_rows,
    expert_mlp,
    expert_rows,
    expert_rows_backward,
    gemm_operand,
    quantize_weight,
    route_rows,
    spread_rows,
)
from support.asserts import assert_bitwise_equal
from support.formats import uneven_weight

T, TOP_K, E, H, INNER = 24, 2, 4, 256, 128
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Case:
    """Routed tokens and experts, none of them expert 2's."""

    def __init__(self, fmt, device):
        self.fmt = fmt
        self.masters = [uneven_weight(E, 2 * INNER, H).to(device), uneven_weight(E, H, INNER).to(device)]
        self.operands = [gemm_operand(quantize_weight(master, fmt), torch.bfloat16) for master in self.masters]
        self.x = torch.randn(T, H).to(torch.bfloat16).to(device)
        self.grad = torch.randn(T, H).to(torch.bfloat16).to(device)
        self.index = torch.tensor([[0, 3] if token % 3 else [1, 0] for token in range(T)], device=device)
        weight = torch.rand(T, TOP_K, device=device) + 0.1
        self.weight = weight / weight.sum(-1, keepdim=True)
        self.routed = route_rows(self.index, E)
        self.rows = spread_rows(self.x, self.routed.inverse, TOP_K)
        self.row_weight = self.weight.flatten()[self.routed.order]

    def backward(self, hidden, into=None):
        grad_rows = spread_rows(self.grad, self.routed.inverse, TOP_K)
        return expert_rows_backward(
            grad_rows, self.rows, hidden, self.routed.offsets, self.row_weight, *self.masters, self.fmt, into
        )


@pytest.mark.parametrize("device", DEVICES)
def test_two_halves_are_the_whole(fmt, device):
    case = Case(fmt, device)
    rows, _ = expert_rows(case.rows, case.routed.offsets, case.row_weight, *case.operands)
    out = combine_rows(rows, case.routed.inverse, case.weight, fmt)
    assert_bitwise_equal(out, expert_mlp(case.x, case.index, case.weight, *case.operands))


@pytest.mark.parametrize("device", DEVICES)
def test_another_order_of_choices_is_another_sum(fmt, device):
    case = Case(fmt, device)
    rows, _ = expert_rows(case.rows, case.routed.offsets, case.row_weight, *case.operands)
    swapped = case.routed.inverse.view(T, TOP_K).flip(-1).flatten()
    out = combine_rows(rows, swapped, case.weight, fmt)
    same = combine_rows(rows, swapped, case.weight.flip(-1), fmt)
    expected = combine_rows(rows, case.routed.inverse, case.weight, fmt)
    # Two terms in either order are one sum, unless they are added with fused multiply-adds; wrong weights never are.
    assert fmt.router_weight == "weighted_sum" or torch.equal(same, expected)
    assert fmt.weights_rows or not torch.equal(out, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_weight_gradients_are_added_to_separate_buffers(fmt, device):
    case = Case(fmt, device)
    _, hidden = expert_rows(case.rows, case.routed.offsets, case.row_weight, *case.operands)
    *inputs, gate_up, down = case.backward(hidden)
    # As Megatron's distributed optimizer lays them out: FP32, last expert first.
    into = tuple([buffer[expert] for expert in reversed(range(E))] for buffer in _ones_like(gate_up, down))
    *same_inputs, _, _ = case.backward(hidden, into)
    for actual, expected in zip(same_inputs, inputs, strict=True):
        assert_bitwise_equal(actual, expected)
    for added, grads in zip(into, (gate_up, down), strict=True):
        assert not grads[2].any()
        assert torch.equal(added[2], torch.ones_like(added[2]))
        total = torch.stack(added) - 1
        torch.testing.assert_close(total, grads.float(), rtol=0.01, atol=0.01 * float(grads.float().abs().max()))


def _ones_like(*stacks):
    return [torch.ones(stack.shape, device=stack.device) for stack in stacks]


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_without_rows_has_zero_gradients(fmt, device):
    case = Case(fmt, device)
    case.rows, case.row_weight = case.rows[:0], case.row_weight[:0]
    case.grad, case.routed = case.grad[:0], route_rows(case.index[:0], E)
    rows, hidden = expert_rows(case.rows, case.routed.offsets, case.row_weight, *case.operands)
    assert rows.shape == (0, H)
    grad_x, grad_weight, gate_up, down = case.backward(hidden)
    assert (grad_x.shape, grad_weight.shape) == ((0, H), (0,))
    assert not gate_up.any()
    assert not down.any()


@pytest.mark.parametrize("device", DEVICES)
def test_experts_as_a_list_are_quantized_as_their_stack(fmt, device):
    stack = uneven_weight(E, INNER, H).to(device)
    separate = [stack[expert].clone() for expert in range(E)]
    expected = quantize_weight(stack, fmt)
    actual = quantize_weight(separate, fmt)
    assert actual.shape == expected.shape
    for suffix, tensor in expected.tensors.items():
        assert_bitwise_equal(actual.tensors[suffix], tensor)
