"""Log-probabilities, entropy and their gradient from logits, each in one pass over a vocabulary.

With l = logits / temperature, m the largest l so far, S = sum exp(l - m) and T = sum exp(l - m) (l - m), a larger m'
changes T to exp(m - m') (T - (m' - m) S) and S to exp(m - m') S. At the end

    log Z = m + log S,   logprob = l[token] - m - log S,   entropy = log S - T / S

The gradient is (one-hot of the token - exp(l - log Z)) * grad / temperature. Its token's column is 1 - exp(logprob),
since log Z is rounded to its own size, which is that of the logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.exact_math import exp, log

_COLUMNS = 4096  # of one step, or of one program of the backward
_WARPS = 4
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _at_temperature(logits, temperature, SCALED: tl.constexpr):
    scaled = logits.to(tl.float32)
    if SCALED:
        scaled = tl.math.div_rn(scaled, temperature)
    return scaled


@triton.jit
def _logprobs_kernel(
    logits_ptr,  # [N, V]
    tokens_ptr,  # [N]
    logprobs_ptr,  # [N]
    entropy_ptr,  # [N]
    log_z_ptr,  # [N]
    V,
    temperature,
    SCALED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    chosen = _at_temperature(tl.load(row_ptr + tl.load(tokens_ptr + row)), temperature, SCALED)
    # A maximum that starts within the row makes no step differ from the others; a finite one, since inf - inf is NaN.
    largest = tl.maximum(chosen, _LOWEST)
    total = tl.zeros([COLUMNS], tl.float32)
    moment = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, V, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < V
        logits = tl.load(row_ptr + column, mask=inside, other=-float("inf"))
        scaled = _at_temperature(logits, temperature, SCALED)
        larger = tl.maximum(largest, tl.max(scaled, axis=0))
        below = scaled - larger
        weight = tl.exp(below)
        shrink = tl.exp(largest - larger)
        # A logit of -inf inside the row makes the entropy NaN, 0 * inf, as it does in the reference.
        moment = shrink * (moment - (larger - largest) * total) + tl.where(inside, weight * below, 0.0)
        total = shrink * total + weight
        largest = larger
    total_weight = tl.sum(total, axis=0)
    log_total = log(total_weight)
    tl.store(logprobs_ptr + row, (chosen - largest) - log_total)
    tl.store(entropy_ptr + row, log_total - tl.math.div_rn(tl.sum(moment, axis=0), total_weight))
    tl.store(log_z_ptr + row, largest + log_total)


@triton.jit
def _logprobs_backward_kernel(
    logits_ptr,  # [N, V], overwritten
    tokens_ptr,  # [N]
    logprobs_ptr,  # [N]
    log_z_ptr,  # [N]
    grad_ptr,  # [N]
    V,
    programs_per_row,
    temperature,
    SCALED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program // programs_per_row
    column = program % programs_per_row * COLUMNS + tl.arange(0, COLUMNS)
    to_logits = logits_ptr + row * V + column
    logits = tl.load(to_logits, mask=column < V, other=0.0)
    grad = tl.math.div_rn(tl.load(grad_ptr + row), temperature)
    probability = tl.exp(_at_temperature(logits, temperature, SCALED) - tl.load(log_z_ptr + row))
    chosen = (1.0 - exp(tl.load(logprobs_ptr + row))) * grad
    grad_logits = tl.where(column == tl.load(tokens_ptr + row), chosen, probability * (grad * -1.0))
    tl.store(to_logits, grad_logits.to(tl.bfloat16), mask=column < V)


def logprobs_kernel(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log_softmax(logits / temperature) of the tokens, the entropy and log Z, reading the logits once.

    Args:
        logits: [N, V] BF16, contiguous.
        tokens: [N] int64, each below V.
        temperature: sampling temperature.

    Returns:
        logprobs, entropy in nats and log Z = log sum exp(logits / temperature), each [N] FP32.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.
    """
    refuse("logprobs_kernel", _problems(logits, temperature, tokens=(tokens, torch.int64)))
    return _logprobs_op(logits, tokens, temperature)


def logprobs_backward_kernel(
    logits: Tensor, tokens: Tensor, logprobs: Tensor, log_z: Tensor, grad: Tensor, temperature: float
) -> None:
    """Overwrite logits with (one-hot of the token - softmax) * grad / temperature, rounded once.

    Args:
        logits: [N, V] BF16, contiguous; written.
        tokens: [N] int64.
        logprobs: [N] FP32 from `logprobs_kernel`.
        log_z: [N] FP32, likewise.
        grad: [N] FP32, the gradient of logprobs.
        temperature: sampling temperature.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.
    """
    floats = {
        name: (tensor, torch.float32) for name, tensor in (("logprobs", logprobs), ("log_z", log_z), ("grad", grad))
    }
    refuse("logprobs_backward_kernel", _problems(logits, temperature, tokens=(tokens, torch.int64), **floats))
    _logprobs_backward_op(logits, tokens, logprobs, log_z, grad, temperature)


def _problems(logits: Tensor, temperature: float, **rows: tuple[Tensor, torch.dtype]) -> list[str]:
    problems = tensor_problems("logits", logits, (torch.bfloat16,))
    if logits.dim() == 2 and not logits.shape[1]:
        problems.append("logits has 0 columns (legal: at least 1)")
    for name, (tensor, dtype) in rows.items():
        problems += tensor_problems(name, tensor, (dtype,), num_dims=1)
        if tensor.shape != logits.shape[:1]:
            problems.append(f"{name} has shape {list(tensor.shape)} (legal: {list(logits.shape[:1])})")
    if not temperature > 0:
        problems.append(f"temperature={temperature} (legal: above 0)")
    return problems


@torch.library.custom_op("qarl::logprobs", mutates_args=())
def _logprobs_op(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    outputs = _logprobs_fake(logits, tokens, temperature)
    num_rows, num_columns = logits.shape
    if num_rows:
        _logprobs_kernel[(num_rows,)](
            logits, tokens, *outputs, num_columns, temperature, temperature != 1.0, _COLUMNS, num_warps=_WARPS
        )
    return outputs


@_logprobs_op.register_fake
def _logprobs_fake(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    one, two, three = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
    return one, two, three


@torch.library.custom_op("qarl::logprobs_backward", mutates_args=("logits",))
def _logprobs_backward_op(
    logits: Tensor, tokens: Tensor, logprobs: Tensor, log_z: Tensor, grad: Tensor, temperature: float
) -> None:
    num_rows, num_columns = logits.shape
    programs = triton.cdiv(num_columns, _COLUMNS)
    if num_rows:
        _logprobs_backward_kernel[(num_rows * programs,)](
            logits, tokens, logprobs, log_z, grad, num_columns, programs, temperature, temperature != 1.0, _COLUMNS,
            num_warps=_WARPS,
        )  # fmt: skip


@_logprobs_backward_op.register_fake
def _(logits: Tensor, tokens: Tensor, logprobs: Tensor, log_z: Tensor, grad: Tensor, temperature: float) -> None: ...
