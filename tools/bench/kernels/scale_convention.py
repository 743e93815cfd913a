"""Quantization error of the integer grids, on Gaussian and heavy-tailed weights or on those of a model.

`narrow_range`: scale = amax / (2^(b-1) - 1) on the symmetric grid; `full_range`: scale = amax / ((2^b - 1) / 2) on the
whole two's-complement grid; `clipped_range`: scale = amax / 2^(b-1) on the same; `nested`: codes of 8 bits,
narrow_range, rounded to b bits. Weights are BF16 and go through the quantizer that the forward and the publisher call.

    snr_db          = 10 log10( sum w^2 / sum (w - w_hat)^2 ), the mean over seeds; higher is better
    mean_abs_error  = mean |w - w_hat| / rms(w), the mean over seeds; lower is better
    gain_db         = snr_db(full_range) - snr_db(narrow_range) on the same weights; above 0, full_range is better
    clipped_gain_db = snr_db(clipped_range) - snr_db(full_range), likewise
    nested_gain_db  = snr_db(nested) - snr_db(full_range), likewise, at fewer than 8 bits

With `--checkpoint` the weights are a checkpoint's own, by projection, and means and spreads are over its layers. Where
they were once rounded to a grid, that grid decides which other one suits them; `--blur` undoes one of 5 bits in groups
of 32 (GGUF's Q5_0), as if every weight were anywhere in the step that it was rounded from.
"""

import argparse
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qarl_formats import SCALE_CONVENTIONS, QuantFormat
from qarl_kernels import get_format, quantize_weight
from qarl_kernels.integer import dequantize_integer, quantize_integer
from qarl_nemo.checkpoints import open_checkpoint
from qarl_nemo.checkpoints.reader import TensorInfo
from qarl_nemo.layers.ties import tied_share
from qarl_nemo.metrics.results import Figure, append_results, result_rows
from qarl_nemo.names import target_of

NUM_BITS = (2, 3, 4, 8)
GROUP_SIZES = (128, 64, 32)
NESTED = "nested"
GAINS = {
    "gain_db": ("full_range", "narrow_range"),
    "clipped_gain_db": ("clipped_range", "full_range"),
    "nested_gain_db": (NESTED, "full_range"),
}
COMMAND = "python tools/bench/kernels/scale_convention.py"
DOCS_RESULTS = Path(__file__).parents[3] / "docs" / "results"


class Case(NamedTuple):
    """What is measured."""

    num_bits: int
    group_size: int
    distribution: str


class Error(NamedTuple):
    """Distance of a dequantized weight from the weight, and the share of values half-way between two codes."""

    snr_db: float
    mean_abs_error: float
    tied: float


def student_t(degrees: float) -> Callable[[tuple[int, int]], Tensor]:
    """Return a sampler of Student's t, whose tails are the heavier the fewer the degrees of freedom."""
    return lambda shape: torch.distributions.StudentT(torch.tensor(degrees)).sample(shape)


DISTRIBUTIONS: dict[str, Callable[[tuple[int, int]], Tensor]] = {
    "gaussian": torch.randn,
    "laplace": torch.distributions.Laplace(torch.tensor(0.0), torch.tensor(1.0)).sample,
    "student_t5": student_t(5.0),
    "student_t3": student_t(3.0),
}


def grids(case: Case) -> dict[str, QuantFormat]:
    """Return a case's formats: every scale convention, and codes of 8 bits that are rounded to fewer."""
    name = f"w{case.num_bits}a16"
    formats = {one: get_format(name, group_size=case.group_size, scale_convention=one) for one in SCALE_CONVENTIONS}
    if case.num_bits < 8:
        formats[NESTED] = replace(formats["narrow_range"], nested_bits=8)
    return formats


def quantization_error(weight: Tensor, fmt: QuantFormat) -> Error:
    """Quantize and compare.

    Args:
        weight: [N, K] BF16.
        fmt: an integer format.

    Returns:
        The error of the weight that a GEMM would multiply by.

    Raises:
        RuntimeError: the stored tensors do not give back the codes; no figure is worth reporting then.
    """
    assert fmt.scale_convention is not None
    dequantized = quantize_weight(weight, fmt).dequantize()
    shift = max(fmt.nested_bits - fmt.grid_bits, 0)
    codes, scale = quantize_integer(weight, fmt.grid_bits + shift, fmt.group_size, fmt.scale_convention)
    if shift:
        half = 2 ** (fmt.grid_bits - 1)
        codes, scale = torch.round(codes / 2**shift).clamp(-half, half - 1), scale * 2**shift
    if not torch.equal(dequantized, dequantize_integer(codes, scale)):
        raise RuntimeError(f"{fmt}: unpacked codes differ from packed ones; run the tests first")
    exact, difference = weight.double(), weight.double() - dequantized.double()
    power = exact.square().mean()
    return Error(
        snr_db=float(10 * torch.log10(power / difference.square().mean())),
        mean_abs_error=float(difference.abs().mean() / power.sqrt()),
        tied=tied_share([weight], fmt),
    )


