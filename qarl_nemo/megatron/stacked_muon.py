"""Megatron's Muon with stacks: matrices of one shape take their optimizer step together.

Megatron orthogonalizes one matrix after the other. A rank of Qwen3-30B-A3B has a thousand matrices of experts or more,
each with thirty kernels that leave most of a GPU idle. Emerging-Optimizers' Newton-Schulz iteration takes stacks, too,
since 0.3, so that everything here but the stacking is Megatron's own: momentum, weight decay, coefficients, scale and
precision.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qarl_nemo.megatron.param_groups import inner_optimizers

# FP32 of one stack: enough matrices to fill a GPU, while all that a step makes of them stays below one GiB.
_STACK_BYTES = 2**27


def stack_muon(optimizer: Any) -> int:
    """Make a Megatron optimizer's Muon step stacks of matrices; any other optimizer stays as it is.

    Args:
        optimizer: what `get_megatron_optimizer` returned; changed in place.

    Returns:
        The number of matrices that are stepped in stacks; none where Newton-Schulz takes no stacks.
    """
    count = 0
    inner: list[Any] = list(inner_optimizers(optimizer))
    for one in inner:
        # By name, because it is in another module before Megatron-core 0.20; the adaptive one has another rule.
        if type(one).__name__ == "TensorParallelMuon" and _takes_stacks(optimizer):
            one.step = functools.partial(_step, one, one.step)
            count += sum(_is_whole(one, matrix) for group in one.param_groups for matrix in group["params"])
    return count


def _takes_stacks(optimizer: Any) -> bool:
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    # Their kernel for symmetric products takes single matrices.
    if getattr(getattr(optimizer, "config", None), "muon_use_syrk", False):
        return False
    # Megatron-cores whose Muon has other attributes need an Emerging-Optimizers that lacks this.
    return hasattr(muon_utils, "batched_newton_schulz_step")


@torch.no_grad()
def _step(muon: Any, step_each: Any, closure: None = None) -> None:
    for group in muon.param_groups:
        muon._init_group(group)
        ready = [matrix for matrix in group["params"] if matrix.grad is not None and _is_whole(muon, matrix)]
        for stack in _stacks(ready):
            _step_stack(muon, group, stack)
    # Stepped matrices have no gradient any more, so this is for all others.
    step_each(closure)


def _step_stack(muon: Any, group: dict[str, Any], matrices: list[Any]) -> None:
    from emerging_optimizers.utils import fp32_matmul_precision

    gradients = [matrix.grad for matrix in matrices]
    moments = [muon.state[matrix]["momentum_buffer"] for matrix in matrices]
    for matrix, gradient in zip(matrices, gradients, strict=True):
        muon._apply_weight_decay_inplace(matrix, gradient, group["lr"], group["weight_decay"])
        matrix.grad = None
    torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
    stack = torch.stack(moments)
    if muon.nesterov:
        stack = torch.stack(gradients).lerp_(stack, group["momentum"])
    with fp32_matmul_precision(muon.fp32_matmul_prec):
        updates = muon.scaled_orthogonalize_fn(stack, None, None)
    torch._foreach_add_(matrices, updates.unbind(), alpha=-group["lr"])


def _stacks(matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    for same in by_shape.values():
        most = max(1, _STACK_BYTES // same[0].nbytes)
        yield from (same[start : start + most] for start in range(0, len(same), most))


def _is_whole(muon: Any, matrix: Tensor) -> bool:
    """Return whether Megatron orthogonalizes all that this rank has of a matrix as one, and nothing else with it."""
    if (muon.split_qkv and muon.is_qkv_fn(matrix)) or getattr(matrix, "is_gtp_weight_remat", False):
        return False
    if muon.tp_mode == "blockwise" or getattr(matrix, "partition_dim", -1) in (None, -1):
        return True
    groups = muon.pg_collection
    group = groups and (groups.expt_tp if getattr(matrix, "expert_tp", False) else groups.tp)
    return not group or group.size() == 1
