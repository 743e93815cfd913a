"""Layers small enough to differentiate by hand, and that derivation in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qarl_kernels import GemmOperand, QuantFormat, quantize_weight
from support.formats import quantized_activations

T, TOP_K, E, H, INNER = 10, 2, 4, 256, 128


class StackedExperts(nn.Module):
    """What Hugging Face's experts hold: `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I]."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter((torch.randn(E, 2 * INNER, H) * H**-0.5).to(dtype))
        self.down_proj = nn.Parameter((torch.randn(E, H, INNER) * INNER**-0.5).to(dtype))


def routing() -> tuple[Tensor, Tensor]:
    """Chosen experts [T, k], none of them 2, and FP32 router weights that sum to one."""
    index = torch.stack([torch.tensor([0, 3] if token % 3 else [1, 0]) for token in range(T)])
    weight = torch.rand(T, TOP_K) + 0.1
    return index, weight / weight.sum(-1, keepdim=True)


def executed(master: Tensor, fmt: QuantFormat) -> Tensor:
    """The weight that a GEMM in `fmt` multiplies by, in float64."""
    return GemmOperand.from_weight(quantize_weight(master.detach(), fmt), torch.float32).effective_weight().double()


@dataclass
class ExpertGradients:
    """Output and gradients of `closed_form`."""

    out: Tensor
    x: Tensor
    gate_up: Tensor
    down: Tensor
    router_weight: Tensor


def closed_form(
    x: Tensor,
    index: Tensor,
    router_weight: Tensor,
    grad_out: Tensor,
    fmt: QuantFormat,
    forward: tuple[Tensor, Tensor],
    backward: tuple[Tensor, Tensor],
) -> ExpertGradients:
    """Differentiate the expert MLP by hand, one choice at a time, quantization counting as identity.

    With c1 = [g, u] = quant(x) F1^T, h = g sigmoid(g) u, c2 = quant(h) F2^T, y = sum_k w c2:
    dF2 = w dy^T h; dh = w dy B2; du = dh g sigmoid(g); dg = dh u sigmoid(g) (1 + g (1 - sigmoid(g)));
    dF1 = [dg, du]^T x; dx = [dg, du] B1; dw = dy . c2. F are the forward's weights, B the backward's.
    """
    x, grad_out, weight = x.detach().double(), grad_out.double(), router_weight.detach().double()
    grads = ExpertGradients(
        torch.zeros_like(x),
        torch.zeros_like(x),
        torch.zeros_like(forward[0]),
        torch.zeros_like(forward[1]),
        torch.zeros_like(weight),
    )
    x_quantized = quantized_activations(x, fmt)
    for token, choice in ((token, choice) for token in range(len(x)) for choice in range(index.shape[1])):
        expert = int(index[token, choice])
        gate, up = (forward[0][expert] @ x_quantized[token]).chunk(2)
        sigmoid = torch.sigmoid(gate)
        hidden = gate * sigmoid * up
        c2 = forward[1][expert] @ quantized_activations(hidden[None], fmt, after_swiglu=True)[0]
        grads.out[token] += weight[token, choice] * c2
        grads.router_weight[token, choice] = grad_out[token] @ c2
        grad_c2 = weight[token, choice] * grad_out[token]
        grads.down[expert] += torch.outer(grad_c2, hidden)
        grad_hidden = grad_c2 @ backward[1][expert]
        grad_gate = grad_hidden * up * sigmoid * (1 + gate * (1 - sigmoid))
        grad_c1 = torch.cat([grad_gate, grad_hidden * gate * sigmoid])
        grads.gate_up[expert] += torch.outer(grad_c1, x[token])
        grads.x[token] += grad_c1 @ backward[0][expert]
    return grads
