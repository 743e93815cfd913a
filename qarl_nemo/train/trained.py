"""What is trained on a frozen base, as files of a checkpoint: the base itself stays where the run found it."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from qarl_nemo.files import FileError, require_file
from qarl_nemo.names import published_name, summarize_names

TRAINED_FILE = "trained.safetensors"
_SHOWN = 8


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the name and the parameter of all that an optimizer steps."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def save_trained(model: nn.Module, folder: Path) -> None:
    """Write every trained parameter, under the name by which refits publish it.

    Args:
        model: any.
        folder: made if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {published_name(name): parameter.detach().contiguous() for name, parameter in trained_parameters(model)}
    save_file(tensors, folder / TRAINED_FILE)


@torch.no_grad()
def load_trained(model: nn.Module, folder: Path) -> None:
    """Restore what `save_trained` wrote.

    Args:
        model: the same model.
        folder: the checkpoint's model folder.

    Raises:
        FileError: there is no such file, or it holds other parameters.
    """
    path = folder / TRAINED_FILE
    require_file(path, "the trained parameters of a run with a frozen base")
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path} is not a readable safetensors file: {error}") from error
    wanted = {published_name(name): parameter for name, parameter in trained_parameters(model)}
    wrong = set(found) ^ set(wanted) | {
        name for name in set(found) & set(wanted) if found[name].shape != wanted[name].shape
    }
    if wrong:
        raise FileError(f"{path}: not what this run trains: {summarize_names(wrong, _SHOWN)}")
    for name, parameter in wanted.items():
        parameter.copy_(found[name])
