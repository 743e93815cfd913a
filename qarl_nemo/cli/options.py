"""Options that several commands share."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import typer

from qarl_formats import FORMAT_NAMES, NARROW_NAMES, NESTING, SCALE_CONVENTIONS, WIDE_NAMES

Settings = TypeVar("Settings")

_SERVED = f"{', '.join(FORMAT_NAMES[:-1])} or {FORMAT_NAMES[-1]}; {', '.join(NARROW_NAMES)}: fewer levels, in int4"
Format = Annotated[str, typer.Option("--format", help=f"{_SERVED}; {', '.join(WIDE_NAMES)}: dense layers.")]
ServedFormat = Annotated[str, typer.Option("--format", help=f"{_SERVED}.")]
GroupSize = Annotated[int | None, typer.Option(help="Elements per scale along K (w4a16: 128, 64, 32).")]
ScaleConvention = Annotated[
    str | None, typer.Option(help=f"{', '.join(SCALE_CONVENTIONS[:-1])} or {SCALE_CONVENTIONS[-1]}.")
]
NestedIn = Annotated[str | None, typer.Option(help=f"Round the codes of this finer format: {', '.join(NESTING)}.")]
OwnWidth = Annotated[
    bool,
    typer.Option(
        "--own-width", help=f"Store {' and '.join(NARROW_NAMES)} in as few bits, for dense layers: smaller than int4."
    ),
]
Targets = Annotated[str, typer.Option(help="Comma-separated: experts, attention, mlp.")]
MaxShardBytes = Annotated[int, typer.Option(help="Largest output file, which bounds the memory.")]
Device = Annotated[str, typer.Option(help="Where quantization runs: cpu or cuda.")]
Overwrite = Annotated[bool, typer.Option(help="Replace an earlier output of this command.")]


def settings_of(model: type[Settings], given: Mapping[str, Any], /, **changed: Any) -> Settings:
    """Fill a dataclass of settings from a command's options of the same names.

    Args:
        model: the dataclass.
        given: the command's `locals()`.
        changed: fields for which an option has another name or form.
    """
    names = {field.name for field in dataclasses.fields(model)}  # type: ignore[arg-type]
    return model(**({name: value for name, value in given.items() if name in names} | changed))
