"""Atomic checkpoints of a run: `checkpoints/step_000100/` with a Hugging Face model directory and the optimizer."""

import json
import os
import re
import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qarl_nemo.local.learner import Learner

_NAME = re.compile(r"step_(\d{6,})")


def checkpoint_steps(run_dir: Path) -> list[int]:
    """List the steps that have a whole checkpoint, ascending.

    Args:
        run_dir: the run's folder.

    Returns:
        The steps.
    """
    folder = run_dir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Return where the checkpoint of `step` lies."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


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
    """
    final = checkpoint_dir(run_dir, step)
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    learner.save(partial)
    tokenizer.save_pretrained(partial / "model")
    (partial / "state.json").write_text(json.dumps({"step": step, **state}))
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for old in checkpoint_steps(run_dir)[:-keep_last]:
        shutil.rmtree(checkpoint_dir(run_dir, old))
    return final


def read_state(run_dir: Path, step: int) -> dict[str, float]:
    """Return the loop's counters in a checkpoint."""
    return json.loads((checkpoint_dir(run_dir, step) / "state.json").read_text())
