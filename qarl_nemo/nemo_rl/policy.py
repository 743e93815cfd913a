"""NeMo-RL's policy, which numbers the responses it trains on and has some steps recorded."""

from typing import Any

import torch
from nemo_rl.models.policy.lm_policy import Policy

from qarl_nemo.nemo_rl.loss import RESPONSE_KEY, QarlLossFn
from qarl_nemo.nemo_rl.recording import Recorder


class QarlPolicy(Policy):
    """NeMo-RL's policy. Sharding and packing move rows around, so each row carries the number of its response.

    Attributes:
        recorder: counts steps and says which leave diagnostics behind; `plugin.install_loss` makes it.
    """

    recorder: Recorder | None = None

    @property
    def next_step(self) -> int:
        """The step that samples with the weights of the next refit.

        Raises:
            RuntimeError: nothing counts steps.
        """
        if self.recorder is None:
            raise RuntimeError("nothing counts this policy's steps: call plugin.install_loss before the first refit")
        return self.recorder.step + 1

    def train(self, data: Any, loss_fn: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Train as NeMo-RL does.

        Args:
            data: the step's responses.
            loss_fn: the loss, which every worker gets a copy of.
            arguments: passed to NeMo-RL's policy.
            named: passed likewise.

        Returns:
            NeMo-RL's results.

        Raises:
            TypeError: the loss is not the one that `plugin.install_loss` returned.
        """
        numbered = data.copy()
        numbered[RESPONSE_KEY] = torch.arange(data.size)
        if self.recorder is not None:
            if not isinstance(loss_fn, QarlLossFn):
                raise TypeError(
                    f"trained with {type(loss_fn).__name__}, which knows no qarl.objective: put what "
                    "plugin.install_loss returned in the place of NeMo-RL's loss"
                )
            loss_fn.recording = self.recorder.begin_step()
        return super().train(numbered, loss_fn, *arguments, **named)