def random_weights(shape: tuple[int, int], seeds: Iterable[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield one BF16 weight [N, K] of every distribution and seed, by the distribution's name."""
    for seed in seeds:
        for distribution, sample in DISTRIBUTIONS.items():
            torch.manual_seed(seed)
            yield distribution, sample(shape).to(torch.bfloat16)


def blurred(weight: Tensor) -> Tensor:
    """Move weights by up to half a step of Q5_0, amax / 16 of 32 neighbours; the largest is exact there and stays."""
    groups = weight.float().unflatten(-1, (-1, 32))
    magnitude = groups.abs()
    largest = magnitude.amax(-1, keepdim=True)
    moved = groups + torch.where(magnitude < largest, largest / 16, 0) * (torch.rand_like(groups) - 0.5)
    return moved.flatten(-2).to(torch.bfloat16)


def checkpoint_weights(folder: Path, most: int, *, blur: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield BF16 weights [N, K] of a Hugging Face checkpoint, by their projection's name.

    Yields:
        `q_proj`, ..., `down_proj`, with `_blurred` if they are, and the weight.
    """
    torch.manual_seed(0)
    checkpoint = open_checkpoint(folder)
    by_projection: dict[str, list[TensorInfo]] = defaultdict(list)
    for info in checkpoint.tensors:
        if target_of(info.name) and len(info.shape) == 2:
            by_projection[info.name.split(".")[-2]].append(info)
    with checkpoint.open_reader() as reader:
        for projection, infos in by_projection.items():
            for info in infos[:: -(-len(infos) // most)]:
                weight = reader.read(info).to(torch.bfloat16)
                yield (f"{projection}_blurred", blurred(weight)) if blur else (projection, weight)


def measure(weights: Iterable[tuple[str, Tensor]]) -> dict[Case, dict[str, list[Error]]]:
    """Measure every case on the same weights for every grid.

    Args:
        weights: BF16 weights [N, K] by what they are called; group sizes that do not divide K are left out.

    Returns:
        Case -> grid -> one error per weight of that name.
    """
    errors: dict[Case, dict[str, list[Error]]] = defaultdict(lambda: defaultdict(list))
    for name, weight in weights:
        for num_bits in NUM_BITS:
            for group_size in (size for size in GROUP_SIZES if weight.shape[-1] % size == 0):
                case = Case(num_bits, group_size, name)
                for grid, fmt in grids(case).items():
                    errors[case][grid].append(quantization_error(weight, fmt))
    return errors


def gains_db(by_grid: dict[str, list[Error]]) -> dict[str, list[float]]:
    """Return the signal-to-noise ratio that one grid gains over another, per seed, by the gain's name."""
    pairs = {
        name: zip(by_grid[better], by_grid[other], strict=True)
        for name, (better, other) in GAINS.items()
        if better in by_grid
    }
    return {name: [one.snr_db - two.snr_db for one, two in pair] for name, pair in pairs.items()}


def figures(errors: dict[Case, dict[str, list[Error]]]) -> Iterator[Figure]:
    """Yield every figure, averaged over the weights of a name."""
    for case, by_grid in errors.items():
        prefix = f"int{case.num_bits}_g{case.group_size}"
        for name, gains in gains_db(by_grid).items():
            yield Figure(f"{prefix}_{case.distribution}_{name}", statistics.fmean(gains), "dB", ">=")
        for grid, measured in by_grid.items():
            name = f"{prefix}_{grid}_{case.distribution}"
            snr = statistics.fmean(error.snr_db for error in measured)
            mean_abs = statistics.fmean(error.mean_abs_error for error in measured)
            yield Figure(f"{name}_snr_db", snr, "dB", ">=")
            yield Figure(f"{name}_mean_abs_error", mean_abs, "rms", "<=")
            yield Figure(f"{name}_tied", statistics.fmean(error.tied for error in measured), "fraction", "<=")


def print_table(errors: dict[Case, dict[str, list[Error]]]) -> None:
    """Print the grids side by side, with the gains' spread over the weights of a name."""
    table = Table(title=f"integer grids: {' | '.join([*SCALE_CONVENTIONS, NESTED])}")
    for heading in ("bits", "group", "weights", "SNR dB", "mean |error| / rms", "half-way", *GAINS):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    for case, by_grid in errors.items():
        cells = []
        for field in Error._fields:
            means = (statistics.fmean(getattr(error, field) for error in grid) for grid in by_grid.values())
            cells.append(" | ".join(f"{mean:.2f}" if field == "snr_db" else f"{mean:.4f}" for mean in means))
        spreads = [
            f"{statistics.fmean(gains):+.3f} +- {statistics.pstdev(gains):.3f}" for gains in gains_db(by_grid).values()
        ]
        table.add_row(str(case.num_bits), str(case.group_size), case.distribution, *cells, *spreads)
    Console().print(table)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="N of each weight")
    parser.add_argument("--columns", type=int, default=2048, help="K of each weight")
    parser.add_argument("--seeds", type=int, default=8, help="weights per distribution")
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder whose weights are measured instead")
    parser.add_argument("--most", type=int, default=16, help="weights of each projection of the checkpoint")
    parser.add_argument("--blur", action="store_true", help="undo the grid of Q5_0 in the checkpoint's weights")
    parser.add_argument("--results", type=Path, default=DOCS_RESULTS, help="folder that receives formats*.json")
    options = parser.parse_args()
    chosen = options.checkpoint
    random = random_weights((options.rows, options.columns), range(options.seeds))
    errors = measure(checkpoint_weights(chosen, options.most, blur=options.blur) if chosen else random)
    print_table(errors)
    command = COMMAND
    if chosen:
        command += f" --checkpoint {chosen.name} --most {options.most}{' --blur' * options.blur}"
    rows = result_rows(
        figures(errors),
        hardware=f"{os.cpu_count()} CPU cores",
        versions={"torch": torch.__version__},
        command=command,
    )
    if chosen:
        append_results(options.results / "formats_checkpoint.json", rows)
        return
    append_results(options.results / "formats.json", [row for row in rows if not row["name"].endswith("_gain_db")])
    append_results(options.results / "formats_gain.json", [row for row in rows if row["name"].endswith("_gain_db")])


if __name__ == "__main__":
    main()
