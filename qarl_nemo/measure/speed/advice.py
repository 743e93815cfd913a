"""Summarizes measured speeds: rows with spread and speed-up, and the format to choose at each batch size."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qarl_nemo.measure.speed.run import FormatSpeed
from qarl_nemo.measure.speed.settings import BASELINE


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One format at one batch size.

    Attributes:
        format_name: the format.
        batch_size: sequences decoded at a time.
        reason: why there is no measurement; None if there is one.
        decode_tokens_s: median of the repeats, over all sequences.
        decode_noise: median distance of a repeat from decode_tokens_s, which a single disturbed repeat does not move.
        prefill_tokens_s: median of the repeats.
        speedup: decode_tokens_s over bf16's; None if bf16 was not measured.
        weights_gib: weights on each GPU.
        peak_gib: the most that torch held on a GPU, including the KV cache; None on a CPU.
        kv_cache_tokens: tokens that fit beside the weights.
    """

    format_name: str
    batch_size: int
    reason: str | None = None
    decode_tokens_s: float = 0.0
    decode_noise: float = 0.0
    prefill_tokens_s: float = 0.0
    speedup: float | None = None
    weights_gib: float = 0.0
    peak_gib: float | None = None
    kv_cache_tokens: int = 0


def speed_rows(speeds: Sequence[FormatSpeed], batch_sizes: Sequence[int]) -> list[SpeedRow]:
    """Return a row for each format and batch size, served or not.

    Returns:
        Rows by batch size, then in the order of `speeds`.
    """
    rows = []
    for size in batch_sizes:
        baseline = next((_median(speed, size) for speed in speeds if speed.name == BASELINE), None)
        rows += [_row(speed, size, baseline) for speed in speeds]
    return rows


def _row(speed: FormatSpeed, size: int, baseline: float | None) -> SpeedRow:
    median = _median(speed, size)
    if median is None:
        return SpeedRow(speed.name, size, speed.reason or speed.batches[size]["reason"])
    batch = speed.batches[size]
    return SpeedRow(
        speed.name,
        size,
        None,
        median,
        statistics.median(abs(value - median) for value in batch["decode_tokens_s"]),
        statistics.median(batch["prefill_tokens_s"]),
        median / baseline if baseline else None,
        speed.engine["weights_gib"],
        speed.engine.get("peak_gib"),
        speed.engine["kv_cache_tokens"],
    )


def _median(speed: FormatSpeed, size: int) -> float | None:
    repeats = speed.batches.get(size, {}).get("decode_tokens_s")
    return statistics.median(repeats) if repeats else None


def recommend(rows: Sequence[SpeedRow]) -> list[dict[str, Any]]:
    """Name the fastest format at each batch size, and those that differ from it by less than twice the noise.

    Args:
        rows: what `speed_rows` returned.

    Returns:
        One `{batch_size, format, tied, reason}` for each batch size; `format` is None if nothing was measured.
    """
    sizes = dict.fromkeys(row.batch_size for row in rows)
    return [_advice(size, [row for row in rows if row.batch_size == size]) for size in sizes]


def _advice(size: int, rows: list[SpeedRow]) -> dict[str, Any]:
    served = sorted((row for row in rows if row.reason is None), key=lambda row: -row.decode_tokens_s)
    if not served:
        return {"batch_size": size, "format": None, "tied": [], "reason": "no format was served at this batch size"}
    best, *others = served
    tied = [
        row
        for row in others
        if best.decode_tokens_s - row.decode_tokens_s <= 2 * (best.decode_noise + row.decode_noise)
    ]
    reason = f"{best.format_name}: the fastest of {len(served)} whose memory fits, {_speed(best)}"
    if tied:
        reason += f"; within noise of it: {', '.join(f'{row.format_name} ({_speed(row)})' for row in tied)}"
    elif others:
        reason += f"; next is {others[0].format_name} with {_speed(others[0])}"
    return {
        "batch_size": size,
        "format": best.format_name,
        "tied": [row.format_name for row in tied],
        "reason": f"{reason}.",
    }


def _speed(row: SpeedRow) -> str:
    over = f"{row.speedup:.2f}x bf16, " if row.speedup is not None and row.format_name != BASELINE else ""
    return f"{over}{row.decode_tokens_s:,.0f} tokens/s, {row.weights_gib:.1f} GiB of weights"
