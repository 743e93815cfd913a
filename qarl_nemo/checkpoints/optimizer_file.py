"""The optimizer's file in a checkpoint: written so that a full disk is reported as such, read without running code."""

import pickle
from pathlib import Path
from typing import Any

import torch

from qarl_nemo.files import FileError, require_file


def save_state(optimizer: Any, path: Path) -> None:
    """Write an optimizer's state."""
    # Written through Python's file, because torch's own writer reports a full disk as an internal failure.
    with path.open("wb") as file:
        try:
            torch.save(optimizer.state_dict(), file)
        except RuntimeError as error:
            # On the way out torch fails to close its archive, which hides the first error: a full disk, or Ctrl-C.
            if isinstance(error.__context__, KeyboardInterrupt | OSError):
                raise error.__context__ from None
            raise


def load_state(optimizer: Any, path: Path, device: torch.device) -> None:
    """Restore an optimizer's state, which may hold only tensors and plain values.

    Args:
        optimizer: has `load_state_dict` and the same parameters as the one that was saved.
        path: the file, whose bytes were checked.
        device: where the tensors go.

    Raises:
        FileError: it is not a saved state, or the state of other parameters.
    """
    require_file(path, "a checkpoint's optimizer state, one file for each rank that wrote it")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise FileError(f"{path}: expected tensors that torch.save wrote, but: {error}") from error
    try:
        optimizer.load_state_dict(state)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FileError(f"{path}: the optimizer state does not fit this run: {type(error).__name__} {error}") from error
