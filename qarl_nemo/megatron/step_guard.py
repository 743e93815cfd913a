"""Skips optimizer steps whose gradients are not finite, on all ranks alike, and ends a run that cannot go on."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qarl_nemo.losses.nonfinite import NonFinite, cause_of

# Above this norm Megatron skips a step by itself.
_THRESHOLD = "policy.megatron_cfg.optimizer.grad_norm_skip_threshold"


class StepGuard:
    """Guards the `step` of a Megatron optimizer.

    At the first gradient that is not finite Megatron would end the run or, where it does not check, step with it.

    Args:
        model: the chunks in Megatron's data parallel wrapper; their own check of gradients is switched off.
        optimizer: changed in place.
        limit: number of skipped steps in a row that ends the run.

    Attributes:
        nonfinite: what this rank's loss found since the last step; whoever trains puts the loss's list here.
        num_skipped: number of skipped steps, those that Megatron skips by itself too.
        skipped_in_a_row: number of skipped steps since the last one that was applied.
        seconds: what all steps took together, from the last gradient to the new weights; whoever trains resets it.
    """

    def __init__(self, model: Sequence[nn.Module], optimizer: Any, limit: int) -> None:
        for chunk in model:
            chunk.ddp_config.check_for_nan_in_grad = False
        # Its device is looked up at each step, because between steps parameters may be offloaded.
        self._parameter = next(model[0].parameters())
        self._optimizer, self._step, self._limit = optimizer, optimizer.step, limit
        self.nonfinite: list[NonFinite | None] = []
        self.num_skipped = self.skipped_in_a_row = 0
        self.seconds = 0.0
        optimizer.step = self.step

    def step(self) -> tuple[bool, float | None, int | None]:
        """Step, unless some rank's gradients are not finite.

        Returns:
            As Megatron's: whether it stepped, the gradient norm before clipping, and the number of zeros.

        Raises:
            RuntimeError: too many steps in a row were skipped; raised on all ranks.
        """
        started = self._now()
        outcome = self._step_if_finite()
        self.seconds += self._now() - started
        return outcome

    def _now(self) -> float:
        # A step waits for its gradients' norm anyway, and NeMo-RL for what it returns.
        if self._parameter.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _step_if_finite(self) -> tuple[bool, float | None, int | None]:
        self._optimizer.prepare_grads()
        norm = self._optimizer.get_grad_norm()
        if not self._on_all_ranks(norm is None or math.isfinite(norm)):
            self._skip(self._cause())
            # What NeMo-RL reads after a step.
            self._optimizer.grad_norms_by_group = {}
            return False, math.nan, None
        self.nonfinite.clear()
        with as_prepared(self._optimizer, norm):
            outcome = self._step()
        # A rank without parameters in the optimizer that skips does not.
        if self._on_all_ranks(outcome[0]):
            self.skipped_in_a_row = 0
        else:
            self._skip(f"Megatron did not apply gradients of the norm {norm} ({_THRESHOLD})")
        return outcome

    def _on_all_ranks(self, holds: bool) -> bool:
        everywhere = torch.tensor(float(holds), device=self._parameter.device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        return bool(everywhere)

    def _skip(self, cause: str) -> None:
        self.num_skipped += 1
        self.skipped_in_a_row += 1
        if dist.get_rank() == 0:
            print(f"qarl: optimizer step skipped, {self.skipped_in_a_row} in a row: {cause}", flush=True)
        if self.skipped_in_a_row >= self._limit:
            raise RuntimeError(
                f"{self.skipped_in_a_row} optimizer steps in a row were skipped; in the last one {cause}. The weights "
                "are those of the last step that was applied: go on from a checkpoint with a larger "
                "qarl.max_skipped_steps, or begin anew from its weights (qarl convert --format bf16) with a lower "
                "policy.megatron_cfg.optimizer.lr"
            )

    def _cause(self) -> str:
        """Agree on the first response whose numbers were not finite."""
        found = [one for one in self.nonfinite if one is not None]
        self.nonfinite.clear()
        numbers = min(found, key=lambda one: (one.response, one.token)).numbers() if found else NonFinite.NOTHING
        own = torch.tensor(numbers, dtype=torch.float64, device=self._parameter.device)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        named = [one.tolist() for one in everyone if one[0] >= 0]
        return cause_of(NonFinite.of(min(named, key=lambda one: one[:2])) if named else None)


@contextmanager
def as_prepared(optimizer: Any, norm: float | None) -> Iterator[None]:
    """Let a step take gradients as they are, where Megatron's would prepare them and take their norm once more.

    Args:
        optimizer: a Megatron optimizer whose `prepare_grads` has run.
        norm: what its `get_grad_norm` gave.
    """
    optimizer.prepare_grads, optimizer.get_grad_norm = lambda: False, lambda: norm
    try:
        yield
    finally:
        del optimizer.prepare_grads, optimizer.get_grad_norm
