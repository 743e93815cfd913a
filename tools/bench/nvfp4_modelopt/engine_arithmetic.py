"""The rollout engine's arithmetic as a linear layer, with an order of summation that no learner has."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class Served(NamedTuple):
    """What an engine multiplies by.

    Attributes:
        values: [N, K]: code * s, or a weight; BF16, or FP32 for one that no engine has.
        factor: FP32 scalar, 1 / G, which the sum is multiplied by.
    """

    values: Tensor
    factor: Tensor = torch.ones(())


class EngineLinear(nn.Module):
    """y = rn(factor * sum_k x * values) + b: exact products, FP32 sums over parts of K, one rounding.

    Args:
        served: the weight.
        bias: [N], or None.
        num_parts: how many sums are added, which is all that tells an engine's order of summation from a learner's.
    """

    def __init__(self, served: Served, bias: Tensor | None, num_parts: int) -> None:
        super().__init__()
        # BF16 products are the same in FP32, which CPUs multiply faster.
        self.parts = [part.contiguous() for part in served.values.float().chunk(num_parts, -1)]
        self.factor, self.bias = served.factor, bias

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x: [..., K].

        Returns:
            [..., N] in x's dtype.
        """
        slices = x.float().split([part.shape[-1] for part in self.parts], -1)
        sums = torch.stack([one @ part.mT for one, part in zip(slices, self.parts, strict=True)]).sum(0)
        out = (sums * self.factor).to(x.dtype)
        return out if self.bias is None else out + self.bias


def serve(model: PreTrainedModel, weights: Mapping[str, Served], *, num_parts: int = 2) -> PreTrainedModel:
    """Replace linears by the engine's.

    Args:
        model: changed in place.
        weights: what to multiply by, by the linear's name.
        num_parts: see `EngineLinear`; 1 for a learner.
    """
    parameters = dict(model.named_parameters())
    for name, served in weights.items():
        parent, _, child = name.rpartition(".")
        linear = EngineLinear(served, parameters.get(f"{name}.bias"), num_parts)
        setattr(model.get_submodule(parent), child, linear)
    return model.eval().requires_grad_(False)
