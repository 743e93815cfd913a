"""The learner: logprobs through the aligned forward, and one policy update over a rollout batch's minibatches."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch
from torch import Tensor

from qarl_kernels import QuantFormat
from qarl_nemo.layers.norm_noise import NormNoise, add_noise, takes_noise
from qarl_nemo.losses.build import LossFn
from qarl_nemo.losses.nonfinite import cause_of, first_nonfinite
from qarl_nemo.losses.ratios import LossData
from qarl_nemo.refit.publish import Layer, RefitUpdate
from qarl_nemo.train.config import SequencePackingConfig
from qarl_nemo.train.packing import split_by_tokens
from qarl_nemo.train.policy import Policy
from qarl_nemo.train.rollouts import Rollouts


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one pass over a rollout batch did.

    Attributes:
        metrics: objective's metrics, grad_norm and lr averaged over minibatches; counts and skipped steps summed.
        sequences: per-response values of every minibatch, in rollout order.
        curr_logprobs: [B, R] FP32, as each response's own update saw them.
        skipped: why, for each optimizer step that was skipped.
    """

    metrics: dict[str, float]
    sequences: dict[str, Tensor]
    curr_logprobs: Tensor
    skipped: tuple[str, ...] = ()


@dataclass(eq=False)
class Learner:
    """A policy and its objective. If ranks share the policy, each has a learner, and all are called with the same.

    Attributes:
        policy: what is trained.
        loss_fn: the objective.
        temperature: the rollouts' sampling temperature.
        replay_routes: use the experts the rollout engine chose.
        micro_batch_size: responses of one forward and backward.
        logprob_batch_size: responses of one forward without gradient.
        packing: token budgets; if enabled, they take the place of both numbers of responses.
        replay_noise: run each batch through norms with the noise that sampled it; without it they are clean.
    """

    policy: Policy
    loss_fn: LossFn
    _: KW_ONLY
    temperature: float
    replay_routes: bool
    micro_batch_size: int
    logprob_batch_size: int
    packing: SequencePackingConfig
    replay_noise: bool = False

    @property
    def weight_version(self) -> int:
        """The number by which the rollout engine knows the policy's weights: how often they or their noise changed."""
        return self.policy.changes.count

    @property
    def skipped_in_a_row(self) -> int:
        """Number of skipped optimizer steps since the last one that was applied."""
        return self.policy.optimizer.skipped_in_a_row

    def publish(self, fmt: QuantFormat, noise: NormNoise | None = None) -> RefitUpdate:
        """Return the policy's weights as the rollout engine will serve them, under their version.

        Args:
            fmt: the engine's format.
            noise: added to the published norms; the policy's own stay clean.
        """
        return RefitUpdate.of(_with_noise(self.policy.layers(fmt), noise), fmt, version=self.weight_version)

    def change_noise(self) -> None:
        """Count a change of the published noise, which makes another version of the same weights."""
        self.policy.changes.bump()

    @torch.no_grad()
    def noise_rms(self, noise: NormNoise) -> float:
        """Return the root mean square of what a noise adds to the norms: below sigma where their dtype is coarse."""
        weights = {name: norm.weight for name, norm in self.policy.noisy_norms().items()}
        added = [add_noise(one, noise.draw(name, one)).float() - one.float() for name, one in weights.items()]
        return float(torch.cat(added).square().mean().sqrt())

    def enter_stage(self, fmt: QuantFormat, reset_moments: bool) -> None:
        """Execute a format of another grid from now on, under a new version, since the engine will serve it.

        Args:
            fmt: the executed format.
            reset_moments: forget the optimizer's moments.
        """
        self.policy.execute(fmt)
        if reset_moments:
            self.policy.optimizer.reset_moments()
        self.policy.changes.bump()

    def save(self, folder: Path) -> None:
        """Write the policy and its optimizer into a checkpoint's folder."""
        self.policy.save(folder)

    def resume(self, folder: Path, weight_version: int) -> None:
        """Resume from a checkpoint whose model the policy holds already.

        Args:
            folder: the checkpoint's folder.
            weight_version: the version of its weights.
        """
        self.policy.load_optimizer(folder)
        self.policy.changes.count = weight_version

    def token_logprobs(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Return logprobs of the response tokens at the sampling temperature, and the policy's entropy.

        Args:
            rollouts: B responses.

        Returns:
            logprobs [B, R] FP32 with a graph, entropy [B, R] FP32 detached, in nats; both 0 outside the responses.
        """
        logprobs, entropy = self.policy.response_logprobs(
            rollouts, temperature=self.temperature, replay_routes=self.replay_routes
        )
        rows, columns = rollouts.response_mask.nonzero(as_tuple=True)
        empty = torch.zeros_like(rollouts.generation_logprobs)
        return empty.index_put((rows, columns), logprobs), empty.index_put((rows, columns), entropy)

    @torch.no_grad()
    def prev_logprobs(self, rollouts: Rollouts) -> Tensor:
        """Return the old policy's logprobs, before the batch's first update.

        Args:
            rollouts: B responses.

        Returns:
            [B, R] FP32.
        """
        logprobs = torch.zeros_like(rollouts.generation_logprobs)
        rows = torch.arange(len(logprobs), device=logprobs.device)
        with self._replaying(rollouts.noise):
            for part in self._split(rollouts, rows, self.logprob_batch_size, self.packing.logprob_mb_tokens):
                logprobs[part] = self.token_logprobs(rollouts.select(part))[0]
        self.policy.sum_over_ranks([logprobs])
        return logprobs

    def update(
        self, rollouts: Rollouts, prev_logprobs: Tensor, advantages: Tensor, minibatches: list[Tensor]
    ) -> UpdateResult:
        """Take one optimizer step per minibatch; a step whose loss or gradient is not finite is skipped and counted.

        Args:
            rollouts: B responses.
            prev_logprobs: [B, R] FP32.
            advantages: [B] FP32, one for each response.
            minibatches: disjoint row indices [M] that cover the batch.

        Returns:
            Metrics and per-response values.
        """
        totals: dict[str, float] = {}
        curr = torch.zeros_like(prev_logprobs)
        sequences: dict[str, Tensor] = {}
        skipped = []
        with self._replaying(rollouts.noise):
            for rows in minibatches:
                step = self._minibatch(rollouts, prev_logprobs, advantages, rows, curr, sequences)
                for name, value in step.items():
                    totals[name] = totals.get(name, 0.0) + value
                if step["optim/skipped_steps"]:
                    skipped.append(self._cause(rollouts, prev_logprobs, advantages, rows, curr))
        self.policy.sum_over_ranks([curr, *sequences.values()])
        metrics = {name: value if _is_count(name) else value / len(minibatches) for name, value in totals.items()}
        return UpdateResult(metrics, sequences, curr, tuple(skipped))

    def _minibatch(
        self,
        rollouts: Rollouts,
        prev_logprobs: Tensor,
        advantages: Tensor,
        rows: Tensor,
        curr: Tensor,
        sequences: dict[str, Tensor],
    ) -> dict[str, float]:
        mask = rollouts.response_mask[rows]
        valid_seqs, valid_toks = mask.any(-1).sum(), mask.sum()
        sums: dict[str, Tensor] = {}
        for part in self._split(rollouts, rows, self.micro_batch_size, self.packing.train_mb_tokens):
            batch = rollouts.select(part)
            logprobs, entropy = self.token_logprobs(batch)
            out = self.loss_fn(
                logprobs,
                LossData(
                    prev_logprobs=prev_logprobs[part],
                    generation_logprobs=batch.generation_logprobs,
                    advantages=advantages[part, None].expand_as(logprobs),
                    token_mask=batch.response_mask,
                    sample_mask=torch.ones_like(part),
                    global_valid_seqs=valid_seqs,
                    global_valid_toks=valid_toks,
                    entropy=entropy,
                ),
            )
            out.loss.backward()
            self.policy.optimizer.accumulate()
            curr[part] = logprobs.detach()
            for name, value in out.sequences.items():
                sequences.setdefault(name, torch.zeros(len(curr), dtype=value.dtype, device=value.device))[part] = value
            for name, value in {"": out.loss.detach(), **out.metrics}.items():
                sums[name] = sums.get(name, 0.0) + torch.as_tensor(value, dtype=torch.float64, device=part.device)
        loss, metrics = self._totals(sums)
        lr = self.policy.optimizer.lr
        norm, applied = self.policy.optimizer.step(finite=math.isfinite(loss))
        if applied:
            self.policy.changes.bump()
        return metrics | {"optim/grad_norm": norm, "optim/lr": lr, "optim/skipped_steps": float(not applied)}

    @contextmanager
    def _replaying(self, noise: NormNoise | None) -> Iterator[None]:
        # Around the backward, too, which may run a checkpointed layer's forward again.
        norms = self.policy.noisy_norms() if self.replay_noise else {}
        for name, norm in norms.items():
            norm.noise = noise.draw(name, norm.weight) if noise else None
        try:
            yield
        finally:
            for norm in norms.values():
                norm.noise = None

    def _split(self, rollouts: Rollouts, rows: Tensor, num_responses: int, num_tokens: int) -> list[Tensor]:
        own = self.policy.own_rows(rows)
        if self.packing.enabled:
            return split_by_tokens(own, rollouts.attention_mask[own].sum(-1), num_tokens)
        return list(own.split(num_responses))

    def _cause(self, rollouts: Rollouts, prev_logprobs: Tensor, advantages: Tensor, rows: Tensor, curr: Tensor) -> str:
        own = curr[rows]
        self.policy.sum_over_ranks([own])
        values = {
            "curr_logprobs": own,
            "prev_logprobs": prev_logprobs[rows],
            "generation_logprobs": rollouts.generation_logprobs[rows],
            "advantages": advantages[rows, None].expand_as(own),
        }
        return cause_of(first_nonfinite(values, rollouts.response_mask[rows], rows))

    def _totals(self, sums: dict[str, Tensor]) -> tuple[float, dict[str, float]]:
        totals = torch.stack(list(sums.values()))
        self.policy.sum_over_ranks([totals])
        loss, *values = totals.tolist()
        names = [f"loss/{name}" for name in sums if name]
        return loss, dict(zip(names, values, strict=True))


def _with_noise(layers: Iterable[Layer], noise: NormNoise | None) -> Iterator[Layer]:
    if noise is None:
        yield from layers
        return
    for layer in layers:
        yield layer | {name: add_noise(one, noise.draw(name, one)) for name, one in layer.items() if takes_noise(name)}


def _is_count(metric: str) -> bool:
    return metric == "optim/skipped_steps" or metric.startswith("loss/num_")
