"""Learner against rollout engine: aligned, rollout-only, and the floor that BF16 on both sides has anyway."""

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from qarl_kernels import QuantFormat, get_format
from qarl_nemo.local.compare_engines import Served, serve
from qarl_nemo.local.compare_learner import load_learner, score
from qarl_nemo.local.compare_settings import CompareSettings, Job, prepare
from qarl_nemo.metrics.fidelity import fidelity_by_position, fidelity_metrics, gap_cdf

FLOOR = "bf16"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured.

    Attributes:
        engine: its name and version.
        methods: served format -> module -> the class that multiplied it.
        rows: one for each arm, format and decoding; see `compare`.
    """

    engine: str
    methods: dict[str, dict[str, str]]
    rows: list[dict[str, Any]]


def compare(settings: CompareSettings, show: Callable[[str], None] = lambda _: None) -> Comparison:
    """Measure every arm: the engine answers first, in each format, then each learner scores its tokens.

    Args:
        settings: what to compare.
        show: told what happens next.

    Returns:
        Rows with `arm` (bf16, aligned, rollout_only), `format` (the engine's), `decoding`, the figures of
        `fidelity_metrics`, `gap_over_floor`, `by_position` and `gap_cdf`; the floor first.

    Raises:
        ValueError: settings, checkpoint or prompts are wrong, all listed; or vLLM did not quantize as asked.
    """
    job = prepare(settings)
    floor = get_format(FLOOR)
    served = {}
    for fmt in (floor, *job.formats):
        show(f"{settings.engine} serves {fmt.name}")
        served[fmt.name] = serve(job, fmt)
        _free()
    rows: list[dict[str, Any]] = []
    for fmt in (floor, *job.formats):
        show(f"learner executes {fmt.name}")
        rows += _arm_rows(job, fmt, served)
        _free()
    order = [FLOOR, *(fmt.name for fmt in job.formats)]
    rows.sort(key=lambda row: (order.index(row["format"]), row["arm"]))
    _relate_to_floor(rows)
    return Comparison(served[FLOOR].engine, {name: one.methods for name, one in served.items()}, rows)


def _arm_rows(job: Job, executed: QuantFormat, served: dict[str, Served]) -> Iterator[dict[str, Any]]:
    model = load_learner(job, executed)
    if executed.name == FLOOR:
        arms = {name: FLOOR if name == FLOOR else "rollout_only" for name in served}
    else:
        arms = {executed.name: "aligned"}
    for name, arm in arms.items():
        for decoding, responses in served[name].responses.items():
            learner, engine, same_top, mask = score(
                model, responses, batch_size=job.settings.batch_size, pad_id=job.pad_id
            )
            yield {
                "arm": arm,
                "format": name,
                "decoding": decoding,
                "num_responses": len(responses),
                **fidelity_metrics(learner, engine, same_top, mask),
                "by_position": fidelity_by_position(learner, engine, same_top, mask),
                "gap_cdf": gap_cdf(learner, engine, mask),
            }


def _relate_to_floor(rows: list[dict[str, Any]]) -> None:
    floors = {row["decoding"]: row["gap_mean"] for row in rows if row["arm"] == FLOOR}
    for row in rows:
        floor = floors[row["decoding"]]
        row["gap_over_floor"] = row["gap_mean"] / floor if floor else math.nan


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
