"""The program that commands are added to; every command's errors become one message and an exit code here."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from qarl_nemo import __version__
from qarl_nemo.failures import run_reported

app = typer.Typer(
    name="qarl",
    help="Quantization-aware RL for Mixture-of-Experts language models.",
    epilog="NeMo-RL recipes: examples/run_qarl_grpo.py. Clusters: python -m qarl_nemo.cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(function: Callable[..., None], **settings: Any) -> Callable[..., None]:
    """Add a command; an exception in it ends the process with one message and an exit code.

    Args:
        function: has typer's annotations; its name becomes the command's, without an underscore at the end.
        settings: click's context settings, such as `ignore_unknown_options`.

    Returns:
        The function, wrapped to end with `SystemExit`.
    """

    @functools.wraps(function)
    def ending(*arguments: Any, **options: Any) -> None:
        raise SystemExit(run_reported(functools.partial(function, *arguments, **options), "qarl"))

    described = _flowing(inspect.getdoc(function) or "")
    return app.command(function.__name__.rstrip("_"), help=described, context_settings=settings)(ending)


def _flowing(docstring: str) -> str:
    """Join each paragraph's lines; typer would keep their ends, which no narrower terminal has room for."""
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in docstring.split("\n\n"))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qarl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; the process ends with 0, with 2 for what a user can mend, or as `failures` says."""
    app(prog_name="qarl")
