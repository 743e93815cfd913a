"""What an optimizer remembers of the gradients of earlier steps."""

from collections.abc import Iterable

import torch
from torch import Tensor

# SOAP's eigenvectors. They begin as identities, and its first step, which alone solves for them, projects onto these.
_BASES = ("Q_L", "Q_R")


def reset_moments(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Set moments and their counts of steps to zero, and bases to identities, in place."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if name in _BASES:
                    value.copy_(torch.eye(len(value)))
                # Transformer-Engine may keep the master itself here.
                elif isinstance(value, Tensor) and name != "master_param":
                    value.zero_()
                elif name == "step":
                    state[name] = 0
        for group in optimizer.param_groups:
            if "step" in group:
                group["step"] *= 0
