"""Looks for the package of Megatron's Muon, Lion and SOAP, without which a learner ends once it has started."""

import os
from collections.abc import Mapping
from typing import Any

from qarl_nemo.installation import installed_version
from qarl_nemo.muon import MEGATRONS_PACKAGE
from qarl_nemo.nemo_rl.layout_memory import first_gpu_gib
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.optimizer_dtypes import OPTIMIZER

_OPTIMIZERS = ("muon", "lion", "soap")
# Megatron asks for the distribution of this name, and not for its module.
_PACKAGE = "emerging-optimizers"
# NeMo-RL's: workers run in the launcher's environment. Else they have their own, where nobody looks before they start.
_ONE_ENVIRONMENT = "NEMO_RL_PY_EXECUTABLES_SYSTEM"


def muon_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say whether workers on this machine would lack the optimizer's package.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        One line; none where the learner has an environment of its own, and on a machine without GPUs.
    """
    return [_line(config)] if _lacks_package(config) and first_gpu_gib() is not None else []


def muon_hints(config: Mapping[str, Any]) -> list[str]:
    """Say on a machine without GPUs, where a run is only checked, that the optimizer needs a package.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        No line, or one; none where the learner has an environment of its own.
    """
    return [_line(config, " where the run starts")] if _lacks_package(config) and first_gpu_gib() is None else []


def _lacks_package(config: Mapping[str, Any]) -> bool:
    name = str(look_up(config, f"{OPTIMIZER}.optimizer", ""))
    here = os.environ.get(_ONE_ENVIRONMENT) == "1" and any(one in name for one in _OPTIMIZERS)
    return here and installed_version(_PACKAGE) is None


def _line(config: Mapping[str, Any], where: str = "") -> str:
    name = look_up(config, f"{OPTIMIZER}.optimizer", "")
    what = "Muon" if "muon" in name else name
    return (
        f"{OPTIMIZER}.optimizer={name}: Megatron's {what} needs the package {_PACKAGE}{where}, which this Python "
        f"lacks; pip install {MEGATRONS_PACKAGE}, or set {OPTIMIZER}.optimizer=adam and "
        f"{OPTIMIZER}.use_distributed_optimizer=true"
    )
