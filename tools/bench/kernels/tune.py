"""Times the tiles of every grouped GEMM on this GPU and writes the fastest to `ops/tuned/<device name>.json`.

python tools/bench/kernels/tune.py [--ops bf16 wgrad ...] [--experts 1 16 32 128] [--rows 16384 180224]

Rows are balanced over the experts. Times are medians of device events; a tile with a wrong result is left out.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton
from device_time import median_ms
from moe_shapes import HIDDEN, INTERMEDIATE, MoeCase
from torch import Tensor

import qarl_kernels.ops
from qarl_kernels import fp8, int8, integer
from qarl_kernels.ops.grouped_gemm import launch_grouped_gemm, launch_grouped_gemm_fp8_block
from qarl_kernels.ops.int4_gemm import launch_grouped_gemm_int4
from qarl_kernels.ops.launch import TileConfig, problem_key, table_name
from qarl_kernels.ops.wgrad import launch_grouped_wgrad

_MAX_RELATIVE_ERROR = 10 ** (-45 / 20)

_DEEP = TileConfig(num_stages=4, epilogue_split=4)
_TWO_PER_SM = TileConfig(block_n=128, num_warps=4, programs_per_sm=2, epilogue_split=2)
_GEMM = [
    *(replace(tile, group_m=group) for tile in (TileConfig(), _DEEP) for group in (1, 8)),
    replace(TileConfig(), epilogue_split=2),
    _TWO_PER_SM,
    replace(_TWO_PER_SM, block_m=64, num_stages=4),
]
_SMALL = TileConfig(64, 128, 128, 4, 4, 2, epilogue_split=2)
_FP8_BLOCK = [
    TileConfig(block_n=128, block_k=128, num_stages=4),
    TileConfig(block_n=128, block_k=128, num_stages=5, epilogue_split=2),
    *(replace(_SMALL, group_m=group, flatten=flat) for group in (1, 8, 16) for flat in (True, False)),
    replace(_SMALL, epilogue_split=1),
]
_WGRAD = [
    *(replace(tile, group_m=group) for tile in (TileConfig(epilogue_split=2), _DEEP) for group in (4, 16)),
    _TWO_PER_SM,
    replace(_TWO_PER_SM, num_stages=2, programs_per_sm=3),
    replace(_TWO_PER_SM, num_warps=8),
    replace(_TWO_PER_SM, programs_per_sm=0),
]
_INT4_BASE = TileConfig(block_n=128, programs_per_sm=2, epilogue_split=2)
_INT4 = [
    *(replace(_INT4_BASE, group_m=group, flatten=flat) for group in (1, 8) for flat in (True, False)),
    replace(_INT4_BASE, num_stages=4),
    replace(_INT4_BASE, block_k=128, programs_per_sm=1),
    replace(_INT4_BASE, block_n=256, programs_per_sm=1),
    *(replace(_INT4_BASE, block_m=64, num_warps=4, programs_per_sm=programs) for programs in (2, 3)),
]
CANDIDATES = {
    "bf16": _GEMM,
    "bf16_transposed": _GEMM,
    "fp8_channel": [replace(tile, block_k=128) for tile in _GEMM],
    "int8": [replace(tile, block_k=128) for tile in _GEMM],
    "fp8_block": _FP8_BLOCK,
    "int4": _INT4,
    "wgrad": _WGRAD,
    "wgrad_fp32": [replace(tile, epilogue_split=4, num_stages=min(tile.num_stages, 3)) for tile in _WGRAD],
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one shape, their BF16 product for comparison, and how to run each operator.

    Attributes:
        x: [M, K] BF16.
        grad: [M, N] BF16.
        weight: [E, N, K] BF16.
        offsets: [E + 1] int32.
    """

    x: Tensor
    grad: Tensor
    weight: Tensor
    offsets: Tensor

    def runner(self, op: str) -> tuple[Callable[[TileConfig], Tensor], Tensor]:
        """Return what runs `op` with a tile, and the result to compare its output with.

        Args:
            op: a key of `CANDIDATES`.
        """
        x, grad, weight, offsets = self.x, self.grad, self.weight, self.offsets
        out = torch.empty(len(x), weight.shape[1], dtype=torch.bfloat16, device="cuda")
        if op == "bf16":
            return lambda tile: launch_grouped_gemm(x, weight, offsets, out, tile), self._product(x, weight)
        if op == "bf16_transposed":
            out = torch.empty_like(x)
            run = lambda tile: launch_grouped_gemm(grad, weight, offsets, out, tile, transposed=True)  # noqa: E731
            return run, torch.nn.functional.grouped_mm(grad, weight, offs=offsets[1:])
        if op.startswith("wgrad"):
            gradient = torch.empty_like(weight, dtype=torch.float32 if op == "wgrad_fp32" else torch.bfloat16)
            return lambda tile: self._wgrad(gradient, tile), torch.nn.functional.grouped_mm(
                grad.mT, x, offs=offsets[1:]
            )
        return self._quantized_runner(op, out)

    def _quantized_runner(self, op: str, out: Tensor) -> tuple[Callable[[TileConfig], Tensor], Tensor]:
        x, weight, offsets = self.x, self.weight, self.offsets
        if op == "int4":
            codes, scale = integer.quantize_integer(weight, 4, 128, "full_range")
            packed = integer.pack_int32(codes, 4)
            run = lambda tile: launch_grouped_gemm_int4(x, packed, scale, offsets, None, 0, out, tile)  # noqa: E731
            return run, self._product(x, integer.dequantize_integer(codes, scale))
        if op in ("fp8_channel", "int8"):
            rows = fp8.quantize_token(x) if op == "fp8_channel" else int8.quantize_token(x, dense=False)
            stored = (fp8 if op == "fp8_channel" else int8).quantize_channel(weight)
            (a8, w8), scales = zip(rows, stored, strict=True)
            values = ((codes.float() * scale).bfloat16() for codes, scale in (rows, stored))
            run = lambda tile: launch_grouped_gemm(a8, w8, offsets, out, tile, scales=scales)  # noqa: E731
            return run, self._product(*values)
        a8, a_scale = fp8.quantize_group(x)
        w8, w_scale = fp8.quantize_block(weight)
        wide = fp8.expand_block_scale(w_scale, *weight.shape[1:])
        rows = (a8.float() * a_scale.repeat_interleave(128, 1)).bfloat16()
        run = lambda tile: launch_grouped_gemm_fp8_block(  # noqa: E731
            a8, a_scale, w8, w_scale, offsets, None, out, tile
        )
        return run, self._product(rows, (w8.float() * wide).bfloat16())

    def _wgrad(self, out: Tensor, tile: TileConfig) -> Tensor:
        launch_grouped_wgrad(self.grad, self.x, self.offsets, [out], False, tile)
        return out

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x, weight.mT, offs=self.offsets[1:])


