"""Options that several commands share."""

from typing import Annotated

import typer

from qarl_formats import FORMAT_NAMES, NARROW_NAMES, NESTING, SCALE_CONVENTIONS

_NAMES = f"{', '.join(FORMAT_NAMES[:-1])} or {FORMAT_NAMES[-1]}; {', '.join(NARROW_NAMES)}: fewer levels, in int4."
Format = Annotated[str, typer.Option("--format", help=_NAMES)]
GroupSize = Annotated[int | None, typer.Option(help="Elements per scale along K (w4a16: 128, 64, 32).")]
ScaleConvention = Annotated[
    str | None, typer.Option(help=f"{', '.join(SCALE_CONVENTIONS[:-1])} or {SCALE_CONVENTIONS[-1]}.")
]
NestedIn = Annotated[str | None, typer.Option(help=f"Round the codes of this finer format: {', '.join(NESTING)}.")]
Targets = Annotated[str, typer.Option(help="Comma-separated: experts, attention, mlp.")]
MaxShardBytes = Annotated[int, typer.Option(help="Largest output file, which bounds the memory.")]
Device = Annotated[str, typer.Option(help="Where quantization runs: cpu or cuda.")]
Overwrite = Annotated[bool, typer.Option(help="Replace an earlier output of this command.")]
