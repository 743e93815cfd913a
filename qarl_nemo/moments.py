"""What an optimizer remembers of the gradients of earlier steps."""

from collections.abc import Iterable

import torch
from torch import Tensor


def reset_moments(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Set moments and their counts of steps to zero, in place."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                # Transformer-Engine may keep the master itself here.
                if isinstance(value, Tensor) and name != "master_param":
                    value.zero_()
        for group in optimizer.param_groups:
            if "step" in group:
                group["step"] *= 0
