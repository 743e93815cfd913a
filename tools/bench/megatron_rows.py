"""Prints and records what `megatron_step.py` measured: ratios to Megatron's BF16 in each round."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from megatron_model import ran_on

from qarl_nemo.memory import Learner, Parallelism, rank_memory
from qarl_nemo.metrics.results import Figure, result_rows, running_command

BASELINE = "megatron"
# Of a rank's microbatch, in the rows whose names do not say it.
MOST_TOKENS = 32768
PARTS = ("moe", "forward", "quantize", "forward_backward", "optimizer")
GOALS = {"w4a16": 1.05, "w4a8": 0.85, "fp8_block": 0.85, "fp8_channel": 0.85, "int8": 0.85, "nvfp4": 1.05}

# Largest relative difference of the MoE layer's output from the first variant's. It comes from quantization of random
# weights and from other routes where two experts are nearly tied; twice as much means another function.
GATES = {
    "megatron": 0.0,
    "bf16": 0.1,
    "w4a16": 0.4,
    "w4a8": 0.4,
    "fp8_block": 0.2,
    "fp8_channel": 0.2,
    "int8": 0.2,
    "nvfp4": 0.4,
}


def describe(entry: dict, found: list[dict]) -> str:
    """Describe a variant in one line, with its ratios to the baseline with the same layout and tokens."""
    base = next((other for other in found if other["variant"] == BASELINE and _place(other) == _place(entry)), entry)
    times = "  ".join(f"{name} {1e3 * median(entry[f'{name}_s']):.2f}" for name in PARTS)
    ratio = median(_ratios(entry, base))
    memory = peak_bytes(entry) / 2**30
    text = f"EP{entry['ep']} {entry['tokens']} {entry['variant']:16} ms: {times}  ratio {ratio:.3f}  {memory:.2f} GiB"
    error = entry["predicted_bytes"] / max(peak_bytes(entry), 1) - 1
    gpu = f"  GPU {1e3 * entry['gpu_s']:.2f} ms" if entry.get("gpu_s") else ""
    return f"{text} ({error:+.1%}){gpu}  difference {entry['difference']:.2g}"


def require_same_function(found: list[dict]) -> None:
    """Raise unless every variant's MoE layer computes what Megatron's does, except for rounding.

    Args:
        found: records that `bench` returned.

    Raises:
        ValueError: lists what differs by more.
    """
    wrong = [describe(entry, found) for entry in found if not entry["difference"] <= GATES[_family(entry["variant"])]]
    if wrong:
        raise ValueError("\n  ".join([f"differences above {GATES}, nothing is recorded:", *wrong]))


def _family(variant: str) -> str:
    return variant.split("+")[0]


def peak_bytes(entry: dict) -> float:
    """Return a variant's peak: what it holds between steps, plus what a step adds."""
    return entry["static_bytes"] + max(max(entry[f"{name}_peak_bytes"]) for name in PARTS)


def predicted_bytes(entry: dict, options: argparse.Namespace, num_gpus: int) -> float:
    """Return what `qarl_nemo.memory` computes for a variant, with an embedding but without head and logits."""
    format_name, *flags = entry["variant"].split("+")
    model = replace(options.architecture, tied_head=True)
    learner = Learner(
        format=None if format_name == BASELINE else format_name,
        keep_operand="keep" in flags,
        optimizer=options.optimizer,
        tokens=entry["tokens"],
        recompute=options.recompute,
        logits=False,
        busiest=entry["busiest"],
    )
    return rank_memory(model, Parallelism(num_gpus, ep=entry["ep"]), learner).peak_bytes


def _place(entry: dict) -> tuple[int, int]:
    return entry["ep"], entry["tokens"]


def _ratios(entry: dict, base: dict, parts: tuple[str, ...] = ("quantize", "forward_backward")) -> list[float]:
    totals = [
        [sum(values) for values in zip(*(one[f"{part}_s"] for part in parts), strict=True)] for one in (entry, base)
    ]
    return [ours / theirs for ours, theirs in zip(*totals, strict=True)]


