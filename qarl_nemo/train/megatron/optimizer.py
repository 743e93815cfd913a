"""Megatron's optimizers under the embedded engine's rules for skipped steps, warm-up and checkpoints."""

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from qarl_nemo.megatron.param_groups import factor_overrides, inner_optimizers, require_factors
from qarl_nemo.megatron.stacked_muon import stack_muon
from qarl_nemo.megatron.step_guard import as_prepared
from qarl_nemo.moments import reset_moments
from qarl_nemo.muon import MEGATRON, MEGATRONS_PACKAGE
from qarl_nemo.train.config import AdamWConfig, MuonConfig
from qarl_nemo.train.optimizer import warmed_up
from qarl_nemo.update_aware import lr_factors


def optimizer_settings(config: AdamWConfig | MuonConfig) -> dict[str, Any]:
    """Return what Megatron's `OptimizerConfig` takes of an optimizer block besides learning rate and weight decay.

    Returns:
        Keyword arguments, for `torch.optim.AdamW`'s rule, with weight decay on matrices only, or for the Muon of
        `qarl_nemo.muon`, beside which Adam steps embeddings, head, routers and norms.

    Raises:
        ImportError: this Megatron-core has no such Muon, or the package that provides it is missing.
    """
    if isinstance(config, AdamWConfig):
        return {"optimizer": "adam", "adam_beta1": config.betas[0], "adam_beta2": config.betas[1]}
    if "muon_nesterov" not in OptimizerConfig.__dataclass_fields__ or not _has_muon():
        raise ImportError(
            f"Megatron's Muon needs Megatron-core 0.20, Python 3.12 and {MEGATRONS_PACKAGE}, which pip installs; "
            "or take policy.optimizer.name=adamw"
        )
    return MEGATRON | {"optimizer": "muon", "muon_momentum": config.momentum}


def _has_muon() -> bool:
    # Megatron's own word: a package that is there may be one that it cannot import.
    module = importlib.import_module("megatron.core.optimizer.emerging_optimizers")
    return module.HAVE_EMERGING_OPTIMIZERS


class MegatronStepper:
    """Adds the ranks' gradients, clips, steps FP32 masters and copies them back into the model.

    Args:
        model: the model without wrappers.
        settings: which optimizer.
        max_grad_norm: gradient clipping, global L2 norm.
        targets: what is quantized, for `update_aware_scale`.
        distributed: shard masters and moments over data-parallel ranks; Adam only.

    Attributes:
        model: the model in Megatron's data parallel wrapper, which collects the gradients.
        skipped_in_a_row: number of skipped steps since the last one that was applied.
    """

    def __init__(
        self,
        model: GPTModel,
        settings: AdamWConfig | MuonConfig,
        max_grad_norm: float,
        targets: Sequence[str],
        *,
        distributed: bool,
    ) -> None:
        reduction = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(model.config, reduction, model)
        for layer in model.decoder.layers:
            # Adam steps the routers.
            layer.mlp.router.weight.use_muon = False
        config = OptimizerConfig(
            **optimizer_settings(settings),
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            clip_grad=max_grad_norm,
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=distributed,
        )
        factors = lr_factors(
            (name for name, _ in self.model.named_parameters()), targets, settings.update_aware_scale or 1.0
        )
        overrides = factor_overrides(config, factors, lambda factor: {"lr_mult": factor})
        self._optimizer = get_megatron_optimizer(config, [self.model], **overrides)
        stack_muon(self._optimizer)
        _take_factors(self._optimizer.param_groups, factors)
        self._settings = settings
        self.num_steps = self.skipped_in_a_row = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step: linear warm-up, then constant."""
        return warmed_up(self._settings, self.num_steps)

    def accumulate(self) -> None:
        """Do nothing: Megatron adds gradients to its FP32 buffer during the backward."""

    def step(self, *, finite: bool = True) -> tuple[float, bool]:
        """Clip and apply the accumulated gradients unless they are not finite; clear them either way.

        Args:
            finite: false skips the step whatever the gradients are, for a loss that was not finite.

        Returns:
            The gradient norm before clipping, and whether the step was applied; the same on all ranks.
        """
        finalize_model_grads([self.model])
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        applied = finite and math.isfinite(norm)
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = self.lr * group.get("lr_mult", 1.0)
            with as_prepared(self._optimizer, norm):
                self._optimizer.step()
            self.num_steps += 1
        self.model.zero_grad_buffer()
        self._optimizer.zero_grad()
        return norm, applied

    def reset_moments(self) -> None:
        """Forget the gradients of all steps so far; masters and the warm-up stay."""
        reset_moments(self._inner())

    def state_dict(self) -> dict[str, Any]:
        """Return everything that this rank needs to resume on the same layout, FP32 masters included."""
        return {
            "num_steps": self.num_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "optimizers": [one.state_dict() for one in self._inner()],
            "masters": [[master.detach() for master in _masters(one)] for one in self._inner()],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.num_steps, self.skipped_in_a_row = state["num_steps"], state.get("skipped_in_a_row", 0)
        for one, saved, masters in zip(self._inner(), state["optimizers"], state["masters"], strict=True):
            one.load_state_dict(saved)
            for master, value in zip(_masters(one), masters, strict=True):
                master.copy_(value)

    def _inner(self) -> list[torch.optim.Optimizer]:
        return inner_optimizers(self._optimizer)


def _take_factors(groups: list[dict[str, Any]], factors: dict[str, float]) -> None:
    for group in groups:
        if "weight_decay" in group:
            # The product of both rates, by which weights decay in a step, stays as it is.
            group["weight_decay"] /= group.get("lr_mult", 1.0)
    require_factors(set(factors.values()), {group.get("lr_mult") for group in groups})


def _masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [master for group in optimizer.param_groups for master in group["params"]]
