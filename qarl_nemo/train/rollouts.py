"""The record of a rollout batch, and left-padded tokens.

Layout: columns 0 to P-1 hold the prompts, left-padded; columns P to P+R-1 the responses. Position j of a [B, R]
tensor is about response token j, predicted by column P-1+j. Shape letters: B responses, P prompt columns, R response
columns, S = P + R, L routers, k experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from qarl_nemo.layers.norm_noise import NormNoise
from qarl_nemo.layers.router import NO_ROUTE


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Sampled responses and what the rollout engine says about them.

    Attributes:
        input_ids: [B, S] int64.
        attention_mask: [B, S] bool, true on prompt and response tokens.
        response_mask: [B, R] bool, true on response tokens, the stop token included.
        generation_logprobs: [B, R] FP32, from the engine that sampled; 0 outside the response.
        routes: [B, S, L, k] int16 chosen experts, -1 where the engine computed none; None without routers.
        truncated: [B] bool, whether there was no stop token within the budget.
        weight_version: the version that sampled every response of the batch.
        noise: what was added to that version's norms; None if nothing was.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    generation_logprobs: Tensor
    routes: Tensor | None
    truncated: Tensor
    weight_version: int
    noise: NormNoise | None = None

    @property
    def num_prompt_columns(self) -> int:
        """P."""
        return self.input_ids.shape[1] - self.response_mask.shape[1]

    def select(self, rows: Tensor | slice) -> "Rollouts":
        """Return some of the responses."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: v[rows] for name, v in values.items() if isinstance(v, Tensor)})

    def widen(self, num_response_columns: int, pad_id: int) -> "Rollouts":
        """Append empty response columns until there are `num_response_columns`."""
        extra = num_response_columns - self.response_mask.shape[1]
        fill = {"input_ids": pad_id, "attention_mask": 0, "response_mask": 0, "generation_logprobs": 0.0}
        wide = {name: nn.functional.pad(getattr(self, name), (0, extra), value=value) for name, value in fill.items()}
        routes = self.routes
        if routes is not None:
            routes = nn.functional.pad(routes, (0, 0, 0, 0, 0, extra), value=NO_ROUTE)
        return replace(self, routes=routes, **wide)

    @staticmethod
    def concatenate(parts: Sequence["Rollouts"], pad_id: int) -> "Rollouts":
        """Join batches with equal prompt columns and version; shorter ones are widened."""
        assert len({(part.weight_version, part.num_prompt_columns) for part in parts}) == 1
        width = max(part.response_mask.shape[1] for part in parts)
        wide = [part.widen(width, pad_id) for part in parts]
        joined: dict[str, Any] = {}
        for f in fields(Rollouts):
            values = [getattr(part, f.name) for part in wide]
            joined[f.name] = torch.cat(values) if isinstance(values[0], Tensor) else values[0]
        return Rollouts(**joined)


def require_finite(values: Tensor, what: str, weight_version: int) -> None:
    """Refuse what an engine computed from weights that have diverged.

    Args:
        values: [prompts, ...].
        what: their name, for the error.
        weight_version: the version that the engine serves.

    Raises:
        RuntimeError: some are NaN or infinite.
    """
    broken = int((~values.isfinite()).any(-1).sum())
    if broken:
        raise RuntimeError(
            f"weight version {weight_version} gives NaN or infinite {what} for {broken} of {len(values)} prompts: "
            "the policy has diverged. Start a new run with a lower policy.optimizer.lr"
        )


def pad_left(
    sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device, *, width: int = 0
) -> tuple[Tensor, Tensor]:
    """Stack token lists, padded on the left.

    Args:
        sequences: token lists.
        pad_id: filler.
        device: where the result goes.
        width: least number of columns.

    Returns:
        input_ids [B, P] int64 and attention_mask [B, P] bool.
    """
    width = max(width, *map(len, sequences))
    ids = torch.tensor([[pad_id] * (width - len(s)) + list(s) for s in sequences], dtype=torch.int64)
    mask = torch.tensor([[False] * (width - len(s)) + [True] * len(s) for s in sequences])
    return ids.to(device), mask.to(device)


def positions(attention_mask: Tensor) -> Tensor:
    """Return each token's position [B, S] from its sequence's first real token, of a mask [B, S] bool."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def columns_from_first_token(attention_mask: Tensor) -> Tensor:
    """Return the columns of each sequence in an order that starts at its first real token.

    Args:
        attention_mask: [B, S] bool.

    Returns:
        [B, S] int64; the columns before the first token come last.
    """
    num_columns = attention_mask.shape[1]
    first = attention_mask.int().argmax(-1, keepdim=True)
    return (first + torch.arange(num_columns, device=attention_mask.device)) % num_columns
