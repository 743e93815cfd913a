"""Groups of parameters that Megatron's optimizers step at rates of their own."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig


def factor_overrides(
    config: OptimizerConfig, factors: Mapping[str, float], settings: Callable[[float], dict[str, Any]]
) -> dict[str, Any]:
    """Return what gives parameters with a learning rate factor groups of their own.

    Args:
        config: the optimizer's settings.
        factors: parameter name -> factor; see `qarl_nemo.update_aware`.
        settings: a factor's group, in the words of Megatron's `ParamGroupOverride`.

    Returns:
        Keyword arguments of `get_megatron_optimizer`; none where there is no factor.
    """
    if not factors:
        return {}
    # Megatron moves these; a run without factors needs none of them.
    from megatron.core.optimizer import get_standard_config_overrides
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

    # Overrides take the place of Megatron's own.
    overrides: dict[Any, Any] = dict(get_standard_config_overrides(config))
    for factor in sorted(set(factors.values())):
        chosen = ParamWithNamePredicate(
            name=f"update_aware_{factor}", fn=lambda _, name, factor=factor: factors.get(name) == factor
        )
        overrides[ParamKey(with_name_predicate=chosen)] = settings(factor)
    return {"config_overrides": overrides}


def require_factors(asked: set[float], given: set[float | None]) -> None:
    """Raise unless every learning rate factor has a group.

    Args:
        asked: the factors.
        given: those of the optimizer's groups.

    Raises:
        RuntimeError: Megatron gave no parameter one of them.
    """
    absent = asked - given
    if absent:
        raise RuntimeError(f"this Megatron-core gave no parameter the learning rate factors {sorted(absent)}")


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of Megatron's that hold moments: one for dense parameters, one for experts."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one.optimizer for one in chained if one.optimizer is not None]
