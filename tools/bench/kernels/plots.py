"""Plots of docs/results/kernels.json: the expert MLP under its roofline, and how it scales with tokens and experts."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from moe_shapes import HIDDEN, INTERMEDIATE, MoeCase

from qarl_nemo.metrics.results import ResultRow, read_results

DOCS = Path(__file__).parents[3] / "docs"
STORED_BITS = {
    "bf16": 16.0,
    "w4a16": 4.125,
    "w4a8": 8.0,
    "fp8_channel": 8.0,
    "fp8_block": 8.0,
    "int8": 8.0,
    "nvfp4": 4.5,
}
COLORS = dict(zip(STORED_BITS, plt.get_cmap("tab10").colors, strict=False))
_NAME = re.compile(r"(?P<fmt>[a-z0-9_]+)_mlp_forward_tflops_e(?P<experts>\d+)(_m(?P<rows>\d+))?(?P<zipf>_zipf)?")


class Point(NamedTuple):
    """One measured forward of the expert MLP."""

    fmt: str
    case: MoeCase
    tflops: float

    @property
    def intensity(self) -> float:
        """Operations per byte that must move: rows in and out in BF16, the weights as the GEMM reads them."""
        weights = self.case.num_experts * 3 * HIDDEN * INTERMEDIATE * STORED_BITS[self.fmt] / 8
        return self.case.flops / (2 * self.case.num_rows * HIDDEN * 2 + weights)


def points(rows: list[ResultRow]) -> Iterator[Point]:
    """Yield the measured forwards among results rows."""
    for row in rows:
        found = _NAME.fullmatch(row.name)
        if found and found["fmt"] in STORED_BITS:
            skew = "zipf" if found["zipf"] else "balanced"
            yield Point(found["fmt"], MoeCase(int(found["rows"] or 180224), int(found["experts"]), skew), row.value)


def plot_roofline(measured: list[Point], copy_gb_s: float, dense_tflops: float, path: Path) -> None:
    """Draw TFLOP/s over operations per byte beneath the copy bandwidth and the BF16 matrix rate."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    low, high = min(p.intensity for p in measured) / 1.5, max(p.intensity for p in measured) * 1.5
    edge = dense_tflops * 1e3 / copy_gb_s
    axes.plot(
        [low, edge, high], [low * copy_gb_s / 1e3, dense_tflops, dense_tflops], color="black", label="BF16 roofline"
    )
    axes.plot(
        [edge, 2 * edge, high], [dense_tflops, 2 * dense_tflops, 2 * dense_tflops], "k--", label="FP8, twice that"
    )
    for fmt, color in COLORS.items():
        own = [p for p in measured if p.fmt == fmt]
        axes.scatter([p.intensity for p in own], [p.tflops for p in own], color=color, label=fmt, s=22)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte that must move", ylabel="TFLOP/s")
    axes.set_title("Expert MLP forward, activation quantization included")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_scaling(measured: list[Point], path: Path) -> None:
    """Draw TFLOP/s over routed rows at 128 experts, and over experts at 180224 rows, balanced."""
    balanced = [p for p in measured if p.case.skew == "balanced"]
    figure, (by_rows, by_experts) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for fmt, color in COLORS.items():
        own = sorted((p.case.num_rows, p.tflops) for p in balanced if p.fmt == fmt and p.case.num_experts == 128)
        by_rows.plot(*zip(*own, strict=True), "o-", color=color, label=fmt)
        own = sorted((p.case.num_experts, p.tflops) for p in balanced if p.fmt == fmt and p.case.num_rows == 180224)
        by_experts.plot(*zip(*own, strict=True), "o-", color=color, label=fmt)
    by_rows.set(xscale="log", xlabel="routed rows, 128 experts", ylabel="TFLOP/s of the forward")
    by_experts.set(xlabel="experts, 180224 routed rows")
    by_experts.set_xscale("log", base=2)
    for axes in (by_rows, by_experts):
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, which="both", alpha=0.3)
    by_rows.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Read results, draw both plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder with results/ and images/")
    options = parser.parse_args()
    rows = read_results(options.docs / "results" / "kernels.json")
    values = {row.name: row.value for row in rows}
    measured = list(points(rows))
    images = options.docs / "images"
    plot_roofline(measured, values["copy_gb_s"], values["dense_tflops"], images / "kernels_roofline.png")
    plot_scaling(measured, images / "kernels_scaling.png")


if __name__ == "__main__":
    main()
