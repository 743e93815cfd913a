"""A comparison's figures as rows of docs/results."""

import shlex
from pathlib import Path
from typing import Any

from qarl_nemo.measure.compare.operators import total_by_operator
from qarl_nemo.measure.compare.run import FLOOR, Comparison
from qarl_nemo.measure.compare.settings import CompareSettings
from qarl_nemo.metrics.machine import hardware, versions
from qarl_nemo.metrics.results import (
    Figure,
    append_results,
    read_results,
    require_place,
    result_rows,
    running_command,
)
from qarl_nemo.train.setup import resolve_device

MAX_GAP_RATIO = 1.05
_COMMAND = "qarl compare "
# What names of rows do not tell.
_USUAL_GROUP_SIZE, _USUAL_SCALE_CONVENTION = 128, "full_range"
# Sampled responses are what RL trains on; compare.json has the greedy ones as well.
_DECODING = "sampled"
# If engines agree in nearly every bit, their gap cannot serve as a floor. That is assumed below a tenth of the gap
# that another attention kernel makes in the same learner.
_FLOOR_OVER_OWN = 0.1


def require_rows_of(checkpoint: Path, path: Path) -> None:
    """Require, before anything is measured, a results file in which rows of this checkpoint replace no other's.

    Args:
        checkpoint: what is compared; names of rows do not tell it.
        path: the results file.

    Raises:
        ValueError: it holds comparisons of another checkpoint, or is no place for results.
    """
    require_place(path)
    for row in read_results(path) if path.exists() else []:
        if row.command.startswith(_COMMAND) and checkpoint not in map(Path, shlex.split(row.command)):
            raise ValueError(
                f"{path} holds comparisons of another checkpoint than {checkpoint} ({row.command}), whose rows have "
                "the same names; name another file"
            )


def append_comparison(
    settings: CompareSettings, result: Comparison, gaps: Path | None, operators: Path | None
) -> list[Path]:
    """Append the figures to results files, with the command that is running.

    Args:
        settings: what was asked for.
        result: what was measured.
        gaps: file of the gaps, or None.
        operators: file of the operators' differences, or None.

    Returns:
        The files.

    Raises:
        ValueError: a file is not valid; it is left as it was.
    """
    command = running_command("qarl", "--record", "--record-operators")
    device = resolve_device(settings.device).type
    # Both may go into one file.
    parts = [(gaps, gap_figures(result, settings.precision)), (operators, _operator_figures(result))]
    written = []
    for path, figures in parts:
        if path is not None:
            append_results(path, comparison_rows(settings, result.engine, figures, device, command))
            written.append(path)
    return list(dict.fromkeys(written))


def comparison_rows(
    settings: CompareSettings, engine: str, figures: list[Figure], device: str, command: str
) -> list[dict[str, Any]]:
    """Return rows of a results file, whose names end in what was asked for beside formats.

    These are targets other than experts, a group size and a scale convention that are not the usual ones, the format
    that codes are nested in, `own_width`, the learner's attention and `adapter`.

    Args:
        settings: what was asked for.
        engine: the engine's name and version.
        figures: what `gap_figures` returned, or the operators' figures.
        device: `cpu` or `cuda`.
        command: the command that measures it again.
    """
    suffix = "" if settings.targets == ("experts",) else "_" + "_".join(settings.targets)
    suffix += f"_group_size_{settings.group_size}" if settings.group_size not in (None, _USUAL_GROUP_SIZE) else ""
    convention = settings.scale_convention
    suffix += f"_{convention}" if convention not in (None, _USUAL_SCALE_CONVENTION) else ""
    suffix += f"_in_{settings.nested_in}" if settings.nested_in else ""
    suffix += "_own_width" if settings.own_width else ""
    suffix += "_engine_attention" if settings.attention == "engine" else ""
    suffix += "_adapter" if settings.adapter else ""
    return result_rows(
        (figure._replace(name=figure.name + suffix) for figure in figures),
        hardware=hardware(device),
        versions=versions() | dict([engine.split(" ")] if " " in engine else []),
        command=command,
    )


def gap_figures(result: Comparison, precision: str) -> list[Figure]:
    """Return the gaps of sampled responses.

    Args:
        result: what was measured.
        precision: dtype of the models, `bfloat16` or `float32`.

    Returns:
        `gap_floor_bf16`; for each format `gap_aligned_`, and `gap_ratio_` and `gap_ratio_rollout_only_`, over that
        floor if there is one (FP32 models differ only in the last bits of their logprobs);
        `gap_attention_`, the learner against itself with another attention kernel, and `gap_ratio_own_`, aligned over
        that; `gap_engine_`, the engine against itself.
    """
    figures: list[Figure] = []
    floor = next(row for row in result.rows if row["arm"] == FLOOR and row["decoding"] == _DECODING)
    agree = floor["gap_mean"] == 0
    has_floor = agree or (precision == "bfloat16" and floor["gap_over_own"] >= _FLOOR_OVER_OWN)
    for row in result.rows:
        arm, fmt = row["arm"], row["format"]
        if row["decoding"] != _DECODING:
            continue
        if arm != "rollout_only":
            figures.append(Figure(f"gap_{'floor' if arm == FLOOR else arm}_{fmt}", row["gap_mean"], "nats", "<="))
        if arm == "aligned" and has_floor:
            figures.append(Figure(f"gap_ratio_{fmt}", row["gap_over_floor"], "", "<=", MAX_GAP_RATIO))
        if arm == "aligned":
            figures.append(Figure(f"gap_ratio_own_{fmt}", row["gap_over_own"], "", "<="))
        if arm == "rollout_only" and has_floor:
            figures.append(Figure(f"gap_ratio_{arm}_{fmt}", row["gap_over_floor"], "", "<="))
    return figures


def _operator_figures(result: Comparison) -> list[Figure]:
    """Return `operator_<format>_<name>_<phase>_same`, the fraction of equal values, and `.._db` if some differ."""
    figures: list[Figure] = []
    for fmt in dict.fromkeys(row["format"] for row in result.operators):
        for row in total_by_operator([row for row in result.operators if row["format"] == fmt]):
            name = f"operator_{fmt}_{row['operator']}_{row['phase']}"
            figures.append(Figure(f"{name}_same", row["identical"], "fraction", ">="))
            if row["snr_db"] is not None:
                figures.append(Figure(f"{name}_db", row["snr_db"], "dB", ">="))
    return figures
