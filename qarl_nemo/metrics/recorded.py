"""The contents of a run's files; a damaged one is reported with file, place and what was expected there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qarl_nemo.files import FileError, parse_json, read_json, require_file

_LINES = "one JSON object a line"
# What a run ran on: hardware and versions, in NeMo-RL also its command.
FACTS_FILE = "run.json"
# The config of a run of a comparison, by which it is started; other runs have none.
ARM_FILE = "arm.yaml"
# Beyond float32's range matplotlib's axes overflow.
LARGEST = 1e39
_Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
_Share = Annotated[float, Field(ge=0, le=1)]


class _Recorded(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=True)


class StepRecord(_Recorded):
    """A line of metrics.jsonl: numbers, null where a value was not finite."""

    step: Annotated[int, Field(ge=0, le=10**12)]
    __pydantic_extra__: dict[str, _Number | None] = Field(init=False)


class _ErrorToken(_Recorded):
    text: str
    start: Annotated[int, Field(ge=0)] = 0
    prev_prob: _Share | None = None
    generation_prob: _Share | None = None


class Example(_Recorded):
    """A line of diagnostics' examples, see `diagnostics.make_example`."""

    prompt: str
    response: str
    answer: str
    reward: _Number
    advantage: _Number
    error_tokens: list[_ErrorToken]


class Module(_Recorded):
    """A row of quantized.json."""

    name: str
    kind: str
    shape: str | list[int]
    quantized: bool
    format: str | None = None
    reason: str | None = None


class _Labels(_Recorded):
    name: str | None = None
    arm: str | None = None


class _Qarl(_Recorded):
    alignment: str | None = None
    format: str | None = None
    group_size: int | None = None


class _Loss(_Recorded):
    objective: str | None = None


class RunConfig(_Recorded):
    """What reports look at in a run's config.yaml."""

    run: _Labels | None = None
    seed: int | None = None
    qarl: _Qarl | None = None
    loss_fn: _Loss | None = None


class _NemoQarl(_Qarl):
    objective: _Loss | None = None


class _NemoPolicy(_Recorded):
    qarl: _NemoQarl | None = None


class _NemoGrpo(_Recorded):
    seed: int | None = None
    num_prompts_per_step: int | None = None
    num_generations_per_prompt: int | None = None


class NemoConfig(_Recorded):
    """What reports look at in a config of NeMo-RL."""

    policy: _NemoPolicy | None = None
    grpo: _NemoGrpo | None = None


def require_kind(value: Any, kind: type[BaseModel], place: str) -> None:
    """Require that a value from a run's file has the form that reports expect.

    Args:
        value: as parsed.
        kind: one of this module's models.
        place: file, and line where there are lines.

    Raises:
        FileError: every key that is missing or of another type.
    """
    try:
        kind.model_validate(value)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, p['loc'])) or 'the whole'}: {p['msg']}" for p in error.errors()[:5]]
        raise FileError(f"{place} is damaged, or not a run's: {'; '.join(problems)}") from error


def read_lines(path: Path, kind: type[BaseModel] | None = None) -> list[dict[str, Any]]:
    """Read a file with one JSON object a line; a last line that a kill cut short is left out.

    Args:
        path: file to read.
        kind: what each object must be; None takes any.

    Raises:
        FileError: a line other than an unfinished last one is not such an object.
    """
    return list(each_line(path, kind))


def each_line(path: Path, kind: type[BaseModel] | None = None) -> Iterator[dict[str, Any]]:
    """Read as `read_lines` does, one line at a time: long responses make files of many gigabytes."""
    require_file(path, _LINES)
    try:
        with path.open("rb") as file:
            # Split at newlines alone: JSON strings may hold other line separators.
            for number, line in enumerate(file, start=1):
                place = f"{path}, line {number}"
                try:
                    record = parse_json(line.decode(), place, "a JSON object")
                except ValueError as error:
                    cut_short = not isinstance(error, UnicodeDecodeError) or error.reason == "unexpected end of data"
                    if cut_short and not line.endswith(b"\n"):
                        return
                    if isinstance(error, UnicodeDecodeError):
                        raise FileError(f"{place}: expected {_LINES}, but it is not UTF-8") from error
                    raise
                if kind is not None:
                    require_kind(record, kind, place)
                yield record
    except OSError as error:
        raise FileError(f"{path}: expected {_LINES}, but: {error}") from error


def read_rows(path: Path, kind: type[BaseModel]) -> list[dict[str, Any]]:
    """Read a JSON list of objects.

    Raises:
        FileError: it is not such a list.
    """
    rows = read_json(path, "a JSON list of objects", list)
    for number, row in enumerate(rows):
        require_kind(row, kind, f"{path}, row {number}")
    return rows
