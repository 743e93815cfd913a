"""`qarl.update_aware_scale` in a policy worker: the groups that NeMo-RL's optimizer steps at rates of their own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.optimizer import OptimizerConfig

from qarl_nemo.megatron.param_groups import factor_overrides, require_factors
from qarl_nemo.update_aware import lr_factors


@contextmanager
def update_aware_optimizer(setup_module: Any, scale: float | None, targets: Sequence[str]) -> Iterator[None]:
    """Make NeMo-RL build optimizers with update-aware learning rates inside the block.

    Args:
        setup_module: `nemo_rl.models.megatron.setup`, which calls Bridge's `setup_optimizer`.
        scale: QuRL's s; None changes nothing.
        targets: what is quantized.

    Yields:
        Nothing; the worker sets up its optimizer meanwhile.
    """
    setup = setup_module.setup_optimizer
    if scale is not None:
        setup_module.setup_optimizer = partial(_update_aware_setup, setup, scale, targets)
    try:
        yield
    finally:
        setup_module.setup_optimizer = setup


def _update_aware_setup(setup: Any, scale: float, targets: Sequence[str], **arguments: Any) -> Any:
    chunks = arguments["model"] if isinstance(arguments["model"], list) else [arguments["model"]]
    factors = lr_factors((name for chunk in chunks for name, _ in chunk.named_parameters()), targets, scale)
    config = arguments["optimizer_config"]
    overrides = factor_overrides(config, factors, lambda factor: _group(config, factor)).get("config_overrides")
    optimizer, scheduler = setup(**arguments, optimizer_config_override_provider=_Overrides(overrides))
    lrs = {group.get("max_lr") for group in optimizer.param_groups}
    require_factors(set(factors.values()), {factor for factor in factors.values() if config.lr * factor in lrs})
    return optimizer, scheduler


class _Overrides:
    """What Bridge asks for the groups of parameters, in place of its `OptimizerConfigOverrideProvider`."""

    def __init__(self, overrides: dict[Any, Any] | None) -> None:
        self._overrides = overrides

    def build_config_overrides(self, _: Any) -> dict[Any, Any] | None:
        return self._overrides


def _group(config: OptimizerConfig, factor: float) -> dict[str, float]:
    rates = {"max_lr": config.lr * factor, "min_lr": (config.min_lr or 0.0) * factor}
    # The product of both rates, by which weights decay in a step, stays as it is; Megatron lets norms decay by none.
    return rates if factor < 1 else rates | {"wd_mult": 1 / factor}
