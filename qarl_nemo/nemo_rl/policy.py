"""NeMo-RL's policy, which numbers the responses it trains on and has some steps recorded."""

from typing import Any

import torch
from nemo_rl.models.policy.lm_policy import Policy

from qarl_nemo.nemo_rl.loss import RESPONSE_KEY, QarlLossFn
from qarl_nemo.nemo_rl.recording import Recorder


class QarlPolicy(Policy):
    """NeMo-RL's policy. Sharding and packing move rows around, so each row carries the number of its response.

    Attributes:
        recorder: counts steps and says which leave diagnostics behind; None: no step.
    """

    recorder: Recorder | None = None

    @property
    def next_step(self) -> int:
        """The step that samples with the weights of the next refit."""
        return 1 if self.recorder is None else self.recorder.step + 1

    def train(self, data: Any, loss_fn: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Train as NeMo-RL does.

        Args:
            data: the step's responses.
            loss_fn: the loss, which every worker gets a copy of.
            arguments: passed to NeMo-RL's policy.
            named: passed likewise.

        Returns:
            NeMo-RL's results.
        """
        numbered = data.copy()
        numbered[RESPONSE_KEY] = torch.arange(data.size)
        if self.recorder is not None and isinstance(loss_fn, QarlLossFn):
            loss_fn.recording = self.recorder.begin_step()
        return super().train(numbered, loss_fn, *arguments, **named)
