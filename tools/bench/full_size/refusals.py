"""Why a run of whole steps would fail, or put wrong figures into rows; asked before anything is made."""

import argparse
import importlib
import importlib.util
import itertools
import re
from collections.abc import Sequence

from arms import ARMS, OWN_RECIPE, Placement, row_name, settings, work_settings
from composing import OPTIMIZER, compose
from host_memory import num_gpus

from qarl_nemo.memory import ASLEEP_BYTES, GIB, OVERHEAD_BYTES
from qarl_nemo.muon import MEGATRONS_PACKAGE
from qarl_nemo.nemo_rl.lookup import look_up

# How NeMo-RL's own arms reach engines with GPUs of their own.
_OWN_TRANSPORT = "nccl.core"
# What Megatron's Muon is made of.
_MUON = "emerging_optimizers"
# What --placement, --steps and the harness say, beside what the workload does; blocks stand for all that is in them.
_SAID = (
    "cluster.num_nodes",
    "data.train",
    "data.validation",
    "grpo.async_grpo.enabled",
    "grpo.max_num_steps",
    "logger.log_dir",
    "policy.generation.colocated",
    "policy.generation.vllm_cfg.async_engine",
    "policy.hf_config_overrides",
    "policy.model_name",
    "policy.pretrained_checkpoint",
)


def require_possible(arguments: argparse.Namespace) -> None:
    """Refuse what `run.py` could not run or record.

    Args:
        arguments: as `run.py` parses them; `load` is the workload, `named` what its folder and rows are called.

    Raises:
        ValueError: says why, and what to do.
    """
    work = arguments.load
    placements = [Placement.parse(placement, work.gpus) for placement in arguments.placement]
    if not (arguments.nemo_rl / OWN_RECIPE).is_file():
        raise ValueError(f"--nemo-rl {arguments.nemo_rl}: no {OWN_RECIPE} in it, so it is not NeMo-RL's repository")
    if arguments.steps < 2:
        raise ValueError(f"--steps {arguments.steps}: the first one compiles and does not count; take 2 or more")
    if arguments.profile is not None and not 1 <= arguments.profile <= arguments.steps:
        raise ValueError(f"--profile {arguments.profile}: the run has steps 1 to {arguments.steps}")
    beside = (OVERHEAD_BYTES + ASLEEP_BYTES) / GIB
    if arguments.cap_gib is not None and not beside < arguments.cap_gib < float("inf"):
        raise ValueError(f"--cap-gib {arguments.cap_gib:g}: {beside:g} of them are for processes; take more")
    _require_told_apart(arguments)
    if arguments.check:
        return
    if any(place.engines for place in placements):
        require_transport(arguments.arm)
    require_muon(arguments)
    if (found := num_gpus()) < work.gpus:
        raise ValueError(
            f"--workload {arguments.workload} runs on {work.gpus} GPU(s), and this machine has {found}; --check says "
            "what would run"
        )
    names = itertools.starmap(row_name, itertools.product(arguments.arm, arguments.placement, [arguments.ends]))
    folders = [arguments.work / arguments.named / name for name in names]
    if ran := [str(folder) for folder in folders if (folder / "logs").exists()]:
        raise ValueError(
            f"{', '.join(ran)} holds a run, whose logs and memory would be mixed with this one's; take another --label "
            "or WORK, or remove it"
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


def require_muon(arguments: argparse.Namespace) -> None:
    """Refuse arms whose learner would end after its start, because the package of its optimizer is missing.

    Args:
        arguments: as for `require_possible`.

    Raises:
        ValueError: an arm's composed config has Muon, and this Python lacks the package.
    """
    if importlib.util.find_spec(_MUON) is not None:
        return
    found = []
    for arm, placement in itertools.product(arguments.arm, arguments.placement):
        config = settings(arm, placement, arguments.load, arguments.nemo_rl)
        name = str(look_up(compose(config, arguments.nemo_rl, arguments.set), OPTIMIZER, ""))
        if "muon" in name:
            found.append(f"{row_name(arm, placement)} ({name})")
    if found:
        raise ValueError(
            f"--arm {', '.join(found)}: Megatron's Muon needs {_MUON}, which this Python lacks: pip install "
            f"{MEGATRONS_PACKAGE}; or train with Adam: --label adam "
            f"--set {OPTIMIZER}=adam --set policy.megatron_cfg.optimizer.use_distributed_optimizer=true"
        )


def _require_told_apart(arguments: argparse.Namespace) -> None:
    if not re.fullmatch("[a-z0-9_]*", arguments.label):
        raise ValueError(f"--label {arguments.label!r}: rows end in it; legal are a to z, 0 to 9 and _")
    taken = any(f"{arm}_{arguments.label}" in ARMS for arm in ARMS)
    if taken or arguments.label.startswith(("separate_", "asynchronous_")):
        raise ValueError(f"--label {arguments.label}: an arm or a placement is called so; take another word")
    changed = {override.strip().lstrip("+~").partition("=")[0] for override in arguments.set}
    said = (*_SAID, *work_settings(arguments.load))
    wrong = sorted(key for key in changed if any(_within(key, own) or _within(own, key) for own in said))
    if wrong:
        raise ValueError(
            f"--set {', '.join(wrong)}: other options say it, and rows are computed from that; take another "
            "--workload, --answers, --tokens, --prompt-tokens, --placement or --steps"
        )


def _within(key: str, block: str) -> bool:
    return key == block or key.startswith(f"{block}.")
