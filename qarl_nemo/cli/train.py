"""`qarl train`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qarl_nemo.cli.program import command

if TYPE_CHECKING:
    from qarl_nemo.train.config import LocalConfig


@command
def train(
    config: Annotated[Path, typer.Argument(help="YAML with the whole run, or a name that `qarl configs` lists.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides, a.b=c.")] = None,
    parallel: Annotated[int, typer.Option(help="Runs at a time, for configs with a compare: block.")] = 2,
) -> None:
    """Train on this machine, without NeMo-RL; the same command resumes a killed run from its last checkpoint.

    A config with a `compare:` block runs every arm with every seed and writes one report over all.
    """
    from qarl_nemo.config import load_config
    from qarl_nemo.files import exclusive, make_folder
    from qarl_nemo.installation import find_config, is_nemo_rl_recipe
    from qarl_nemo.train.config import LocalConfig

    config = find_config(config)
    if is_nemo_rl_recipe(config):
        raise ValueError(f"{config} is a recipe for NeMo-RL; start it with examples/run_qarl_grpo.py --config {config}")
    settings = load_config(config, overrides or [], LocalConfig)
    if settings.compare is None:
        _train_one(settings)
        run_dirs = [settings.run_dir]
    else:
        from qarl_nemo.train.arms import expand_arms, run_arms

        runs = expand_arms(settings, str(config))
        _require_gpu(runs)
        make_folder(settings.run_dir, "the folder of a comparison")
        with exclusive(settings.run_dir / ".lock", f"the comparison's folder {settings.run_dir}"):
            run_dirs = run_arms(runs, parallel)
    _write_report(run_dirs, settings.run_dir)


def _train_one(settings: "LocalConfig") -> None:
    if settings.policy.megatron_cfg is None:
        from qarl_nemo.train.run import train_run

        train_run(settings)
    else:
        from qarl_nemo.train.megatron.launch import train_with_megatron

        train_with_megatron(settings)


def _require_gpu(runs: list["LocalConfig"]) -> None:
    """Refuse a comparison that needs a GPU once, not in every run's log; without one that does, torch stays away."""
    if any(run.device == "cuda" for run in runs):
        from qarl_nemo.train.setup import resolve_device

        resolve_device("cuda")


def _write_report(run_dirs: list[Path], folder: Path) -> None:
    from qarl_nemo.metrics.report import write_report, write_summary_figure

    write_summary_figure(run_dirs, folder / "summary.png")
    typer.echo(f"report: {write_report(run_dirs, folder / 'report.html')}")
