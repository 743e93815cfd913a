"""The straight-through expert MLP: one autograd node around the fused kernels, or one per GEMM on the reference.

With c1 = [g, u] = fc1(x), a = silu(g) u, y = sum_k w_k fc2(a) and quantization counting as the identity:
da = dy W2, dw = da . a_q (a_q: what fc2 multiplied), [dg, du] = SwiGLU'(c1, w da), dx = [dg, du] W1,
dW2 = dy^T (w a), dW1 = [dg, du]^T x; `straight_through_weight` chooses W1 and W2. The reference takes dw from fc2's
own output, so under `high_precision` the two give router gradients that differ by the quantization error of W2.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qarl_kernels import RoutedRows, expert_mlp_reference, route_rows, runs_kernels
from qarl_kernels.low_rank import ExpertAdapters
from qarl_nemo.layers.autograd import aligned_grouped_gemm
from qarl_nemo.layers.weight import ExecutedWeight, straight_through_weight
from qarl_nemo.names import Backward


class _AlignedExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weight: Tensor,
        gate_up_master: Tensor | None,
        down_master: Tensor | None,
        gate_up: ExecutedWeight,
        down: ExecutedWeight,
        routed: RoutedRows,
        backward: Backward,
    ) -> Tensor:
        from qarl_kernels.ops.mlp import expert_mlp_forward

        out, hidden = expert_mlp_forward(x, routed, topk_weight, gate_up.operand(), down.operand())
        ctx.save_for_backward(x, topk_weight, hidden)
        ctx.gate_up, ctx.down, ctx.routed, ctx.backward_choice = gate_up, down, routed, backward
        ctx.changes = gate_up.changes.count
        return out

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override] torch's decorator takes the name of ctx away
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        from qarl_kernels.ops.adapted_mlp import adapted_mlp_backward
        from qarl_kernels.ops.mlp import expert_mlp_backward

        x, topk_weight, hidden = ctx.saved_tensors
        gate_up, down = ctx.gate_up, ctx.down
        assert ctx.changes == gate_up.changes.count, f"{gate_up.name} changed between forward and backward"
        gate_up_ran, down_ran = (straight_through_weight(one, ctx.backward_choice) for one in (gate_up, down))
        common = (gate_up_ran, down_ran, gate_up.format)
        if not any(ctx.needs_input_grad[2:4]):
            grads = adapted_mlp_backward(grad_out, x, hidden, ctx.routed, topk_weight, *common, None)
            return *grads, None, None, None, None, None, None
        grads = expert_mlp_backward(grad_out, x, hidden, ctx.routed, topk_weight, *common)
        return *grads, None, None, None, None


class _AdaptedExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weight: Tensor,
        gate_up: ExecutedWeight,
        down: ExecutedWeight,
        routed: RoutedRows,
        *factors: Tensor,
    ) -> Tensor:
        from qarl_kernels.ops.adapted_mlp import adapted_mlp_forward

        adapters = ExpertAdapters.of(*factors)
        out, hidden = adapted_mlp_forward(x, routed, topk_weight, gate_up.operand(), down.operand(), adapters)
        ctx.save_for_backward(x, topk_weight, hidden, *factors)
        ctx.gate_up, ctx.down, ctx.routed = gate_up, down, routed
        return out

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override] torch's decorator takes the name of ctx away
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        from qarl_kernels.ops.adapted_mlp import adapted_mlp_backward

        x, topk_weight, hidden, *factors = ctx.saved_tensors
        gate_up, down = (straight_through_weight(weight, "dequantized") for weight in (ctx.gate_up, ctx.down))
        weights = (gate_up, down, ctx.gate_up.format, ExpertAdapters.of(*factors))
        grad_x, grad_weight, *grads = adapted_mlp_backward(grad_out, x, hidden, ctx.routed, topk_weight, *weights)
        return grad_x, grad_weight, None, None, None, *grads


def aligned_expert_mlp(
    x: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    gate_up: ExecutedWeight,
    down: ExecutedWeight,
    *,
    backward: Backward = "dequantized",
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Run routed tokens through their quantized experts, straight-through in the backward.

    Args:
        x: [T, H].
        topk_index: [T, k] int64.
        topk_weight: [T, k] FP32 router weights.
        gate_up: [E, 2 I, H]; a frozen one has no gradient.
        down: [E, H, I], likewise.
        backward: which weights the input gradient uses.
        adapters: trained beside frozen weights; None without.

    Returns:
        [T, H] in x's dtype.

    Source: arXiv 2604.07853 section 3.1 (rollout-aligned forward, STE backward).
    """
    num_experts = gate_up.shape[0]
    if runs_kernels(x):
        routed = route_rows(topk_index, num_experts)
        if adapters is not None:
            masters = [gate_up.master] if isinstance(gate_up.master, Tensor) else gate_up.master or ()
            trained = torch.is_grad_enabled() and any(master.requires_grad for master in masters)
            assert not trained, "adapters are trained beside frozen weights"
            return _AdaptedExpertMlp.apply(x, topk_weight.float(), gate_up, down, routed, *adapters.flat())
        return _AlignedExpertMlp.apply(
            x, topk_weight.float(), gate_up.master, down.master, gate_up, down, routed, backward
        )

    def fc1(rows: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        return aligned_grouped_gemm(rows, gate_up, offsets, out_dtype=dtype, backward=backward)

    def fc2(rows: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        fused = adapters is None
        return aligned_grouped_gemm(
            rows, down, offsets, out_dtype=dtype, backward=backward, after_swiglu=fused, unscaled=True
        )

    fc2_scale = down.operand().tensor_scale
    return expert_mlp_reference(
        x, topk_index, topk_weight, fc1, fc2, gate_up.format, num_experts, adapters, fc2_scale=fc2_scale
    )
