"""Options that several commands share."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from qarl_formats import FORMAT_NAMES, NARROW_NAMES, NESTING, SCALE_CONVENTIONS, WIDE_NAMES

Settings = TypeVar("Settings")

SERVED = f"{', '.join(FORMAT_NAMES[:-1])} or {FORMAT_NAMES[-1]}; {', '.join(NARROW_NAMES)}: fewer levels, in int4"
"""What `--format` says of the formats that runs have on every engine."""
Format = Annotated[str, typer.Option("--format", help=f"{SERVED}; {', '.join(WIDE_NAMES)}: dense layers.")]
GroupSize = Annotated[int | None, typer.Option(help="Elements per scale along K (w4a16: 128, 64, 32).")]
_CODES = "Integer codes"
ScaleConvention = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(SCALE_CONVENTIONS[:-1])} or {SCALE_CONVENTIONS[-1]}. Keep the default; "
        "docs/design/formats.md compares them.",
        rich_help_panel=_CODES,
    ),
]
NestedIn = Annotated[
    str | None,
    typer.Option(
        help=f"Round the codes of this finer format: {', '.join(NESTING)}, as runs do that publish 8-bit codes and "
        "serve fewer bits.",
        rich_help_panel=_CODES,
    ),
]
OwnWidth = Annotated[
    bool,
    typer.Option(
        "--own-width",
        help=f"Store {' and '.join(NARROW_NAMES)} in as few bits, for dense layers: smaller than int4.",
        rich_help_panel=_CODES,
    ),
]
Targets = Annotated[str, typer.Option(help="Comma-separated: experts, attention, mlp.")]
MaxShardBytes = Annotated[int, typer.Option(help="Largest output file, which bounds the memory.")]
Device = Annotated[str, typer.Option(help="Where quantization runs: cpu or cuda.")]
FrozenBase = Annotated[
    Path | None, typer.Option(help="Where the base of a run with LoRA or a quantized base is now, if it was moved.")
]
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


def require_own_width(own_width: bool, names: Sequence[str]) -> None:
    """Refuse `--own-width` where none of some known formats has another width to be stored in.

    Args:
        own_width: whether it was given.
        names: the formats.

    Raises:
        ValueError: it would change nothing.
    """
    if own_width and not set(names).intersection(NARROW_NAMES):
        raise ValueError(
            f"--own-width changes nothing of {', '.join(names)}: it stores the codes of {' and '.join(NARROW_NAMES)} "
            "in 3 and 2 bits; leave it out, or choose one of these formats"
        )


def given_options(context: typer.Context) -> list[str]:
    """Return the names of the options and arguments that a command line has, in the order of `--help`."""
    sources = {param.opts[0]: context.get_parameter_source(param.name or "") for param in context.command.params}
    return [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
