"""Atomic checkpoints of a run: `checkpoints/step_000100/` with a Hugging Face model directory and the optimizer."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial as bound
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qarl_nemo.files import FileError, os_reason, read_json, sync
from qarl_nemo.train.file_list import file_problems, write_file_list
from qarl_nemo.train.learner import Learner

# The resolved config, in a run's folder.
RUN_CONFIG = "config.yaml"
STATE_FILE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")
# Folders that a killed save or deletion leaves behind.
_LEFTOVER = re.compile(r"step_\d{6,}\.(partial|deleted)")


def saved_steps(run_dir: Path) -> list[int]:
    """List the steps that have a checkpoint's folder, ascending, whatever is in it."""
    folder = run_dir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


def checkpoint_steps(run_dir: Path) -> list[int]:
    """List the steps that have a whole checkpoint, ascending: every listed file is there and has the listed size."""
    return [step for step in saved_steps(run_dir) if not file_problems(checkpoint_dir(run_dir, step), checksums=False)]


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def newest_checkpoint(run_dir: Path) -> int | None:
    """Return the newest checkpoint's step, after checking every byte against its list of files.

    Args:
        run_dir: the run's folder.

    Returns:
        The step, or None if there is no checkpoint.

    Raises:
        FileError: it is not whole; names every file that differs.
    """
    steps = saved_steps(run_dir)
    if not steps:
        return None
    folder = checkpoint_dir(run_dir, steps[-1])
    problems = file_problems(folder, checksums=True)
    if problems:
        older = [step for step in checkpoint_steps(run_dir) if step != steps[-1]]
        fix = f"delete it to go on from step {older[-1]}" if older else "there is no other: choose another run_dir=..."
        raise FileError(f"{folder} is not a whole checkpoint; {fix}\n  " + "\n  ".join(problems))
    return steps[-1]


def require_checkpoint(run_dir: Path) -> int:
    """Return the newest checkpoint's step of a run that has one.

    Args:
        run_dir: the run's folder.

    Raises:
        FileError: there is none, or it is not whole.
    """
    step = newest_checkpoint(run_dir)
    if step is None:
        raise FileError(
            f"the run {run_dir} has no checkpoint; there is one when its first step begins, unless "
            "checkpointing.enabled is false"
        )
    return step


def save_checkpoint(
    run_dir: Path,
    step: int,
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    state: dict[str, float],
    *,
    keep_last: int,
) -> Path:
    """Write a checkpoint under a temporary name, rename it, then delete all but the newest `keep_last`.

    Args:
        run_dir: the run's folder.
        step: training steps it contains.
        learner: writes its model, as a Hugging Face directory that any other tool can load, and its optimizer.
        tokenizer: saved beside the model.
        state: counters of the loop.
        keep_last: how many checkpoints stay.

    Returns:
        The checkpoint's folder.

    Raises:
        FileError: the disk is full or failed; the older checkpoints stay.
    """
    final = checkpoint_dir(run_dir, step)
    with named_disk_errors(f"{final}: the checkpoint", "goes on from the last one", bound(remove_leftovers, run_dir)):
        remove_leftovers(run_dir)
        partial = final.with_suffix(".partial")
        partial.mkdir(parents=True)
        learner.save(partial)
        tokenizer.save_pretrained(partial / "model")
        (partial / STATE_FILE).write_text(json.dumps({"step": step, **state}))
        share_weights(partial, partial / STATE_FILE)
        write_file_list(partial)
        for path in (partial, *partial.rglob("*")):
            sync(path)
        if final.exists():
            final.rename(_deleted_name(final))
        partial.rename(final)
        sync(final.parent)
        remove_leftovers(run_dir, keep_last)
    return final


@contextlib.contextmanager
def named_disk_errors(what: str, then: str, clean: Callable[[], None]) -> Iterator[None]:
    """Turn the errors that writers raise on a full or broken disk into one that names what could not be written.

    Args:
        what: place and kind of what is written, for the error.
        then: what the same command does once there is room.
        clean: removes what was half written.

    Raises:
        FileError: the disk is full or failed.
    """
    try:
        yield
    # The writer of tokenizers raises none but Exception itself.
    except Exception as error:
        reason = _disk_reason(error)
        if reason is None:
            raise
        with contextlib.suppress(OSError):
            clean()
        raise FileError(f"{what} cannot be written: {reason}; then the same command {then}") from error


def _disk_reason(error: Exception) -> str | None:
    if isinstance(error, OSError):
        return os_reason(error)
    # torch's, safetensors' and tokenizers' writers raise the system's errors without a type of their own, so match
    # their texts.
    first_line = str(error).partition("\n")[0]
    if re.search(r"inline_container|PytorchStreamWriter|os error|I/O error", first_line):
        return f"the disk is full or failed ({first_line}); free some space"
    return None


def leftovers(run_dir: Path, keep_last: int | None = None) -> list[Path]:
    """List what killed saves and deletions left behind.

    Args:
        run_dir: the run's folder.
        keep_last: checkpoints older than this many are listed, too; None: none are.
    """
    folder = run_dir / "checkpoints"
    halves = [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)] if folder.is_dir() else []
    old = saved_steps(run_dir)[:-keep_last] if keep_last else []
    return halves + [checkpoint_dir(run_dir, step) for step in old]


def remove_leftovers(run_dir: Path, keep_last: int | None = None) -> None:
    """Delete what `leftovers` lists.

    Args:
        run_dir: the run's folder, which no other process uses.
        keep_last: as for `leftovers`.
    """
    for path in leftovers(run_dir, keep_last):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)
        else:
            _delete(path)


def read_state(run_dir: Path, step: int) -> dict[str, float]:
    """Return the loop's counters in a checkpoint.

    Args:
        run_dir: the run's folder.
        step: the checkpoint's step.

    Returns:
        `step`, `weight_version`, `elapsed_s`, and `TimeLimit.counters` unless an earlier version wrote it.

    Raises:
        FileError: one of the first three is missing, or one is not a number.
    """
    path = checkpoint_dir(run_dir, step) / STATE_FILE
    state = read_json(path, "a checkpoint's counters")
    wrong = [
        f"{key} is {state.get(key)!r}"
        for key in dict.fromkeys(("step", "weight_version", "elapsed_s", *state))
        if isinstance(state.get(key), bool) or not isinstance(state.get(key), int | float)
    ]
    if wrong:
        raise FileError(f"{path}: expected numbers, but {', '.join(wrong)}")
    return state


def _delete(folder: Path) -> None:
    # Renamed first, so that a kill halfway leaves nothing under a checkpoint's name.
    shutil.rmtree(folder.rename(_deleted_name(folder)))


def _deleted_name(folder: Path) -> Path:
    return folder.with_suffix(".deleted")


def share_weights(folder: Path, like: Path) -> None:
    """Give weight files, which safetensors writes for their owner alone, another file's permissions.

    Args:
        folder: whose `*.safetensors` are meant, those of its folders among them.
        like: a file that was written as others are.
    """
    for path in folder.rglob("*.safetensors"):
        path.chmod(like.stat().st_mode & 0o777)
