"""`qarl.schedule` in a policy worker: its model's grid, step by step."""

from collections.abc import Sequence

from torch import nn

from qarl_kernels import QuantFormat
from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.nemo_rl.aligned_model import execute
from qarl_nemo.nemo_rl.block import NemoQarlConfig


class Stages:
    """The stage that a model is in. A stage begins with the refit before its first step.

    Args:
        qarl: the checked block.
        alignment: the model's.

    Attributes:
        served: what the engines are sent.
        reset_is_due: whether the optimizer's moments have to be forgotten before it steps again.
        step: the step that samples with what is published now; None before the first refit.
    """

    def __init__(self, qarl: NemoQarlConfig, alignment: Alignment) -> None:
        self.served: QuantFormat = qarl.served_format
        self.reset_is_due = False
        self._qarl, self._alignment = qarl, alignment
        self._stage = qarl.stage(0)
        self.step: int | None = None

    def enter(self, model: Sequence[nn.Module], step: int) -> str | None:
        """Enter the stage of a step, if the model is in another one.

        Args:
            model: this rank's chunks.
            step: the step that samples with the weights about to be published.

        Returns:
            What has changed, for the log; None: nothing.
        """
        stage = self._qarl.stage(step)
        # A run that goes on in the middle of a stage has left its first step behind.
        begins = stage != self._qarl.stage(step - 1 if self.step is None else self.step)
        self.step = step
        if stage is None or stage == self._stage:
            return None
        self._stage, self.served = stage, self._qarl.served_at(step)
        execute(model, self._qarl.executed_at(step))
        self._alignment.changes.bump()
        self.reset_is_due = begins and stage.reset_moments
        moments = "; the optimizer's moments begin anew" if self.reset_is_due else ""
        return f"step {step}: codes of {stage.bits} bits from here on{moments}"
