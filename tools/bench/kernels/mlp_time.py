"""Expert MLP, forward and whole step, each format beside the best BF16 grouped GEMM of the same run.

A step is one micro-batch's forward and backward; weights are quantized once per optimizer step of 8 micro-batches: an
eighth of the quantizer's time is part of every forward. BF16 is the faster of torch's grouped GEMM and ours, with our
SwiGLU and backward; `torch_ratio` is to torch's grouped GEMM, `eager` is plain torch. `lean` keeps the packed tensors
alone and unpacks them at each use. `tokens` starts from tokens instead of rows that were already copied to their
experts, and ends with their sums.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from device_time import copy_gb_s, dense_tflops, interleaved_ms
from gate import require_green
from mlp_calls import FORMATS, Inputs, bf16_calls, format_calls, lean_scratch_fraction
from moe_shapes import MoeCase
from record import record

from qarl_nemo.metrics.results import Figure

MICRO_BATCHES = 8
FORWARD_GOAL = {"w4a16": 1.03, "w4a8": 0.65, "fp8_channel": 0.65, "fp8_block": 0.70, "int8": 0.70, "nvfp4": 1.03}
STEP_GOAL = {"w4a16": 1.05, "w4a8": 0.85, "fp8_channel": 0.85, "fp8_block": 0.85, "int8": 0.85, "nvfp4": 1.05}


def bf16_figures(case: MoeCase, ms: dict[str, float]) -> Iterator[Figure]:
    """Yield the baseline's figures."""
    best = ms["bf16/forward"]
    yield Figure(f"bf16_mlp_forward_ms_{case.name}", best, "ms", "<=")
    yield Figure(f"bf16_mlp_forward_tflops_{case.name}", case.flops / best / 1e9, "TFLOP/s", ">=")
    yield Figure(f"bf16_mlp_backward_ms_{case.name}", ms["bf16/backward"], "ms", "<=")
    yield Figure(f"bf16_eager_mlp_forward_ratio_{case.name}", ms["bf16/eager"] / best, "", "<=")
    for library in ("torch", "triton"):
        rate = case.flops * 2 / 3 / ms[f"bf16/fc1_{library}"] / 1e9
        yield Figure(f"bf16_grouped_tflops_{library}_{case.name}", rate, "TFLOP/s", ">=")


def format_figures(name: str, case: MoeCase, ms: dict[str, float]) -> Iterator[Figure]:
    """Yield the figures of one format."""
    best, share = ms["bf16/forward"], ms[f"{name}/quantize"] / MICRO_BATCHES
    forward = ms[f"{name}/forward"] + share
    yield Figure(f"{name}_mlp_forward_ratio_{case.name}", forward / best, "", "<=", FORWARD_GOAL[name])
    yield Figure(f"{name}_mlp_forward_torch_ratio_{case.name}", forward / ms["bf16/forward_torch"], "", "<=")
    yield Figure(f"{name}_mlp_forward_ms_{case.name}", forward, "ms", "<=")
    yield Figure(f"{name}_mlp_forward_tflops_{case.name}", case.flops / forward / 1e9, "TFLOP/s", ">=")
    for mode in ("", "_high_precision"):
        step = forward + ms[f"{name}/backward{mode}"]
        ratio = f"{name}_step_ratio" if name in ("w4a16", "int8", "nvfp4") else f"fp8_step_ratio_{name}"
        figure = f"{ratio}{mode}_{case.name}"
        yield Figure(figure, step / (best + ms["bf16/backward"]), "", "<=", STEP_GOAL[name])
    if f"{name}/tokens" in ms:
        ratio = (ms[f"{name}/tokens"] + share) / ms["bf16/tokens"]
        yield Figure(f"{name}_mlp_tokens_forward_ratio_{case.name}", ratio, "", "<=")
    if f"{name}/lean" in ms:
        lean = ms[f"{name}/lean"] + ms[f"{name}/lean_quantize"] / MICRO_BATCHES
        yield Figure(f"{name}_lean_mlp_forward_ratio_{case.name}", lean / best, "", "<=")


def case_figures(case: MoeCase, formats: list[str]) -> Iterator[Figure]:
    """Yield every figure of one shape."""
    data = Inputs.of(case)
    calls = {f"bf16/{key}": call for key, call in bf16_calls(data).items()}
    for name in formats:
        calls |= {f"{name}/{key}": call for key, call in format_calls(name, data).items()}
    ms = interleaved_ms(calls)
    ms["bf16/forward"] = min(ms["bf16/forward_torch"], ms["bf16/forward_triton"])
    yield from bf16_figures(case, ms)
    for name in formats:
        yield from format_figures(name, case, ms)
    if "w4a16" in formats:
        yield Figure(f"w4a16_lean_scratch_fraction_{case.name}", lean_scratch_fraction(data), "", "<=", 1.0)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[180224, 16384])
    parser.add_argument("--experts", type=int, nargs="+", default=[128, 32, 16])
    parser.add_argument("--skew", nargs="+", default=["balanced", "zipf"], choices=["balanced", "zipf"])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--record", type=Path, help="results file that receives the figures")
    options = parser.parse_args()
    figures = [Figure(name, value, "dB", ">=", least) for name, value, least in require_green(options.formats)]
    figures += [Figure("copy_gb_s", copy_gb_s(), "GB/s", ">="), Figure("dense_tflops", dense_tflops(), "TFLOP/s", ">=")]
    for rows in options.rows:
        for experts in options.experts:
            for skew in options.skew:
                figures += case_figures(MoeCase(rows, experts, skew), options.formats)
                torch.cuda.empty_cache()
    record(figures, options.record)


if __name__ == "__main__":
    main()
