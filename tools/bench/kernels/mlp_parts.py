"""Where the expert MLP's time goes: each operator of BF16, the FP8 formats and int8 alone, taking turns, E = 128."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from device_time import interleaved_ms
from mlp_calls import Inputs, torch_grouped
from moe_shapes import MoeCase
from record import record
from torch import Tensor

from qarl_kernels import get_format, quantize_with_operand
from qarl_kernels.ops.grouped_gemm import grouped_gemm_bf16
from qarl_kernels.ops.operand_gemm import multiply_rows, quantize_rows, swiglu_rows
from qarl_kernels.ops.swiglu import swiglu
from qarl_nemo.metrics.results import Figure


def quantized_parts(name: str, data: Inputs, hidden: Tensor) -> dict[str, Callable[[], Any]]:
    """Return a format's operators in the order they run."""
    fmt = get_format(name)
    fc1, fc2 = (quantize_with_operand(weight, fmt)[1] for weight in data.weights)
    rows, activation = quantize_rows(data.x, fmt), swiglu_rows(hidden, fmt)
    row_weight = data.row_weight if fmt.router_weight == "on_accumulator" else None
    return {
        f"{name}_quantize_rows": partial(quantize_rows, data.x, fmt),
        f"{name}_fc1": partial(multiply_rows, rows, fc1, data.offsets),
        f"{name}_swiglu_quantize": partial(swiglu_rows, hidden, fmt),
        f"{name}_fc2": partial(multiply_rows, activation, fc2, data.offsets, row_weight=row_weight),
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="results file that receives the figures")
    options = parser.parse_args()
    data = Inputs.of(MoeCase(180224, 128, "balanced"))
    hidden = grouped_gemm_bf16(data.x, data.weights[0], data.offsets)
    activation = swiglu(hidden)
    parts = {
        "bf16_fc1_torch": partial(torch_grouped, data.x, data.weights[0], data.offsets),
        "bf16_fc1": partial(grouped_gemm_bf16, data.x, data.weights[0], data.offsets),
        "bf16_swiglu": partial(swiglu, hidden),
        "bf16_fc2": partial(grouped_gemm_bf16, activation, data.weights[1], data.offsets),
    }
    for name in ("fp8_channel", "fp8_block", "int8"):
        parts |= quantized_parts(name, data, hidden)
    times = interleaved_ms(parts)
    record((Figure(f"part_{name}_ms_e128", ms, "ms", "<=") for name, ms in times.items()), options.record)


if __name__ == "__main__":
    main()
