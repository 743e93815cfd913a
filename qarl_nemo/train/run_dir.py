"""A run's folder: new, to be resumed, or refused."""

import os
from pathlib import Path
from typing import Any

from qarl_nemo.config import ConfigError, flatten, literal, plain, read_yaml, write_yaml
from qarl_nemo.config.free_keys import FREE_KEYS
from qarl_nemo.files import FileError, make_folder
from qarl_nemo.metrics.events import METRICS_FILE, recorded_steps, require_steps
from qarl_nemo.train.checkpoint import (
    RUN_CONFIG,
    checkpoint_steps,
    newest_checkpoint,
    remove_leftovers,
    saved_steps,
)
from qarl_nemo.train.config import LocalConfig


class RunStoppedError(RuntimeError):
    """The run was interrupted from the keyboard; the message says how far it came."""

    exit_code = 130


class RunToldError(RunStoppedError):
    """The run was told to end (SIGTERM); the message says how far it came."""

    exit_code = 143


def is_complete(config: LocalConfig) -> bool:
    """Tell whether the folder holds this same run up to its last step, so that nothing is left to do.

    Returns:
        True if every step is recorded and, unless checkpoints are off, the last one has a checkpoint.

    Raises:
        ConfigError: the folder holds another run; every key that differs is listed.
        FileError: what it holds cannot be read.
    """
    total = config.grpo.max_num_steps
    if not (config.run_dir / RUN_CONFIG).is_file() or recorded_steps(config.run_dir / METRICS_FILE) < total:
        return False
    _require_same_run(config)
    return not config.checkpointing.enabled or max(checkpoint_steps(config.run_dir), default=0) >= total


def inspect_run_dir(config: LocalConfig) -> int | None:
    """Check that a folder is new, or holds this run and can be resumed; nothing is written.

    A run that failed before its first result (a wrong path, say) leaves a folder that a corrected config may take.

    Returns:
        The step of the checkpoint to resume from, or None for a new run.

    Raises:
        ConfigError: the folder holds another run; every key that differs is listed.
        FileError: it cannot be made or written; its newest checkpoint or its metrics are damaged, or it has metrics
            and no checkpoint.
    """
    folder, metrics = config.run_dir, config.run_dir / METRICS_FILE
    _require_place(folder)
    recorded = recorded_steps(metrics)
    require_same_run(config)
    step = newest_checkpoint(folder)
    if step is not None:
        require_steps(metrics, step)
    elif recorded:
        raise FileError(
            f"{folder} holds steps 1 to {recorded} of a run and no checkpoint to go on from; choose another "
            "run_dir=..., or delete that folder to start again"
        )
    return step


def require_same_run(config: LocalConfig) -> None:
    """Require that a folder holds this run, if it holds one.

    Raises:
        ConfigError: it holds another run; every key that differs is listed.
        FileError: what it holds cannot be read.
    """
    if holds_run(config.run_dir):
        _require_same_run(config)


def holds_run(folder: Path) -> bool:
    """Tell whether a folder holds a step or a checkpoint, so that it takes no other run's config any more."""
    return bool(recorded_steps(folder / METRICS_FILE) or saved_steps(folder))


def open_run_dir(config: LocalConfig) -> int | None:
    """Write config.yaml into a run's folder that `inspect_run_dir` finds fit.

    Returns:
        The step of the checkpoint to resume from, or None for a new run.

    Raises:
        ConfigError: the folder holds another run.
        FileError: what it holds is damaged or no run's, or it cannot be made or written.
    """
    step = inspect_run_dir(config)
    make_folder(config.run_dir, "a run's folder")
    remove_leftovers(config.run_dir)
    write_yaml(config.run_dir / RUN_CONFIG, literal(config.model_dump(mode="json", exclude={"compare"})))
    return step


def read_run_config(folder: Path) -> dict[str, Any]:
    """Read the config that a run wrote into its folder, with every key.

    Raises:
        ConfigError: it is no YAML.
        FileError: it is not whole, as after a copy onto a full disk.
    """
    path = folder / RUN_CONFIG
    found = plain(read_yaml(path))
    if lacking := [key for key in ("qarl", "policy") if not isinstance(found.get(key), dict)]:
        raise FileError(f"{path} is damaged: it lacks {' and '.join(lacking)}; put back the one that the run wrote")
    return found


def where_it_stands(config: LocalConfig) -> str:
    """Say in one sentence how far a run that was stopped came and what to do next."""
    recorded = recorded_steps(config.run_dir / METRICS_FILE)
    saved = max(checkpoint_steps(config.run_dir), default=None)
    if saved is not None:
        return f"stopped at step {recorded}, checkpoint {saved}; the same command goes on"
    if recorded:
        return f"stopped at step {recorded} without a checkpoint to go on from; choose another run_dir=..."
    return "stopped before the first step; the same command starts again"


def _require_place(folder: Path) -> None:
    """Require a folder that can be made or written, without making it."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise FileError(f"{existing} is no folder, so that {folder} cannot be a run's; choose another run_dir=...")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise FileError(
            f"{existing} may not be written, so that {folder} cannot be a run's; choose another run_dir=..."
        )


def _require_same_run(config: LocalConfig) -> None:
    path = config.run_dir / RUN_CONFIG
    if not path.is_file():
        raise FileError(
            f"{path} is missing, so that nothing says which run this folder holds; choose another run_dir=..."
        )
    found, wanted = read_run_config(config.run_dir), config.model_dump(mode="json", exclude={"compare"})
    # The stages of noise are parts of the whole run.
    free = tuple(key for key in FREE_KEYS if config.rollout.noise is None or key != "grpo.max_num_steps")
    differing = _differences(flatten(found), flatten(wanted), free)
    if differing:
        raise ConfigError(
            f"{config.run_dir} holds a run with another config; resume it with the same one, or choose another "
            "run_dir=... Differing keys:\n  " + "\n  ".join(differing)
        )


def _differences(found: dict[str, Any], wanted: dict[str, Any], free: tuple[str, ...]) -> list[str]:
    keys = sorted(key for key in {*found, *wanted} if not key.startswith(free))
    return [
        f"{key}: there {found.get(key)!r}, now {wanted.get(key)!r}" for key in keys if found.get(key) != wanted.get(key)
    ]
