"""FP32 master weights over the model's parameters, stepped by torch's AdamW or Muon.

Muon orthogonalizes matrices, so a stacked expert parameter [E, N, K] is stepped as E matrices that share its storage;
embeddings, lm_head, routers, norms and biases go to AdamW.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qarl_nemo import muon
from qarl_nemo.moments import reset_moments
from qarl_nemo.names import TARGETS, tensor_kind
from qarl_nemo.train.config import AdamWConfig, MuonConfig
from qarl_nemo.update_aware import lr_factors


def warmed_up(config: AdamWConfig | MuonConfig, num_steps: int) -> float:
    """Return the learning rate of the step after so many: linear warm-up, then constant."""
    return config.lr * (min(1.0, (num_steps + 1) / config.warmup_steps) if config.warmup_steps else 1.0)


class MasterOptimizer:
    """Clips, steps FP32 masters, and copies them back into the model.

    Args:
        parameters: the model's named parameters; FP32 ones are their own masters, frozen ones are left alone.
        config: which optimizer.
        max_grad_norm: gradient clipping, global L2 norm.
        targets: what is quantized, for `update_aware_scale`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: AdamWConfig | MuonConfig,
        max_grad_norm: float,
        targets: Sequence[str] = (),
    ) -> None:
        self.parameters = {name: one for name, one in parameters if one.requires_grad}
        self.config = config
        self.max_grad_norm = max_grad_norm
        self.num_steps = 0
        self.skipped_in_a_row = 0
        self.masters = {
            name: parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.detach().float())
            for name, parameter in self.parameters.items()
        }
        self._matrices: dict[str, list[nn.Parameter]] = {}
        if isinstance(config, MuonConfig):
            self._matrices = {
                name: _matrices(master)
                for name, master in self.masters.items()
                if master.ndim >= 2 and tensor_kind(name) in TARGETS
            }
        self._factors = lr_factors(self.parameters, targets, config.update_aware_scale or 1.0)
        # Of each group of each optimizer; a checkpoint's groups do not have them.
        self._group_factors: list[list[float]] = []
        self.optimizers = list(self._build())

    def _build(self) -> Iterable[torch.optim.Optimizer]:
        config = self.config
        plain = {name: [master] for name, master in self.masters.items() if name not in self._matrices}
        # One kernel in place of a dozen passes over masters and moments; None is torch's choice.
        fused = True if any(master.is_cuda for master in self.masters.values()) else None
        if isinstance(config, MuonConfig):
            groups = self._groups(self._matrices)
            yield torch.optim.Muon(groups, lr=config.lr, momentum=config.momentum, **muon.TORCH)
            betas = muon.ADAM_BETAS
        else:
            betas = config.betas
        yield torch.optim.AdamW(self._groups(plain), lr=config.lr, betas=betas, fused=fused)

    def _groups(self, masters: Mapping[str, list[nn.Parameter]]) -> list[dict[str, Any]]:
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parts in masters.items():
            groups.setdefault(self._factors.get(name, 1.0), []).extend(parts)
        self._group_factors.append(list(groups))
        decay = self.config.weight_decay
        return [{"params": params, "weight_decay": decay / factor} for factor, params in groups.items()]

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients of one backward to the masters', in FP32: BF16 loses what many micro-batches add."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
                parameter.grad = None

    @torch.no_grad()
    def step(self, *, finite: bool = True) -> tuple[float, bool]:
        """Clip and apply the accumulated gradients unless they are not finite; clear them either way.

        Args:
            finite: false skips the step whatever the gradients are, for a loss that was not finite.

        Returns:
            The gradient norm before clipping, and whether the step was applied.
        """
        self.accumulate()
        norm = nn.utils.clip_grad_norm_(self.masters.values(), self.max_grad_norm)
        applied = finite and bool(torch.isfinite(norm))
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        if applied:
            self._hand_gradients_to_matrices()
            self._set_lr()
            with _FP32OnCpu():
                for optimizer in self.optimizers:
                    optimizer.step()
            self.num_steps += 1
            self._copy_masters_to_model()
        for master in self.masters.values():
            master.grad = None
        for optimizer in self.optimizers:
            # Of Muon's matrices, which are no masters themselves.
            optimizer.zero_grad()
        return float(norm), applied

    def reset_moments(self) -> None:
        """Forget the gradients of all steps so far; masters and the warm-up stay."""
        reset_moments(self.optimizers)

    @property
    def lr(self) -> float:
        """Learning rate of the next step: linear warm-up, then constant."""
        return warmed_up(self.config, self.num_steps)

    def _set_lr(self) -> None:
        for optimizer, factors in zip(self.optimizers, self._group_factors, strict=True):
            for group, factor in zip(optimizer.param_groups, factors, strict=True):
                group["lr"] = self.lr * factor

    def _hand_gradients_to_matrices(self) -> None:
        for name, matrices in self._matrices.items():
            gradient = self.masters[name].grad
            parts = [None] * len(matrices) if gradient is None else gradient.view(-1, *matrices[0].shape)
            for matrix, part in zip(matrices, parts, strict=True):
                matrix.grad = part

    def _copy_masters_to_model(self) -> None:
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def state_dict(self) -> dict[str, object]:
        """Return everything a resumed run needs, including masters that the model does not hold."""
        return {
            "num_steps": self.num_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "masters": {
                name: master.detach() for name, master in self.masters.items() if master is not self.parameters[name]
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        self.num_steps, self.skipped_in_a_row = state["num_steps"], state.get("skipped_in_a_row", 0)
        for name, master in state["masters"].items():
            self.masters[name].copy_(master)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


class _FP32OnCpu(TorchFunctionMode):
    """Lets torch's Muon iterate in FP32 on a CPU, where it asks for BF16.

    A CPU without instructions for BF16 emulates it and takes twenty times as long. One with them takes FP32, too, so
    that a run does not depend on which it is.
    """

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        if func is Tensor.bfloat16 and args[0].device.type == "cpu":
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def _matrices(master: Tensor) -> list[nn.Parameter]:
    stacked = master.detach().view(-1, *master.shape[-2:])
    return [nn.Parameter(matrix) for matrix in stacked]
