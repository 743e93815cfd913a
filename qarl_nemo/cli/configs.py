"""`qarl configs`."""

from pathlib import Path
from typing import Annotated

import typer

from qarl_nemo.cli.program import command


@command
def configs(
    name: Annotated[str | None, typer.Argument(help="Print this config, to be copied and changed.")] = None,
) -> None:
    """List the configs that come with the package; `qarl train NAME` runs one, `qarl configs NAME` prints it."""
    from qarl_nemo.installation import find_config, shipped_configs

    if name is not None:
        typer.echo(find_config(Path(name)).read_text(encoding="utf-8"), nl=False)
        return
    found = shipped_configs()
    width = max(map(len, found))
    for of_nemo, title in ((False, "qarl train NAME [a.b=c ...]"), (True, "on NeMo-RL, see docs/guide/nemo_rl.md")):
        typer.echo(f"{title}:")
        for key, path in found.items():
            if key.startswith("qarl-") is of_nemo:
                first = path.read_text(encoding="utf-8").splitlines()[0]
                typer.echo(f"  {key:<{width}}  {first.lstrip('# ')}")
