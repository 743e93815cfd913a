"""`qarl configs`."""

import re
from pathlib import Path
from typing import Annotated

import typer

from qarl_nemo.cli.program import command


@command
def configs(
    name: Annotated[str | None, typer.Argument(help="Print this config, to be copied and changed.")] = None,
) -> None:
    """List the configs that come with the package; `qarl train NAME` runs one, `qarl configs NAME` prints it."""
    from qarl_nemo.files import read_text
    from qarl_nemo.installation import find_config, is_nemo_rl_recipe, shipped_configs

    if name is not None:
        path = find_config(Path(name)).resolve()
        # The copy lies elsewhere, and what it builds on is named relative to it.
        whole = re.sub(r"^(defaults: )(?=[\w.-]+$)", rf"\g<1>{path.parent}/", read_text(path, "a config"), flags=re.M)
        typer.echo(whole, nl=False)
        return
    for of_nemo, title in ((False, "qarl train NAME [a.b=c ...]"), (True, "on NeMo-RL, see docs/guide/nemo_rl.md")):
        typer.echo(f"{title}:")
        found = {key: path for key, path in shipped_configs().items() if is_nemo_rl_recipe(path) is of_nemo}
        width = max(map(len, found))
        for key, path in found.items():
            first = path.read_text(encoding="utf-8").splitlines()[0]
            typer.echo(f"  {key:<{width}}  {first.lstrip('# ')}")
