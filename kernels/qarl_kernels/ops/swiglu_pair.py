"""SwiGLU of a dense MLP, whose gate and up projections are two tensors, and its gradients; FP32 inside.

Forward: A = bf16(bf16(silu(gate)) * up), as `swiglu.py` and the engine round it. Backward, with s = sigmoid(gate), each
rounded once:

    d gate = dA up s (1 + gate (1 - s)),   d up = dA gate s
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.ops.activations import rounded_swiglu
from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.exact_math import exp
from qarl_kernels.ops.launch import is_watched

_ELEMENTS = 2048  # of one program


@triton.jit
def _swiglu_pair_kernel(gate_ptr, up_ptr, out_ptr, count, ELEMENTS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = place < count
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0)
    up = tl.load(up_ptr + place, mask=inside, other=0.0)
    tl.store(out_ptr + place, rounded_swiglu(gate, up), mask=inside)


@triton.jit
def _swiglu_pair_backward_kernel(grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, count, ELEMENTS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = place < count
    grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + exp(-gate))
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_gate_ptr + place, (grad * up * slope).to(tl.bfloat16), mask=inside)
    tl.store(grad_up_ptr + place, (grad * (gate * sigmoid)).to(tl.bfloat16), mask=inside)


def swiglu_pair_kernel(gate: Tensor, up: Tensor) -> Tensor:
    """Return A = bf16(bf16(silu(gate)) * up).

    Args:
        gate: [..., I] BF16, contiguous.
        up: likewise.

    Returns:
        [..., I] BF16.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.

    Source: vLLM 0.25.1 csrc/libtorch_stable/activation_kernels.cu.
    """
    refuse("swiglu_pair_kernel", _problems(gate, up=up))
    return (_swiglu_pair_op if is_watched() else _launch)(gate, up)


def swiglu_pair_backward_kernel(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of A = silu(gate) * up; formulas in the module's docstring.

    Args:
        grad: [..., I] BF16, contiguous.
        gate: likewise.
        up: likewise.

    Returns:
        Gradients of gate and up, [..., I] BF16.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.
    """
    refuse("swiglu_pair_backward_kernel", _problems(gate, up=up, grad=grad))
    return (_swiglu_pair_backward_op if is_watched() else _launch_backward)(grad, gate, up)


def _problems(gate: Tensor, **others: Tensor) -> list[str]:
    problems = tensor_problems("gate", gate, (torch.bfloat16,), gate.dim())
    for name, tensor in others.items():
        problems += tensor_problems(name, tensor, (torch.bfloat16,), gate.dim())
        if tensor.shape != gate.shape:
            problems.append(f"{name} has shape {list(tensor.shape)} (legal: {list(gate.shape)})")
    return problems


def _launch(gate: Tensor, up: Tensor) -> Tensor:
    out, count = torch.empty_like(gate), gate.numel()
    if count:
        _swiglu_pair_kernel[(triton.cdiv(count, _ELEMENTS),)](gate, up, out, count, _ELEMENTS)
    return out


def _launch_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    if count:
        grid = (triton.cdiv(count, _ELEMENTS),)
        _swiglu_pair_backward_kernel[grid](grad, gate, up, grad_gate, grad_up, count, _ELEMENTS)
    return grad_gate, grad_up


_swiglu_pair_op = torch.library.custom_op("qarl::swiglu_pair", _launch, mutates_args=())
_swiglu_pair_backward_op = torch.library.custom_op("qarl::swiglu_pair_backward", _launch_backward, mutates_args=())


@_swiglu_pair_op.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(gate)


@_swiglu_pair_backward_op.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(gate), torch.empty_like(up)
