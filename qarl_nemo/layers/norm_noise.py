"""Noise on the norms in front of a layer's projections, as exploration (QeRL's adaptive quantization noise).

y = (w + Z) * x / rms(x) with Z ~ N(0, sigma^2) for each channel: a norm's noise multiplies input channel i of q, k and
v, or of gate, up and a router, by 1 + Z_i / w_i. Norms of queries and keys, and the final norm, take none.

Whoever adds noise calls `draw` and `add_noise` here: the publisher for the rollout engine's norms, and the learner's
forward when it replays what the engine served. So both have the same bits, and the norms themselves stay as they are.

Source: arXiv 2510.11696 section 3.2; NVlabs/QeRL trl_trainer/noise_scheduler.py.
"""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

_TAKES_NOISE = (".input_layernorm.weight", ".post_attention_layernorm.weight")


@dataclass(frozen=True, slots=True)
class NormNoise:
    """The noise of one step's rollouts; its numbers follow from these four.

    Attributes:
        sigma: standard deviation, of w or, if `relative`, in units of |w|.
        relative: multiply each channel's noise by |w|.
        seed: the run's.
        step: the training step.
    """

    sigma: float
    relative: bool
    seed: int
    step: int

    @torch.no_grad()
    def draw(self, name: str, weight: Tensor) -> Tensor:
        """Draw the noise of one norm, always the same numbers for the same record and name.

        Args:
            name: the norm's published name, `model.layers.3.input_layernorm.weight`.
            weight: [H], as it is published.

        Returns:
            [H] FP32 on the weight's device.
        """
        # On the CPU, so that every rank and device draws the same; by name, so that the order of norms does not matter.
        seed = zlib.crc32(f"{self.seed} {self.step} {name}".encode())
        noise = self.sigma * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        noise = noise.to(weight.device)
        return noise * weight.float().abs() if self.relative else noise


def takes_noise(name: str) -> bool:
    """Return whether a published tensor is a norm that takes noise."""
    return name.endswith(_TAKES_NOISE)


def add_noise(weight: Tensor, noise: Tensor | None) -> Tensor:
    """Return w + Z, added in FP32 and rounded once; its gradient is the clean weight's.

    Args:
        weight: [H].
        noise: [H] FP32; None leaves the weight as it is.

    Returns:
        [H] in the weight's dtype.
    """
    return weight if noise is None else (weight.float() + noise).to(weight.dtype)
