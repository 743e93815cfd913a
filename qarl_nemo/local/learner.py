"""The learner: logprobs through the aligned forward, and one policy update over a rollout batch's minibatches."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qarl_nemo.layers.install import InstallReport
from qarl_nemo.local.optimizer import MasterOptimizer
from qarl_nemo.local.rollouts import Rollouts, columns_from_first_token
from qarl_nemo.losses.build import LossFn
from qarl_nemo.losses.ratios import LossData


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one pass over a rollout batch did.

    Attributes:
        metrics: objective's metrics, grad_norm and lr averaged over minibatches; counts and skipped steps summed.
        sequences: per-response values of every minibatch, in rollout order.
        curr_logprobs: [B, R] FP32, as each response's own update saw them.
    """

    metrics: dict[str, float]
    sequences: dict[str, Tensor]
    curr_logprobs: Tensor


class Learner:
    """A model with aligned layers, its optimizer and its objective.

    Args:
        model: the installed model.
        report: what `install` returned.
        optimizer: over the model's parameters.
        loss_fn: the objective.
        temperature: the rollouts' sampling temperature.
        replay_routes: use the experts the rollout engine chose.
        micro_batch_size: responses of one forward and backward.
        logprob_batch_size: responses of one forward without gradient.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        report: InstallReport,
        optimizer: MasterOptimizer,
        loss_fn: LossFn,
        *,
        temperature: float,
        replay_routes: bool,
        micro_batch_size: int,
        logprob_batch_size: int,
    ) -> None:
        self.model = model
        self.report = report
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.temperature = temperature
        self.replay_routes = replay_routes
        self.micro_batch_size = micro_batch_size
        self.logprob_batch_size = logprob_batch_size

    def token_logprobs(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Return logprobs of the response tokens at the sampling temperature, and the policy's entropy.

        Args:
            rollouts: B responses.

        Returns:
            logprobs [B, R] FP32 with a graph, entropy [B, R] FP32 detached, in nats.
        """
        # With all filler on the right, where no token looks, attention needs no mask and runs its causal kernel.
        columns, first = columns_from_first_token(rollouts.attention_mask), rollouts.num_prompt_columns
        routes = rollouts.routes if self.replay_routes else None
        if routes is not None:
            routes = torch.take_along_dim(routes, columns[..., None, None], dim=1).flatten(0, 1)
        with self.report.routes.replay(routes):
            hidden = self.model.model(
                input_ids=rollouts.input_ids.gather(1, columns), use_cache=False
            ).last_hidden_state
        places = torch.argsort(columns, dim=-1)[:, first - 1 : -1]
        hidden = torch.take_along_dim(hidden, places[..., None], dim=1)
        logits = self.model.lm_head(hidden).float() / self.temperature
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
        return logprobs.gather(-1, rollouts.input_ids[:, first:, None]).squeeze(-1), entropy

    @torch.no_grad()
    def prev_logprobs(self, rollouts: Rollouts) -> Tensor:
        """Return the old policy's logprobs, before the batch's first update.

        Args:
            rollouts: B responses.

        Returns:
            [B, R] FP32.
        """
        size = self.logprob_batch_size
        starts = range(0, len(rollouts.input_ids), size)
        return torch.cat([self.token_logprobs(rollouts.select(slice(s, s + size)))[0] for s in starts])

    def update(
        self, rollouts: Rollouts, prev_logprobs: Tensor, advantages: Tensor, minibatches: list[Tensor]
    ) -> UpdateResult:
        """Take one optimizer step for each minibatch; one whose loss or gradient is not finite is skipped and counted.

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
        for rows in minibatches:
            step = self._minibatch(rollouts, prev_logprobs, advantages, rows, curr, sequences)
            for name, value in step.items():
                totals[name] = totals.get(name, 0.0) + value
        metrics = {name: value if _is_count(name) else value / len(minibatches) for name, value in totals.items()}
        return UpdateResult(metrics, sequences, curr)

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
        loss, metrics = 0.0, dict[str, float]()
        for part in rows.split(self.micro_batch_size):
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
            loss += float(out.loss.detach())
            curr[part] = logprobs.detach()
            for name, value in out.sequences.items():
                sequences.setdefault(name, torch.zeros(len(curr), dtype=value.dtype, device=value.device))[part] = value
            for name, value in out.metrics.items():
                metrics[f"loss/{name}"] = metrics.get(f"loss/{name}", 0.0) + float(value)
        lr = self.optimizer.lr
        norm, applied = self.optimizer.step(finite=math.isfinite(loss))
        if applied:
            self.report.version.bump()
        return metrics | {"optim/grad_norm": norm, "optim/lr": lr, "optim/skipped_steps": float(not applied)}


def _is_count(metric: str) -> bool:
    return metric == "optim/skipped_steps" or metric.startswith("loss/num_")
