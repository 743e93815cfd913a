"""A copy of a checkpoint in which some tensors have other values, for engines that read nothing but folders."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from qarl_nemo.checkpoints.content import EMBEDDING, LM_HEAD
from qarl_nemo.checkpoints.hf_config import copied_name, own_names, tokenizer_files
from qarl_nemo.checkpoints.reader import Checkpoint, open_checkpoint
from qarl_nemo.checkpoints.shard import save_shard
from qarl_nemo.files import FileError, require_space
from qarl_nemo.names import summarize_names

_SHOWN = 8


def write_overlay(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], folder: Path, *, link: bool = True
) -> Checkpoint:
    """Copy the files that hold these tensors, one at a time, and link all others.

    Args:
        checkpoint: quantized or not.
        tensors: values by name, of the stored shapes; they take the stored dtypes, and BF16 in the place of FP16, which
            holds neither the largest nor the smallest of what is trained and served in BF16.
        folder: made anew.
        link: copies the others, too, if false, and of other files than a checkpoint's none.

    Returns:
        The copy's table of contents.

    Raises:
        FileError: the checkpoint holds no such tensor, or in another shape; or the disk has too little room.
    """
    infos = {info.name: info for info in checkpoint.tensors}
    if checkpoint.config.get("tie_word_embeddings") and EMBEDDING in tensors and LM_HEAD in infos:
        # Some tools store the tied copy, which has to stay one.
        tensors = {**tensors, LM_HEAD: tensors[EMBEDDING]}
    wrong = [name for name, one in tensors.items() if name not in infos or infos[name].shape != tuple(one.shape)]
    if wrong:
        raise FileError(
            f"{checkpoint.folder} holds no such tensors, or in another shape: {summarize_names(wrong, _SHOWN)}"
        )
    changed = {file for name in tensors for file in infos[name].files}
    files = {path.name for path in checkpoint.folder.iterdir() if path.is_file()}
    copied = changed if link else files & own_names(checkpoint.folder, checkpoint.files)
    needed = sum((checkpoint.folder / file).stat().st_size for file in copied)
    require_space(folder, needed, f"a copy of {checkpoint.folder} with what was trained beside adapters")
    folder.mkdir(parents=True)
    for path in checkpoint.folder.iterdir():
        if path.name in changed:
            held = load_file(path)
            held |= {name: one.to(_wide(held[name])).contiguous() for name, one in tensors.items() if name in held}
            with safe_open(path, framework="pt") as file:
                save_shard(held, folder / path.name, file.metadata() or {"format": "pt"})
        elif path.name in copied:
            shutil.copyfile(path, folder / path.name)
        elif path.is_file() and link:
            (folder / path.name).symlink_to(path.resolve())
    copy_tokenizer(checkpoint.folder, folder)
    return open_checkpoint(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy what a checkpoint has of a tokenizer and another folder has not yet."""
    for path in tokenizer_files(source):
        place = folder / copied_name(path)
        place.parent.mkdir(exist_ok=True)
        if not place.exists():
            shutil.copyfile(path, place)


def _wide(stored: Tensor) -> torch.dtype:
    return torch.bfloat16 if stored.dtype == torch.float16 else stored.dtype