def make_problem(case: MoeCase, n: int, k: int) -> Problem:
    """Draw the operands of a shape.

    Args:
        case: rows and experts.
        n: out-features.
        k: in-features.
    """
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x, grad = torch.randn(case.num_rows, k, **options), torch.randn(case.num_rows, n, **options)
    return Problem(x, grad, torch.randn(case.num_experts, n, k, **options) * k**-0.5, case.offsets())


def fastest_tile(run: Callable[[TileConfig], Tensor], expected: Tensor, tiles: list[TileConfig]) -> TileConfig | None:
    """Return the tile with the smallest median time among those that compile, fit and give the right result.

    Args:
        run: runs the operator with a tile.
        expected: its BF16 result; relative errors above 45 dB, or 39 dB for twice-rounded operands, are refused.
        tiles: the candidates.

    Returns:
        The tile; None if there is none.
    """
    best, best_ms = None, float("inf")
    for tile in tiles:
        try:
            error = _relative_error(run(tile), expected)
        except triton.runtime.errors.OutOfResources:
            continue
        if not error < 2 * _MAX_RELATIVE_ERROR:
            print(f"    refused: relative error {error:.2e} of {tile}")
            continue
        time_ms = median_ms(lambda tile=tile: run(tile), warmup_ms=10, repeat_ms=50)
        if time_ms < best_ms:
            best, best_ms = tile, time_ms
    print(f"    {best_ms:.3f} ms {best}", flush=True)
    return best


def _relative_error(out: Tensor, expected: Tensor) -> float:
    difference = (out.float() - expected.float()).norm()
    return float(difference / expected.float().norm())


def write_table(path: Path, table: dict[str, dict[str, int | bool]]) -> None:
    """Write a tuned table, one problem a line.

    Args:
        path: the file.
        table: problem key -> fields of the tile.
    """
    lines = [f"{json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Tune the shapes named on the command line and merge the result into the device's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--experts", nargs="+", type=int, default=[1, 16, 32, 128])
    parser.add_argument("--rows", nargs="+", type=int, default=[16384, 180224])
    parser.add_argument("--out", type=Path, default=Path(qarl_kernels.ops.__file__).parent / "tuned")
    arguments = parser.parse_args()
    path = arguments.out / table_name(torch.cuda.get_device_name())
    table = json.loads(path.read_text()) if path.is_file() else {}
    for rows in arguments.rows:
        for experts in arguments.experts:
            for n, k in ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)):
                problem = make_problem(MoeCase(rows, experts, "balanced"), n, k)
                for op in arguments.ops:
                    key = problem_key(op, n, k, experts, rows)
                    print(key, flush=True)
                    tile = fastest_tile(*problem.runner(op), CANDIDATES[op])
                    if tile is not None:
                        table[key] = asdict(tile)
                    path.parent.mkdir(exist_ok=True)
                    write_table(path, table)


if __name__ == "__main__":
    main()
