"""Measured figures as data: docs/results/*.json."""

import datetime
import json
import math
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from qarl_nemo.files import exclusive, read_json, require_makeable, write_atomic


class Figure(NamedTuple):
    """A measurement; `op` and `goal` say what it should be, no goal that nothing was promised."""

    name: str
    value: float
    unit: str
    op: str
    goal: float | None = None


class ResultRow(BaseModel):
    """One measured figure, where it was measured and what it should be."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(min_length=1)
    """What was measured, e.g. demo_train_s; unique per hardware."""
    value: float
    """The measurement; finite."""
    unit: str
    """Unit of value and goal, e.g. s, tokens/s, nats; empty for a ratio."""
    op: Literal["<=", ">=", "<", ">", "=="]
    """How value should compare with goal."""
    goal: float | None
    """What value should reach; null when nothing was promised."""
    hardware: str = Field(min_length=1)
    """Machine, e.g. 2 CPU cores or 1x H200."""
    versions: dict[str, str]
    """Package versions that matter, e.g. torch: 2.13.0."""
    command: str = Field(min_length=1)
    """Command that measures it again."""
    date: str
    """Day of the measurement, YYYY-MM-DD."""

    @field_validator("value", "goal")
    @classmethod
    def _is_finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{value} is not a measurement")
        return value

    @field_validator("date")
    @classmethod
    def _is_day(cls, value: str) -> str:
        if datetime.date.fromisoformat(value).isoformat() != value:
            raise ValueError(f"{value!r} is not YYYY-MM-DD")
        return value

    @property
    def met(self) -> bool | None:
        """Whether value reaches goal; None without a goal."""
        if self.goal is None:
            return None
        return {
            "<=": self.value <= self.goal,
            ">=": self.value >= self.goal,
            "<": self.value < self.goal,
            ">": self.value > self.goal,
            "==": self.value == self.goal,
        }[self.op]


_ROWS = TypeAdapter(list[ResultRow])


def read_results(path: Path) -> list[ResultRow]:
    """Read and validate a results file.

    Args:
        path: a JSON list of rows.

    Raises:
        ValueError: the file is not such a list; every offending row and field is named.
    """
    return _validate(read_json(path, "a JSON list of results", list), str(path))


def require_place(path: Path) -> None:
    """Require, before anything is measured, that `append_results` can add rows to a file.

    Raises:
        ValueError: it is something else, or cannot be made.
    """
    if path.exists():
        read_results(path)
    require_makeable(path)
    if path.parent.is_dir():
        # Its file system may have no locks.
        with _alone(path):
            pass


def append_results(path: Path, rows: Iterable[Mapping[str, Any] | ResultRow]) -> list[ResultRow]:
    """Add rows to a results file; one with the name and hardware of an earlier row takes its place. Atomic.

    Each row is one line, so that a figure measured again is one line of a diff. Of one name the newest row stays last,
    behind those of other machines, because it is the one that counts.

    Args:
        path: results file, created with its folder when missing.
        rows: new rows, see `ResultRow`.

    Returns:
        Every row now in the file, in its order.

    Raises:
        ValueError: a new row, or one in the file, is not valid; nothing is written.
    """
    new = _validate([row.model_dump() if isinstance(row, ResultRow) else dict(row) for row in rows], "new rows")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        old = read_results(path) if path.exists() else []
        merged = {(row.name, row.hardware): row for row in old}
        last = {row.name: row.hardware for row in old}
        for row in new:
            if last.get(row.name) != row.hardware:
                merged.pop((row.name, row.hardware), None)
            merged[row.name, row.hardware], last[row.name] = row, row.hardware
        _write(path, merged.values())
    return list(merged.values())


def remove_results(path: Path, names: Collection[str]) -> list[ResultRow]:
    """Remove rows of these names from a results file, whatever machine they are from. Atomic.

    Returns:
        The rows that it held; without any the file stays as it is.

    Raises:
        ValueError: the file is not a results file.
    """
    with _alone(path):
        rows = read_results(path)
        removed = [row for row in rows if row.name in names]
        if removed:
            _write(path, [row for row in rows if row.name not in names])
    return removed


def result_rows(
    figures: Iterable[Figure], *, hardware: str, versions: Mapping[str, str], command: str
) -> list[dict[str, Any]]:
    """Return figures measured today as rows for `append_results`; those that are not finite are left out.

    Args:
        figures: what was measured; fractions keep eight digits, everything else five.
        hardware: what they were measured on, see `qarl_nemo.metrics.machine.hardware`.
        versions: package versions that matter.
        command: what measures them again.
    """
    facts = {
        "hardware": hardware,
        "versions": dict(versions),
        "command": command,
        "date": datetime.date.today().isoformat(),
    }
    return [
        figure._asdict() | {"value": float(f"{figure.value:.{8 if figure.unit == 'fraction' else 5}g}")} | facts
        for figure in figures
        if math.isfinite(figure.value)
    ]


def record_figures(
    path: Path | None, figures: Iterable[Figure], *, hardware: str, versions: Mapping[str, str], command: str
) -> list[dict[str, Any]]:
    """Print figures measured today, one a line, and append them to a results file if one is named.

    Args:
        path: results file; None only prints.
        figures: what was measured.
        hardware: see `result_rows`.
        versions: likewise.
        command: likewise.
    """
    rows: list[dict[str, Any]] = []
    # One at a time, because some take minutes to come.
    for figure in figures:
        for row in result_rows([figure], hardware=hardware, versions=versions, command=command):
            goal = "" if row["goal"] is None else f"  ({row['op']} {row['goal']:g})"
            print(f"{row['name']:70} {row['value']:>10g} {row['unit']}{goal}", flush=True)
            rows.append(row)
    if path is not None:
        append_results(path, rows)
    return rows


def running_command(program: str, *left_out: str) -> str:
    """Return the command that is running.

    Args:
        program: what it begins with.
        left_out: options with a value each that do not belong to what measures a figure again.
    """
    kept, arguments = [], iter(sys.argv[1:])
    for word in arguments:
        if word in left_out:
            next(arguments, None)
        elif word.partition("=")[0] not in left_out:
            kept.append(word)
    return " ".join([program, shlex.join(kept)]).rstrip()


def _alone(path: Path) -> AbstractContextManager[None]:
    # Benches that run side by side add to one file; a row written between another's reading and writing would be lost.
    return exclusive(path.with_name(f".{path.name}.lock"), f"results file {path}", wait=True)


def _write(path: Path, rows: Iterable[ResultRow]) -> None:
    lines = ",\n".join(json.dumps(row.model_dump()) for row in rows)
    write_atomic(path, f"[\n{lines}\n]\n")


def _validate(content: Any, source: str) -> list[ResultRow]:
    try:
        return _ROWS.validate_python(content)
    except ValidationError as error:
        problems = "; ".join(f"row {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ValueError(f"{source}: {problems}. Fields of a row: {', '.join(ResultRow.model_fields)}") from error
