"""Expert MLP, forward and whole step, each format beside the best BF16 grouped GEMM of the same run.

A step is one micro-batch's forward and backward; weights are quantized once per optimizer step of 8 micro-batches, so
an eighth of the quantizer's time is part of every forward. `lean` keeps the packed tensors alone and unpacks them at
each use. BF16 is the faster of torch's grouped GEMM and ours, with our SwiGLU; `eager` is torch alone.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from device_time import copy_gb_s, dense_tflops, median_ms
from gate import require_green
from moe_shapes import HIDDEN, INTERMEDIATE, MoeCase, expert_weights
from record import Figure, record
from torch import Tensor

from qarl_kernels import GemmOperand, QuantFormat, gemm_operand, get_format, quantize_weight, quantize_with_operand
from qarl_kernels.ops.grouped_gemm import grouped_gemm_bf16
from qarl_kernels.ops.mlp import mlp_rows, mlp_rows_backward
from qarl_kernels.ops.operand_gemm import quantize_rows
from qarl_kernels.ops.swiglu import swiglu
from qarl_kernels.ops.weights import dequantize_operand

MICRO_BATCHES = 8
FORMATS = ("w4a16", "w4a8", "fp8_channel", "fp8_block")
FORWARD_GOAL = {"w4a16": 1.03, "w4a8": 0.65, "fp8_channel": 0.65, "fp8_block": 0.70}
STEP_GOAL = {"w4a16": 1.05, "w4a8": 0.85, "fp8_channel": 0.85, "fp8_block": 0.85}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of one case.

    Attributes:
        case: the shape.
        x: [M, H] BF16 rows.
        grad: [M, H] BF16 gradient of the output rows.
        row_weight: [M] FP32.
        offsets: [E + 1] int32.
        gate_up: [E, 2 I, H] BF16.
        down: [E, H, I] BF16.
    """

    case: MoeCase
    x: Tensor
    grad: Tensor
    row_weight: Tensor
    offsets: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, case: MoeCase) -> "Inputs":
        """Draw them."""
        torch.manual_seed(0)
        x, grad = (torch.randn(case.num_rows, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        weight = torch.rand(case.num_rows, device="cuda")
        return cls(case, x, grad, weight, case.offsets(), *expert_weights(case.num_experts))


def torch_grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply with torch's own grouped GEMM: x [M, K] by weight [E, N, K] -> [M, N]."""
    return torch.nn.functional.grouped_mm(x, weight.mT, offs=offsets[1:])


def eager_forward(data: Inputs) -> Tensor:
    """Run the expert MLP in plain torch, as a user would write it."""
    gate, up = torch_grouped(data.x, data.gate_up, data.offsets).chunk(2, dim=-1)
    rows = torch_grouped(torch.nn.functional.silu(gate) * up, data.down, data.offsets)
    return (rows * data.row_weight[:, None]).to(torch.bfloat16)


def bf16_forward(data: Inputs, grouped: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Run the BF16 expert MLP with one grouped GEMM."""
    return grouped(swiglu(grouped(data.x, data.gate_up, data.offsets)), data.down, data.offsets)


def best_bf16_ms(data: Inputs) -> float:
    """Return the faster of torch's and our grouped GEMM, with our SwiGLU between."""
    return min(median_ms(partial(bf16_forward, data, grouped)) for grouped in (torch_grouped, grouped_gemm_bf16))


def forward(
    data: Inputs, fmt: QuantFormat, operands: tuple[GemmOperand, GemmOperand], *, keep_hidden: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Run the aligned expert MLP from BF16 rows."""
    return mlp_rows(quantize_rows(data.x, fmt), data.offsets, data.row_weight, *operands, keep_hidden=keep_hidden)


def backward(data: Inputs, hidden: Tensor, fmt: QuantFormat, weights: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """Differentiate the aligned expert MLP."""
    mlp_rows_backward(data.grad, data.x, hidden, data.offsets, data.row_weight, *weights(), fmt)


def format_figures(data: Inputs, fmt: QuantFormat, bf16_ms: float, bf16_backward_ms: float) -> Iterator[Figure]:
    """Yield the figures of one format on one shape."""
    name, case = fmt.name, data.case
    masters = (data.gate_up, data.down)

    def quantize() -> list[tuple]:
        return [quantize_with_operand(weight, fmt) for weight in masters]

    share = median_ms(quantize) / MICRO_BATCHES
    operands = tuple(operand for _, operand in quantize())
    forward_ms = median_ms(lambda: forward(data, fmt, operands)) + share
    yield Figure(f"{name}_mlp_forward_ratio_{case.name}", forward_ms / bf16_ms, "", "<=", FORWARD_GOAL[name])
    yield Figure(f"{name}_mlp_forward_ms_{case.name}", forward_ms, "ms", "<=")
    yield Figure(f"{name}_mlp_forward_tflops_{case.name}", case.flops / forward_ms / 1e9, "TFLOP/s", ">=")
    _, hidden = forward(data, fmt, operands, keep_hidden=True)
    training_ms = median_ms(lambda: forward(data, fmt, operands, keep_hidden=True)) + share
    for mode, weights in (
        ("", lambda: tuple(dequantize_operand(operand) for operand in operands)),
        ("_high_precision", lambda: masters),
    ):
        step_ms = training_ms + median_ms(lambda weights=weights: backward(data, hidden, fmt, weights))
        prefix = "" if name.startswith("fp8") or name == "w4a16" else "fp8_"
        figure = f"{prefix}{name}_step_ratio{mode}_{case.name}"
        yield Figure(figure, step_ms / (bf16_ms + bf16_backward_ms), "", "<=", STEP_GOAL[name])
    if name == "w4a16":
        yield from lean_figures(data, fmt, bf16_ms)


def lean_figures(data: Inputs, fmt: QuantFormat, bf16_ms: float) -> Iterator[Figure]:
    """Yield w4a16's figures when only the packed tensors stay in memory."""
    stored = [quantize_weight(weight, fmt) for weight in (data.gate_up, data.down)]
    share = median_ms(lambda: [quantize_weight(weight, fmt) for weight in (data.gate_up, data.down)]) / MICRO_BATCHES
    operands = tuple(gemm_operand(weight, torch.bfloat16, packed=True) for weight in stored)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = forward(data, fmt, operands)
    # fc1's output and SwiGLU's are there in BF16, too: what remains is what quantization costs.
    hidden_bytes = 3 * INTERMEDIATE * len(data.x) * data.x.element_size()
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes - hidden_bytes
    scratch = (data.gate_up.nbytes, data.down.nbytes)
    yield Figure(f"w4a16_lean_scratch_fraction_{data.case.name}", max(extra, 0) / max(scratch), "", "<=", 1.0)
    forward_ms = median_ms(lambda: forward(data, fmt, operands)) + share
    yield Figure(f"w4a16_lean_mlp_forward_ratio_{data.case.name}", forward_ms / bf16_ms, "", "<=", 1.03)


def bf16_figures(data: Inputs, bf16_ms: float, bf16_backward_ms: float) -> Iterator[Figure]:
    """Yield the baseline's figures."""
    case = data.case
    yield Figure(f"bf16_mlp_forward_ms_{case.name}", bf16_ms, "ms", "<=")
    yield Figure(f"bf16_mlp_forward_tflops_{case.name}", case.flops / bf16_ms / 1e9, "TFLOP/s", ">=")
    yield Figure(f"bf16_mlp_backward_ms_{case.name}", bf16_backward_ms, "ms", "<=")
    yield Figure(
        f"bf16_eager_mlp_forward_ratio_{case.name}", median_ms(lambda: eager_forward(data)) / bf16_ms, "", "<="
    )
    for label, grouped in (("torch", torch_grouped), ("triton", grouped_gemm_bf16)):
        fc1_ms = median_ms(lambda grouped=grouped: grouped(data.x, data.gate_up, data.offsets))
        flops = 4 * case.num_rows * HIDDEN * INTERMEDIATE
        yield Figure(f"bf16_grouped_tflops_{label}_{case.name}", flops / fc1_ms / 1e9, "TFLOP/s", ">=")


def case_figures(case: MoeCase, formats: list[str]) -> Iterator[Figure]:
    """Yield every figure of one shape."""
    data, bf16 = Inputs.of(case), get_format("bf16")
    bf16_ms = best_bf16_ms(data)
    operands = tuple(GemmOperand(bf16, weight, None) for weight in (data.gate_up, data.down))
    _, hidden = forward(data, bf16, operands, keep_hidden=True)
    bf16_backward_ms = median_ms(lambda: backward(data, hidden, bf16, lambda: (data.gate_up, data.down)))
    yield from bf16_figures(data, bf16_ms, bf16_backward_ms)
    for name in formats:
        yield from format_figures(data, get_format(name), bf16_ms, bf16_backward_ms)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[180224, 16384])
    parser.add_argument("--experts", type=int, nargs="+", default=[128, 32, 16])
    parser.add_argument("--skew", nargs="+", default=["balanced", "zipf"], choices=["balanced", "zipf"])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--record", type=Path, help="results file that receives the figures")
    options = parser.parse_args()
    figures = [Figure(name, value, "dB", ">=", 45.0) for name, value in require_green([*options.formats]).items()]
    figures += [Figure("copy_gb_s", copy_gb_s(), "GB/s", ">="), Figure("dense_tflops", dense_tflops(), "TFLOP/s", ">=")]
    for rows in options.rows:
        for experts in options.experts:
            for skew in options.skew:
                figures += case_figures(MoeCase(rows, experts, skew), options.formats)
                torch.cuda.empty_cache()
    record(figures, "python kernels/benchmarks/mlp_time.py", options.record)


if __name__ == "__main__":
    main()
