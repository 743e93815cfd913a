"""What `mlp_time.py` times: the expert MLP of each format and of BF16 on the same rows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from moe_shapes import HIDDEN, INTERMEDIATE, TOP_K, MoeCase, expert_weights
from torch import Tensor

from qarl_kernels import (
    GemmOperand,
    QuantFormat,
    gemm_operand,
    get_format,
    quantize_weight,
    quantize_with_operand,
    route_rows,
)
from qarl_kernels.ops.grouped_gemm import grouped_gemm_bf16
from qarl_kernels.ops.mlp import expert_mlp_forward, mlp_rows, mlp_rows_backward
from qarl_kernels.ops.operand_gemm import quantize_rows
from qarl_kernels.ops.swiglu import swiglu
from qarl_kernels.ops.weights import dequantize_operand

FORMATS = ("w4a16", "w4a8", "fp8_channel", "fp8_block", "int8", "nvfp4")
Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]
Operands = tuple[GemmOperand, ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of one case.

    Attributes:
        case: the shape.
        x: [M, H] BF16 rows.
        grad: [M, H] BF16 gradient of the output rows.
        row_weight: [M] FP32.
        offsets: [E + 1] int32.
        weights: gate_up [E, 2 I, H] and down [E, H, I], BF16.
    """

    case: MoeCase
    x: Tensor
    grad: Tensor
    row_weight: Tensor
    offsets: Tensor
    weights: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, case: MoeCase) -> "Inputs":
        """Draw them."""
        torch.manual_seed(0)
        x, grad = (torch.randn(case.num_rows, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        weight = torch.rand(case.num_rows, device="cuda")
        return cls(case, x, grad, weight, case.offsets(), expert_weights(case.num_experts))


def bf16_calls(data: Inputs) -> dict[str, Callable[[], Any]]:
    """Return the baseline's calls."""
    fmt = get_format("bf16")
    hidden = grouped_gemm_bf16(data.x, data.weights[0], data.offsets)
    rows = (data.grad, data.x, hidden, data.offsets, data.row_weight)
    calls = {
        "eager": partial(eager_forward, data),
        "forward_torch": partial(bf16_forward, data, torch_grouped),
        "forward_triton": partial(bf16_forward, data, grouped_gemm_bf16),
        "fc1_torch": partial(torch_grouped, data.x, data.weights[0], data.offsets),
        "fc1_triton": partial(grouped_gemm_bf16, data.x, data.weights[0], data.offsets),
        "backward": partial(mlp_rows_backward, *rows, *data.weights, fmt),
    }
    if _has_tokens(data.case):
        calls["tokens"] = tokens_forward(data, fmt)
    return calls


def format_calls(name: str, data: Inputs) -> dict[str, Callable[[], Any]]:
    """Return one format's calls; rows are given in BF16."""
    fmt = get_format(name)
    operands = tuple(quantize_with_operand(weight, fmt)[1] for weight in data.weights)
    _, hidden = forward(data, fmt, operands)
    backward = partial(mlp_rows_backward, data.grad, data.x, hidden, data.offsets, data.row_weight)
    calls = {
        "quantize": lambda: [quantize_with_operand(weight, fmt) for weight in data.weights],
        "forward": partial(forward, data, fmt, operands),
        "backward": lambda: backward(*map(dequantize_operand, operands), fmt),
        "backward_high_precision": lambda: backward(*data.weights, fmt),
    }
    if _has_tokens(data.case):
        calls["tokens"] = tokens_forward(data, fmt)
    if name == "w4a16":
        calls["lean"] = partial(forward, data, fmt, packed_operands(data))
        calls["lean_quantize"] = lambda: [quantize_weight(weight, fmt) for weight in data.weights]
    return calls


def torch_grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply with torch's own grouped GEMM: x [M, K] by weight [E, N, K] -> [M, N]."""
    return torch.nn.functional.grouped_mm(x, weight.mT, offs=offsets[1:])


def eager_forward(data: Inputs) -> Tensor:
    """Run the expert MLP in plain torch, as a user would write it."""
    gate, up = torch_grouped(data.x, data.weights[0], data.offsets).chunk(2, dim=-1)
    rows = torch_grouped(torch.nn.functional.silu(gate) * up, data.weights[1], data.offsets)
    return (rows * data.row_weight[:, None]).to(torch.bfloat16)


def bf16_forward(data: Inputs, grouped: Grouped) -> Tensor:
    """Run the BF16 expert MLP with one grouped GEMM and our SwiGLU."""
    return grouped(swiglu(grouped(data.x, data.weights[0], data.offsets)), data.weights[1], data.offsets)


def forward(data: Inputs, fmt: QuantFormat, operands: Operands) -> tuple[Tensor, Tensor]:
    """Run the aligned expert MLP from BF16 rows."""
    return mlp_rows(quantize_rows(data.x, fmt), data.offsets, data.row_weight, *operands)


def _has_tokens(case: MoeCase) -> bool:
    return case.skew == "balanced" and case.num_experts >= TOP_K


def tokens_forward(data: Inputs, fmt: QuantFormat) -> Callable[[], Tensor]:
    """Return the layer's own call: tokens quantized, copied to their experts, multiplied, summed; routing given."""
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.rand(data.case.num_rows // TOP_K, data.case.num_experts, device="cuda", generator=generator)
    weight, index = scores.topk(TOP_K)
    x, routed = data.x[: len(scores)], route_rows(index, data.case.num_experts)
    operands = [quantize_with_operand(master, fmt)[1] for master in data.weights]
    return lambda: expert_mlp_forward(x, routed, weight, *operands)[0]


def packed_operands(data: Inputs) -> Operands:
    """Return w4a16 operands that the GEMM dequantizes itself."""
    stored = (quantize_weight(weight, get_format("w4a16")) for weight in data.weights)
    return tuple(gemm_operand(weight, torch.bfloat16, packed=True) for weight in stored)


def lean_scratch_fraction(data: Inputs) -> float:
    """Return the memory that unpacking w4a16 needs beyond a BF16 forward, over the larger of the layer's weights."""
    operands = packed_operands(data)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = forward(data, get_format("w4a16"), operands)
    # A BF16 forward holds fc1's and SwiGLU's outputs, too.
    rest = out.nbytes + 3 * INTERMEDIATE * len(data.x) * data.x.element_size()
    extra = torch.cuda.max_memory_allocated() - before - rest
    return max(extra, 0) / max(weight.nbytes for weight in data.weights)
