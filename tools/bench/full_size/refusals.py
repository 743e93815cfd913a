"""Why a run of whole steps would fail, or put wrong figures into rows; asked before anything is made."""

import argparse
import importlib
import re
from collections.abc import Sequence

from arms import ARMS, OWN_RECIPE, Placement, work_settings
from host_memory import num_gpus
from workloads import WORKLOADS

# How NeMo-RL's own arms reach engines with GPUs of their own.
_OWN_TRANSPORT = "nccl.core"


def require_possible(arguments: argparse.Namespace) -> None:
    """Refuse what `run.py` could not run or record.

    Raises:
        ValueError: says why, and what to do.
    """
    work = WORKLOADS[arguments.workload]
    placements = [Placement.parse(placement, work.gpus) for placement in arguments.placement]
    if not (arguments.nemo_rl / OWN_RECIPE).is_file():
        raise ValueError(f"--nemo-rl {arguments.nemo_rl}: no {OWN_RECIPE} in it, so it is not NeMo-RL's repository")
    if arguments.steps < 2:
        raise ValueError(f"--steps {arguments.steps}: the first one compiles and does not count; take 2 or more")
    _require_told_apart(arguments)
    if arguments.check:
        return
    if any(place.engines for place in placements):
        require_transport(arguments.arm)
    if (found := num_gpus()) < work.gpus:
        raise ValueError(
            f"--workload {arguments.workload} runs on {work.gpus} GPU(s), and this machine has {found}; --check says "
            "what would run"
        )


def require_transport(arms: Sequence[str]) -> None:
    """Refuse NeMo-RL's own arms where they would fail once engines and learner have started.

    Args:
        arms: those that have engines with GPUs of their own.

    Raises:
        ValueError: what they refit engines through cannot be imported.
    """
    own = [arm for arm in arms if ARMS[arm].recipe is None]
    try:
        if own:
            importlib.import_module(_OWN_TRANSPORT)
    except ImportError as error:
        raise ValueError(
            f"--arm {', '.join(own)}: NeMo-RL refits engines with GPUs of their own through {_OWN_TRANSPORT}, which "
            f"cannot be imported ({error}); install nccl4py and cuda-core, or leave out the arm or the placement"
        ) from error


def _require_told_apart(arguments: argparse.Namespace) -> None:
    if not re.fullmatch("[a-z0-9_]*", arguments.label):
        raise ValueError(f"--label {arguments.label!r}: rows end in it; legal are a to z, 0 to 9 and _")
    changed = {override.lstrip("+~").partition("=")[0] for override in arguments.set}
    wrong = sorted(changed & set(work_settings(WORKLOADS[arguments.workload])))
    if wrong:
        raise ValueError(
            f"--set {', '.join(wrong)}: the workload says it, and rows are computed from that; take another "
            "--workload, or add one to workloads.py"
        )
