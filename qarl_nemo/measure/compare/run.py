"""Compares learner and rollout engine: aligned, rollout-only, and the floor that even BF16 on both sides has."""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from qarl_formats import BASELINE
from qarl_kernels import QuantFormat, get_format
from qarl_nemo.layers.install import install
from qarl_nemo.measure.compare.engines import Served, serve
from qarl_nemo.measure.compare.job import Job, prepare
from qarl_nemo.measure.compare.operators import compare_operators
from qarl_nemo.measure.compare.score import engine_scores, kernel_scores, model_scores, read_responses
from qarl_nemo.measure.compare.settings import CompareSettings
from qarl_nemo.metrics.fidelity import Scores
from qarl_nemo.train.engine_attention import plain_attention, use_attention
from qarl_nemo.train.model import load_checkpoint
from qarl_nemo.train.saved_adapter import add_saved_adapter

FLOOR = BASELINE
ARMS = (FLOOR, "aligned", "rollout_only", "attention", "engine")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured.

    Attributes:
        engine: the engine's name and version.
        methods: served format -> module -> the class that multiplied it.
        rows: one for each arm, format and decoding; see `compare`.
        operators: one for each format, operator, layer and phase, see `compare_operators`; empty unless requested.
    """

    engine: str
    methods: dict[str, dict[str, str]]
    rows: list[dict[str, Any]]
    operators: list[dict[str, Any]]


def compare(
    settings: CompareSettings, show: Callable[[str], None] = lambda _: None, beside: Sequence[str] = ()
) -> Comparison:
    """Measure every arm: the engine answers first, in each format, then each learner scores its tokens.

    Args:
        settings: what to compare.
        show: called with what happens next.
        beside: what the caller found wrong, to be listed with the rest.

    Returns:
        Rows with `arm`, `format` (the engine's), `decoding`, the figures of `Scores.metrics`, `gap_over_floor`,
        `gap_over_own`, `by_position` and `gap_cdf`; the floor first. Arms: bf16, aligned, rollout_only; `engine`, which
        reads its own responses; `attention`, the aligned learner against itself with another attention kernel.

    Raises:
        ValueError: settings, checkpoint or prompts are wrong, all listed; or vLLM did not quantize as requested.
    """
    job = prepare(settings, beside)
    formats = (get_format(FLOOR), *job.formats)
    served = _serve_all(job, formats, show)
    rows: list[dict[str, Any]] = []
    operators: list[dict[str, Any]] = []
    for fmt in formats:
        show(f"learner executes {fmt.name}")
        model = load_learner(job, fmt)
        rows += _arm_rows(job, model, fmt, served)
        record = served[fmt.name].record
        if record is not None:
            operators += [{"format": fmt.name, **row} for row in compare_operators(model, record)]
        del model
        _free()
    order = [fmt.name for fmt in formats]
    rows.sort(key=lambda row: (order.index(row["format"]), ARMS.index(row["arm"])))
    _relate(rows)
    return Comparison(served[FLOOR].engine, {name: one.methods for name, one in served.items()}, rows, operators)


def load_learner(job: Job, fmt: QuantFormat) -> PreTrainedModel:
    """Load the checkpoint with layers that execute `fmt`.

    Args:
        job: the comparison.
        fmt: what the targets execute; the others stay as they are.

    Returns:
        The model on the job's device.
    """
    model, _ = load_checkpoint(job.settings.checkpoint, job.dtype)
    install(model.to(job.device), job.settings.targets, fmt, plain=job.adapted_only)
    if job.adapter:
        add_saved_adapter(model, job.adapter)
    use_attention(model, job.settings.attention)
    return model.eval().requires_grad_(False)


def _serve_all(job: Job, formats: tuple[QuantFormat, ...], show: Callable[[str], None]) -> dict[str, Served]:
    def serve_one(fmt: QuantFormat) -> Served:
        show(f"{job.settings.engine} serves {fmt.name}")
        served = serve(job, fmt)
        _free()
        return served

    with ThreadPoolExecutor(job.settings.parallel) as pool:
        return dict(zip((fmt.name for fmt in formats), pool.map(serve_one, formats), strict=True))


def _arm_rows(
    job: Job, model: PreTrainedModel, executed: QuantFormat, served: dict[str, Served]
) -> Iterator[dict[str, Any]]:
    if executed.name == FLOOR:
        arms = {name: FLOOR if name == FLOOR else "rollout_only" for name in served}
    else:
        arms = {executed.name: "aligned"}
    for name, arm in arms.items():
        for decoding, responses in served[name].responses.items():
            read = partial(read_responses, model, responses, batch_size=job.settings.batch_size, pad_id=job.pad_id)
            own = read()
            yield _row(arm, name, decoding, model_scores(responses, *own))
            if name == executed.name:
                yield _row("engine", name, decoding, engine_scores(responses))
                with plain_attention(model):
                    other = read()
                yield _row("attention", name, decoding, kernel_scores(responses, own, other))


def _row(arm: str, name: str, decoding: str, scores: Scores) -> dict[str, Any]:
    return {
        "arm": arm,
        "format": name,
        "decoding": decoding,
        "num_responses": len(scores.mask),
        **scores.metrics(),
        "by_position": scores.by_position(),
        "gap_cdf": scores.gap_cdf(),
    }


def _relate(rows: list[dict[str, Any]]) -> None:
    floors = {row["decoding"]: row["gap_mean"] for row in rows if row["arm"] == FLOOR}
    own = {(row["format"], row["decoding"]): row["gap_mean"] for row in rows if row["arm"] == "attention"}
    for row in rows:
        references = {"floor": floors[row["decoding"]], "own": own[row["format"], row["decoding"]]}
        for name, reference in references.items():
            row[f"gap_over_{name}"] = _over(row["gap_mean"], reference)


def _over(gap: float, reference: float) -> float:
    # Two that agree in every bit are at their floor, even if that floor is zero.
    return gap / reference if reference else 1.0 if gap == 0 else math.inf


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
