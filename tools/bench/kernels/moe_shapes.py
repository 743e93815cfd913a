"""The shapes that kernels are measured on: the experts of Qwen3-30B-A3B and how many rows each gets."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

HIDDEN, INTERMEDIATE, TOP_K = 2048, 768, 8
Skew = Literal["balanced", "zipf"]


@dataclass(frozen=True, slots=True)
class MoeCase:
    """One measured shape.

    Attributes:
        num_rows: M, routed rows.
        num_experts: E, local experts.
        skew: rows per expert equal, or falling as 1 / rank.
    """

    num_rows: int
    num_experts: int
    skew: Skew

    @property
    def name(self) -> str:
        """Suffix of the case's figures: e<experts>, and what differs from 180224 balanced rows."""
        rows = "" if self.num_rows == 180224 else f"_m{self.num_rows}"
        return f"e{self.num_experts}{rows}{'' if self.skew == 'balanced' else '_zipf'}"

    def offsets(self) -> Tensor:
        """Return the row offsets [E + 1] int32; experts are shuffled, so that a large one can be anywhere."""
        share = torch.ones(self.num_experts, dtype=torch.float64)
        if self.skew == "zipf":
            share /= torch.arange(1, self.num_experts + 1)
            share = share[torch.randperm(self.num_experts, generator=torch.Generator().manual_seed(0))]
        ends = (share.cumsum(0) / share.sum() * self.num_rows).round().to(torch.int32)
        return torch.cat([torch.zeros(1, dtype=torch.int32), ends]).to("cuda")

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward's two GEMMs."""
        return 2 * self.num_rows * HIDDEN * 3 * INTERMEDIATE


def expert_weights(num_experts: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Return BF16 weights of the size a trained model has: gate_up [E, 2 I, H] and down [E, H, I]."""
    gate_up = torch.randn(num_experts, 2 * INTERMEDIATE, HIDDEN, device=device, dtype=torch.bfloat16) * HIDDEN**-0.5
    down = torch.randn(num_experts, HIDDEN, INTERMEDIATE, device=device, dtype=torch.bfloat16) * INTERMEDIATE**-0.5
    return gate_up, down