def _where(entry: dict) -> str:
    return f"ep{entry['ep']}" + ("" if entry["tokens"] == MOST_TOKENS else f"_{entry['tokens']}")


def _rounding_ratios(found: list[dict]) -> Iterator[tuple[str, float]]:
    # The ratio of a variant with engine rounding to the same one without it, in the same rounds.
    for entry in found:
        same = [one for one in found if f"{one['variant']}+er" == entry["variant"] and _place(one) == _place(entry)]
        for plain in same:
            name, where = f"engine_rounding_{plain['variant'].replace('+', '_')}", _where(entry)
            yield f"{name}_step_ratio_{where}", median(_ratios(entry, plain))
            yield f"{name}_forward_ratio_{where}", median(_ratios(entry, plain, ("forward",)))
            if entry.get("gpu_s"):
                yield f"{name}_gpu_ratio_{where}", entry["gpu_s"] / plain["gpu_s"]


def step_rows(found: list[dict], num_gpus: int) -> list[dict]:
    """Turn what was measured into rows: ratios to Megatron's BF16 in the same round, medians and spreads.

    Args:
        found: records that `bench` returned.
        num_gpus: how many GPUs it ran on.

    Returns:
        The rows; unless they are for `MOST_TOKENS`, their names include the number of tokens.
    """
    require_same_function(found)
    program = f"torchrun --nproc-per-node {num_gpus} tools/bench/megatron_step.py"
    command = running_command(program, "--record", "--raw")
    return result_rows(_figures(found), command=command, **ran_on(num_gpus))


def _figures(found: list[dict]) -> list[Figure]:
    figures: list[Figure] = []

    def add(name: str, value: float, unit: str = "", goal: float | None = None) -> None:
        figures.append(Figure(name, value, unit, "<=", goal))

    for entry in found:
        base = next(one for one in found if one["variant"] == BASELINE and _place(one) == _place(entry))
        name = entry["variant"].replace("+", "_")
        where = _where(entry)
        for part in PARTS:
            add(f"{name}_{part}_ms_{where}", 1e3 * median(entry[f"{part}_s"]), "ms")
        if entry.get("gpu_s"):
            add(f"{name}_gpu_ms_{where}", 1e3 * entry["gpu_s"], "ms")
        add(f"{name}_memory_gib_{where}", peak_bytes(entry) / 2**30, "GiB")
        add(f"{name}_memory_computed_gib_{where}", entry["predicted_bytes"] / 2**30, "GiB")
        if entry is base:
            continue
        ratios = _ratios(entry, base)
        add(f"{name}_step_ratio_{where}", median(ratios), goal=GOALS.get(_family(entry["variant"])))
        add(f"{name}_step_ratio_spread_{where}", max(ratios) - min(ratios))
        add(f"{name}_moe_ratio_{where}", median(_ratios(entry, base, ("moe",))))
        add(f"{name}_forward_ratio_{where}", median(_ratios(entry, base, ("forward",))))
        if entry.get("gpu_s"):
            add(f"{name}_gpu_ratio_{where}", entry["gpu_s"] / base["gpu_s"])
        whole = ("quantize", "forward_backward", "optimizer")
        add(f"{name}_whole_step_ratio_{where}", median(_ratios(entry, base, whole)))
    for name, value in _rounding_ratios(found):
        add(name, value)
    errors = [abs(entry["predicted_bytes"] / max(peak_bytes(entry), 1) - 1) for entry in found]
    add("memory_model_error", max(errors), goal=0.05)
    fp8 = [one for one in figures if one.name.startswith(("fp8_block_step_ratio_ep", "fp8_channel_step_ratio_ep"))]
    for where in sorted({one.name.rpartition("_ratio_")[2] for one in fp8}):
        add(f"fp8_step_ratio_{where}", max(one.value for one in fp8 if one.name.endswith(where)), goal=0.85)
    return figures
