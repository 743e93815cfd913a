"""Example rollouts as the report shows them: excerpts with the error tokens marked."""

from collections.abc import Mapping, Sequence
from typing import Any

from qarl_nemo.metrics.report.arms import Arm
from qarl_nemo.metrics.report.style import format_number

_MAX_EXAMPLES = 8
_EXCERPT_CHARS = 700
_LEAD_CHARS = 160


def example_rows(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Choose example rollouts, those with error tokens first, and cut each to an excerpt with the errors marked."""
    share = max(2, _MAX_EXAMPLES // max(len(arms), 1))
    rows = []
    for arm in arms:
        examples = [example for run in arm.runs for example in run.examples]
        for example in sorted(examples, key=lambda item: not _num_errors(item))[:share]:
            num_errors = _num_errors(example)
            rows.append(
                {
                    "arm": arm.name,
                    "color": arm.color,
                    "step": example["step"],
                    "reward": format_number(example["reward"]),
                    "advantage": format_number(example["advantage"]),
                    "sign": _sign(example["advantage"]),
                    "prompt": example["prompt"],
                    "answer": example["answer"],
                    "num_errors": "-" if num_errors is None else str(num_errors),
                    "unmarked": num_errors is None or num_errors > len(example["error_tokens"]),
                    "segments": mark_errors(example["response"], example["error_tokens"]),
                }
            )
    return rows


def mark_errors(response: str, errors: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Split a response into plain and error segments, cut to an excerpt around the first error.

    Args:
        response: whole text.
        errors: error tokens with text, prev_prob, generation_prob and start; without start the text is searched for.

    Returns:
        Segments with text and note; the note is empty for plain text and tells an error token's probabilities.
    """
    placed, position = [], 0
    for error in errors:
        start = error.get("start", response.find(error["text"], position))
        if start >= position and error["text"]:
            placed.append((start, error))
            position = start + len(error["text"])
    begin = max(0, placed[0][0] - _LEAD_CHARS) if placed else 0
    end = min(len(response), begin + _EXCERPT_CHARS)
    segments = [{"text": "[...] ", "note": ""}] if begin else []
    position = begin
    for start, error in placed:
        if start >= end:
            break
        segments.append({"text": response[position:start], "note": ""})
        probabilities = [_probability(error.get(name)) for name in ("prev_prob", "generation_prob")]
        note = f"p = {probabilities[0]} under the learner, {probabilities[1]} under the rollout engine"
        segments.append({"text": error["text"].replace("\n", "\\n"), "note": note})
        position = start + len(error["text"])
    segments.append({"text": response[position:end] + (" [...]" if end < len(response) else ""), "note": ""})
    return [segment for segment in segments if segment["text"]]


def _num_errors(example: Mapping[str, Any]) -> int | None:
    """Count error tokens; NeMo-RL's dumps cannot place them in the text, and some not even count them."""
    return example.get("num_error_tokens", len(example["error_tokens"]))


def _sign(advantage: float) -> str:
    if advantage == 0:
        return "zero"
    return "positive" if advantage > 0 else "negative"


def _probability(value: float | None) -> str:
    return "?" if value is None else f"{value:.2g}"
