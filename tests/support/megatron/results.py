"""Running the programs of four ranks, and what their summaries say."""

from pathlib import Path
from typing import Any

import torch

from qarl_nemo.metrics.machine import hardware, versions
from qarl_nemo.metrics.results import Figure
from support.figures import keep
from support.programs import run_program

RANKS = 4
# Relative, in BF16, with equal routes: if each layer's output has the same bits, only weight gradients are other sums.
SAME_FORWARD = 0.01
# If linear_proj or fc2 is a sum over ranks, or attention over parts, the last bit differs, and an FP8 code by 2^-4.
OTHER_SUMS = 0.3
Ranks = list[dict[str, Any]]


def run_ranks_of(name: str, folder: Path, *arguments: str) -> Ranks:
    """Run one of this folder's programs of four ranks and return what each rank gave."""
    # Transformer-Engine multiplies FP32 as TF32 and adds atomically, if it may.
    settings = {"NVIDIA_TF32_OVERRIDE": "0", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    run_program(f"megatron.{name}", folder, *arguments, timeout_s=900, **settings)
    return [torch.load(folder / f"rank{rank}.pt", map_location="cpu", weights_only=False) for rank in range(RANKS)]


def training_error(summaries: Ranks) -> float:
    """The largest relative difference over the loss and every parameter's gradient, over the ranks."""
    losses = [one["loss_error"] for one in summaries]
    return max([*losses, *(error for one in summaries for error in (one["grad_errors"] or {}).values())])


def wrong_tensors(summaries: Ranks) -> set[str]:
    """Published tensors that are not, byte for byte, what the whole model publishes."""
    kinds = ("differing", "wrong_shards", "not_requantized")
    return {f"{name} ({kind})" for one in summaries for kind in kinds for name in one[kind]}


def keep_figures(
    layouts: dict[str, dict[str, float]], suffix: str, bounds: dict[str, float], engines: dict[str, str], test: str
) -> None:
    """With QARL_MEGATRON_RESULTS, the figures of each layout become rows of docs/results."""
    rows = []
    for name, values in layouts.items():
        goals = {"packed_bit_equal": ("==", 1.0), "training_error": ("<", bounds[name])}
        rows += [Figure(f"{kind}_{name}{suffix}", values[kind], "", *goal) for kind, goal in goals.items()]
    keep_megatron(rows, "cuda" if torch.cuda.is_available() else "cpu", engines, test)


def keep_megatron(rows: list[Figure], device: str, engines: dict[str, str], test: str) -> None:
    """With QARL_MEGATRON_RESULTS, figures become rows of docs/results."""
    facts = {"hardware": hardware(device), "versions": versions() | engines}
    keep(rows, variable="QARL_MEGATRON_RESULTS", results="megatron", test=test, **facts)


def figures(summaries: Ranks) -> dict[str, float]:
    """The figures of a layout's rows."""
    return {
        "packed_bit_equal": float(not wrong_tensors(summaries)),
        "training_error": float(f"{training_error(summaries):.2g}"),
    }


def bf16_bound(layout: str) -> float:
    """How far a layout's gradients may be from those of one rank."""
    return OTHER_SUMS if "tp2" in layout or "cp2" in layout else SAME_FORWARD
