"""Hints: what a folder or file that is not a checkpoint may be instead, and what to do about it."""

import shlex
from pathlib import Path

from qarl_nemo.architecture import hub_hint
from qarl_nemo.checkpoints.iterations import find_iterations

_ADAPTER = "adapter_config.json"
# What a run on a frozen base trained, beside adapters or without any.
_TRAINED = "trained.safetensors"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def lfs_hint(path: Path) -> str:
    """Say that a file is a Git LFS pointer in place of a large file, and what to do; empty if it is none."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return ""
    return "is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository" if pointer else ""


def no_folder(path: Path) -> str:
    """Say that what should be a folder does not exist or is a file, and what to name; empty if it is a folder."""
    if path.is_dir():
        return ""
    if not path.exists():
        return f"{path} does not exist{hub_hint(path)}"
    return f"{path} is a file, not a folder; name the folder that it is in: {path.parent}"


def folder_hint(folder: Path) -> str:
    """Say, after a semicolon, what a folder that is not the expected checkpoint may be; empty if nobody can tell."""
    if not folder.exists():
        return hub_hint(folder)
    models = sorted(folder.glob("checkpoints/step_*/model"))
    if any((place / _ADAPTER).is_file() for place in (folder, folder / "model", *models)):
        run = next((place for place in (folder, *folder.parents) if (place / "checkpoints").is_dir()), None)
        if run is not None:
            newest = max(run.glob("checkpoints/step_*/model"), default=folder)
            return f"; the adapters of {run} are in {newest}: qarl eval takes the run, qarl export merges them"
        return "; it holds a LoRA adapter: merge it into its model first (peft's merge_and_unload)"
    frozen = next((place for place in (folder, folder / "model", *models) if (place / _TRAINED).is_file()), None)
    if frozen is not None:
        return f"; it holds what a run trained on a frozen base, without the base: {_frozen_run(frozen)}"
    if (folder / "model" / "config.json").is_file():
        return f"; the weights of a training checkpoint are in {folder / 'model'}: name that"
    if models:
        return f"; it is a run and holds {len(models)} models: name one of {', '.join(map(str, models))}"
    if iterations := find_iterations(folder):
        newest = shlex.quote(str(iterations[-1]))
        held = "is a torch_dist checkpoint" if iterations == [folder] else "holds torch_dist checkpoints"
        return f"; it {held} of Megatron: qarl convert {newest} DESTINATION --hf-model MODEL"
    runs = sorted(path.parent for path in folder.glob("*/checkpoints"))
    if runs:
        return f"; it holds {len(runs)} runs: name one of {', '.join(map(str, runs))}"
    return ""


def _frozen_run(model: Path) -> str:
    run = next((place for place in model.parents if (place / "checkpoints").is_dir()), None)
    whole = "qarl eval takes the run's folder, and qarl export makes a whole model of it"
    return whole if run is None else f"{whole} (qarl export {run} ...)"
