"""What a folder or file that is no checkpoint may be instead, and what helps then."""

import re
from pathlib import Path

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def lfs_hint(path: Path) -> str:
    """Say whether a file is what Git LFS puts in the place of a large one.

    Args:
        path: the file.

    Returns:
        What to do, empty if it is no such file.
    """
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return ""
    return f"is a pointer of Git LFS, not the file itself; run `git lfs pull` in {path.parent}" if pointer else ""


def folder_hint(folder: Path) -> str:
    """Say what a folder that is no Hugging Face model is.

    Args:
        folder: what was named; it need not exist.

    Returns:
        What it is and what to do, empty if that cannot be told.
    """
    if not folder.exists():
        if _HUB_ID.fullmatch(str(folder)):
            return f"if it is a model on the Hugging Face hub: hf download {folder} --local-dir {folder.name}"
        return ""
    if (folder / "adapter_config.json").exists():
        return "it is a LoRA adapter; merge it into its base model first (peft's merge_and_unload, save_pretrained)"
    if (folder / "model" / "config.json").exists():
        return f"it is a checkpoint of a run; its model is {folder / 'model'}"
    steps = sorted(path.parent for path in folder.glob("checkpoints/step_*/model"))
    if steps:
        return f"it is a run; name one of the models in it: {', '.join(str(step / 'model') for step in steps)}"
    if any(folder.rglob(".metadata")):
        return "it holds a Megatron checkpoint; `qarl convert` reads those"
    return ""
