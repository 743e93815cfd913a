"""NeMo-RL's policy, which numbers the responses it trains on."""

from typing import Any

import torch
from nemo_rl.models.policy.lm_policy import Policy

from qarl_nemo.nemo_rl.loss import RESPONSE_KEY


class QarlPolicy(Policy):
    """NeMo-RL's policy. Sharding and packing move rows around, so each row carries the number of its response."""

    def train(self, data: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Train as NeMo-RL does.

        Args:
            data: the step's responses.
            arguments: passed to NeMo-RL's policy.
            named: passed likewise.

        Returns:
            NeMo-RL's results.
        """
        numbered = data.copy()
        numbered[RESPONSE_KEY] = torch.arange(data.size)
        return super().train(numbered, *arguments, **named)
