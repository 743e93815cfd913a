"""What GPUs, learner ranks and host held in each phase of a full-size run, and what was computed of it."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from host_memory import HOST
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from qarl_nemo.config import merge_mappings, read_yaml
from qarl_nemo.files import FileError, read_text
from qarl_nemo.memory import GIB
from qarl_nemo.metrics.nemo_rl_logs import find_config
from qarl_nemo.metrics.runs import Run
from qarl_nemo.nemo_rl.block import NemoQarlConfig
from qarl_nemo.nemo_rl.layout_memory import Needed, needed_memory

# Phases of a step in the order in which they follow each other, and those whose memory is recorded.
ORDER = ("refit", "rollout", "reward", "logprob_prep", "prev_logprobs", "training_prep", "update")
RECORDED = ("rollout", "prev_logprobs", "update", "refit")
_ENDS = "timing/train/total_step_time"
Figures = dict[str, tuple[float, str, str]]


def memory_figures(folder: Path, run: Run, steps: Sequence[int], *, asynchronous: bool = False) -> Figures:
    """Return an arm's memory: name without the arm -> value, unit, direction.

    Args:
        folder: the arm's, with memory.csv and logs; the model's config.json lies beside it.
        run: its logs.
        steps: which count.
        asynchronous: phases of learner and engines overlap, so that no second is of one phase.

    Returns:
        GiB at the largest: `full_memory_gib_<phase>` of the fullest GPU as nvidia-smi counts it every second, and
        `full_memory_host_gib_<phase>` with its parts out of `HOST`, none of asynchronous runs; of runs with our
        workers, whose fullest learner rank says them, `_allocated_gib_`, `_reserved_gib_` and `_others_gib_`, the
        computed peak, the host's memory as computed, and how wrong both are.
    """
    found: Figures = {}
    windows = [] if asynchronous else list(_windows(folder / "logs", run, steps))
    watched = _watched(folder / "memory.csv", windows)
    for phase in RECORDED:
        rows = watched.get(phase)
        if rows:
            gpus = [name for name in rows[0] if name.startswith("gpu")]
            found[f"full_memory_gib_{phase}"] = _gib(max(row[name] for row in rows for name in gpus))
            # Runs of earlier versions did not divide it.
            for part in (part for part in HOST if f"{part}_gib" in rows[0]):
                found[f"full_memory_{part}_gib_{phase}"] = _gib(max(row[f"{part}_gib"] for row in rows))
        for kind in ("allocated", "reserved", "others"):
            values = run.column(f"memory/{phase}_{kind}_gib")[np.isin(run.steps, steps)]
            if np.isfinite(values).any():
                found[f"full_memory_{kind}_gib_{phase}"] = _gib(float(np.nanmax(values)))
    measured = found.get("full_memory_allocated_gib_update")
    if measured is not None:
        needed = _computed(folder, folder.parent)
        computed = needed.learner.peak_bytes / GIB
        found["full_memory_computed_gib"] = _gib(computed)
        found["full_memory_error"] = (abs(computed - measured[0]) / measured[0], "", "<=")
        host = found.get("full_memory_host_gib_update")
        if needed.host and host is not None:
            computed = sum(needed.host.values()) / GIB
            found["full_memory_host_computed_gib"] = _gib(computed)
            found["full_memory_host_error"] = (abs(computed - host[0]) / host[0], "", "<=")
    return found


def _gib(value: float) -> tuple[float, str, str]:
    return value, "GiB", "<="


def start_seconds(folder: Path, run: Run) -> float:
    """Return how long an arm took from its command to its first step: the first step's end - its length - the command.

    Args:
        folder: the arm's, with memory.csv, whose first row is a second after the command.
        run: its logs.

    Raises:
        FileError: memory.csv is damaged, or another run's.
    """
    file = folder / "memory.csv"
    began = next(_seconds(file))["time_s"] - 1.0
    first = int(run.steps[0])
    took = _ends(folder / "logs")[first] - float(run.column("timing/step_s")[0]) - began
    if took < 0:
        raise FileError(f"{file} begins after the first step that was logged: it is another run's")
    return took


def _windows(logs: Path, run: Run, steps: Sequence[int]) -> Iterator[tuple[str, float, float]]:
    """Yield phase, begin and end as seconds of the clock; a step's phases end when it is logged."""
    ends = _ends(logs)
    for step in steps:
        end = ends[step]
        for phase in reversed(ORDER):
            # A step without a phase has no column for it.
            begin = end - float(np.nan_to_num(run.column(f"timing/{phase}_s")[run.steps == step][0]))
            yield phase, begin, end
            end = begin


def _ends(logs: Path) -> dict[int, float]:
    """Return when each step was logged, in seconds of the clock."""
    ends = {}
    for file in sorted(logs.glob("exp_*/tensorboard/events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            if any(value.tag == _ENDS for value in event.summary.value):
                ends[event.step] = event.wall_time
    return ends


def _watched(file: Path, windows: Sequence[tuple[str, float, float]]) -> dict[str, list[dict[str, float]]]:
    """Return the seconds of each phase, each with the table's columns."""
    found: dict[str, list[dict[str, float]]] = {}
    for second in _seconds(file):
        for phase, begin, end in windows:
            if begin <= second["time_s"] < end:
                found.setdefault(phase, []).append(second)
    return found


def _seconds(file: Path) -> Iterator[dict[str, float]]:
    """Yield the table's rows, without a last one that a kill cut short; FileError if there is none, or a broken one."""
    whole = read_text(file, "what run.py watched").rpartition("\n")[0].splitlines()
    if len(whole) < 2:
        raise FileError(f"{file}: nothing was watched, as if the run ended in its first second")
    for number, row in enumerate(csv.DictReader(whole), start=2):
        try:
            yield {name: float(value) for name, value in row.items()}
        except (TypeError, ValueError) as error:
            raise FileError(f"{file}, line {number} is damaged: expected {whole[0]}, but: {error}") from error


def _computed(folder: Path, model: Path) -> Needed:
    file = find_config(folder / "logs")
    assert file is not None, "a run whose ranks say what they hold wrote its config"
    config = merge_mappings(read_yaml(file), {"policy": {"model_name": str(model)}})
    qarl = NemoQarlConfig.model_validate(config["policy"]["qarl"])
    # Ranks decide about parameters by what is free, and print it.
    output = folder / "driver.txt"
    left = output.is_file() and "parameters leave while" in output.read_text(encoding="utf-8", errors="replace")
    needed = needed_memory(config, qarl, optimizer_stays=qarl.resident, parameters_stay=qarl.resident and not left)
    assert needed is not None, "a run that ended had a cluster block"
    return needed
