"""`qarl train`."""

import contextlib
from collections.abc import Collection
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qarl_nemo.cli.program import command
from qarl_nemo.cli.train_check import check_runs

_REPORT = "report.html"

if TYPE_CHECKING:
    from qarl_nemo.train.config import LocalConfig


@partial(command, ignore_unknown_options=True)
def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="YAML with the whole run, or a name that `qarl configs` lists.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides, a.b=c.")] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Only this arm of a compare: block; repeat for several.")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Runs of a compare: block at a time, over all visible GPUs. Default: 2.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Train nothing: say what would run, or all that speaks against it here.")
    ] = False,
) -> None:
    """Train on this machine, without NeMo-RL; the same command resumes a killed run from its last checkpoint.

    A config with a `compare:` block runs every arm with every seed, spread over the GPUs, and writes one report.
    Several such commands may share its folder, each with arms or seeds of its own.
    """
    from qarl_nemo.config import load_config
    from qarl_nemo.installation import find_config, is_nemo_rl_recipe
    from qarl_nemo.train.config import LocalConfig

    _require_options(context, [str(config), *(overrides or [])])
    config = find_config(config)
    if is_nemo_rl_recipe(config):
        raise ValueError(f"{config} is a recipe for NeMo-RL; start it with examples/run_qarl_grpo.py --config {config}")
    settings = load_config(config, overrides or [], LocalConfig)
    if settings.compare is not None:
        _compare(settings, config, arm or [], overrides or [], parallel or 2, check=check)
    elif given := [name for name, value in (("--arm", arm), ("--parallel", parallel)) if value]:
        raise ValueError(f"{' and '.join(given)}: {config} has no compare: block, whose arms they are for")
    elif check:
        check_runs([settings])
    else:
        _train_and_report(settings)


def _require_options(context: typer.Context, given: list[str]) -> None:
    """Refuse options that there are not, with what was probably meant: other launchers take settings with dashes."""
    from qarl_nemo.config.problems import hint

    unknown = list(dict.fromkeys(text.partition("=")[0] for text in given if text.startswith("-")))
    if not unknown:
        return
    params = context.command.get_params(context)
    options = [max(param.opts, key=len) for param in params if param.param_type_name == "option"]
    # Their dashes alone would make short names similar: --lr, --arm.
    names = [option.lstrip("-") for option in options]
    slips = [name for name in unknown if "." not in name and get_close_matches(name.lstrip("-"), names)]
    problems = [f"no such option {name}: {hint(name if name in slips else '', options)}" for name in unknown]
    if any(name not in slips for name in unknown):
        problems.append("Settings of a run are overrides without dashes, after the config: grpo.max_num_steps=10")
    raise ValueError("\n  ".join(problems))


def _compare(
    settings: "LocalConfig", source: Path, arms: list[str], overrides: list[str], parallel: int, *, check: bool
) -> None:
    from qarl_nemo.files import make_folder
    from qarl_nemo.train.arms import (
        RunsFailedError,
        expand_arms,
        expand_trained,
        require_alike,
        require_effect,
        require_reach,
        run_arms,
        select_arms,
    )

    assert settings.compare is not None
    require_effect(settings.compare, overrides)
    runs = select_arms(expand_arms(settings, str(source)), arms)
    require_reach(settings, runs, overrides)
    # A check tells all that is wrong with the runs themselves together.
    require_alike(runs, [run for run in expand_trained(settings, str(source)) if not (check and run in runs)])
    if check:
        check_runs(runs)
        return
    # Starting a process only to say so takes seconds for each.
    runs = [run for run in runs if not _has_nothing_left(run)]
    _require_gpu(runs)
    make_folder(settings.run_dir, "the folder of a comparison")
    try:
        ran = run_arms(runs, parallel)
    except RunsFailedError:
        # What failed is told in any case, and the report of the others where it can be.
        with contextlib.suppress(ValueError, OSError):
            _report_all(settings, source, [])
        raise
    _report_all(settings, source, ran)


def _has_nothing_left(run: "LocalConfig") -> bool:
    """Tell whether a run and its report are complete, and say so; what is wrong with one, its own process tells."""
    from qarl_nemo.metrics.events import METRICS_FILE, recorded_steps
    from qarl_nemo.train.checkpoint import leftovers
    from qarl_nemo.train.run_dir import is_complete

    metrics, report = run.run_dir / METRICS_FILE, run.run_dir / _REPORT
    keep_last = run.checkpointing.keep_last if run.checkpointing.enabled else None
    with contextlib.suppress(ValueError, OSError):
        # A run that was made longer and killed at its end still has the report of the shorter one.
        if is_complete(run) and report.stat().st_mtime_ns >= metrics.stat().st_mtime_ns:
            if leftovers(run.run_dir, keep_last):
                return False
            typer.echo(f"{run.name}: already complete, {recorded_steps(metrics)} steps in {run.run_dir}")
            return True
    return False


def _report_all(settings: "LocalConfig", source: Path, ran: Collection[Path]) -> None:
    from qarl_nemo.files import exclusive
    from qarl_nemo.train.arms import expand_trained

    # Another command may have trained other runs meanwhile, and may write the report of all of them right now.
    with exclusive(settings.run_dir / ".lock", f"the comparison's folder {settings.run_dir}", wait=True):
        every = expand_trained(settings, str(source))
        if reported := [run.run_dir for run in every if run.run_dir in ran or _ran_before(run)]:
            _write_report(reported, settings.run_dir)


def _ran_before(run: "LocalConfig") -> bool:
    from qarl_nemo.config import ConfigError
    from qarl_nemo.files import FileError
    from qarl_nemo.metrics.events import METRICS_FILE, recorded_steps
    from qarl_nemo.train.run_dir import is_complete

    # Another run's folder is none of this command's business, since it did not ask for this arm.
    with contextlib.suppress(FileError):
        try:
            if is_complete(run):
                return True
            if steps := recorded_steps(run.run_dir / METRICS_FILE):
                typer.echo(f"{run.name} is not in the report: it has {steps} of {run.grpo.max_num_steps} steps")
        except ConfigError:
            typer.echo(f"{run.name} is not in the report: its folder holds a run with another config")
    return False


def _train_one(settings: "LocalConfig") -> None:
    if settings.policy.megatron_cfg is None:
        from qarl_nemo.train.run import train_run

        train_run(settings)
    else:
        from qarl_nemo.train.megatron.launch import train_with_megatron

        train_with_megatron(settings)


def _train_and_report(settings: "LocalConfig") -> None:
    from qarl_nemo.config import ConfigError
    from qarl_nemo.files import FileError
    from qarl_nemo.train.run_dir import is_complete

    complete = False
    with contextlib.suppress(ConfigError, FileError):
        complete = is_complete(settings) and (settings.run_dir / _REPORT).is_file()
    _train_one(settings)
    try:
        _write_report([settings.run_dir], settings.run_dir)
    except FileError as error:
        if not complete:
            raise
        typer.echo(f"its report stays as it is: {error}")


def _require_gpu(runs: list["LocalConfig"]) -> None:
    """Refuse a comparison that needs a GPU once, not in every run's log; without one that does, torch stays away."""
    if any(run.device == "cuda" for run in runs):
        from qarl_nemo.train.setup import resolve_device

        resolve_device("cuda")


def _write_report(run_dirs: list[Path], folder: Path) -> None:
    from qarl_nemo.metrics.report import write_report, write_summary_figure

    write_summary_figure(run_dirs, folder / "summary.png")
    typer.echo(f"report: {write_report(run_dirs, folder / _REPORT)}")
