"""NeMo-RL's policy, which numbers the responses it trains on."""

from typing import Any

import torch
from nemo_rl.models.policy.lm_policy import Policy

from qarl_nemo.nemo_rl.loss import RESPONSE_KEY


class QarlPolicy(Policy):
    """NeMo-RL's policy. Sharding and packing move rows about; a number in each says which response it is."""

    def train(self, data: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Train as NeMo-RL does.

        Args:
            data: the step's responses.
            arguments: of NeMo-RL's policy.
            named: likewise.

        Returns:
            NeMo-RL's results.
        """
        numbered = data.copy()
        numbered[RESPONSE_KEY] = torch.arange(data.size)
        return super().train(numbered, *arguments, **named)
