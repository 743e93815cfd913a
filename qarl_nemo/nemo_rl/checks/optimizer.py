"""Checks which optimizer a learner takes, and whether NeMo-RL would take its other settings with it."""

from collections.abc import Collection, Mapping
from typing import Any

from qarl_nemo.config.problems import hint
from qarl_nemo.nemo_rl.checks.batches import count_problems
from qarl_nemo.nemo_rl.layout import MEGATRON, Layout, read_layout
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.optimizer_dtypes import OPTIMIZER

# Those of Megatron's own command line. It compares names exactly, once workers have started.
_NAMES = ("adam", "sgd", "muon", "dist_muon", "adaptive_muon", "lion", "soap")
# Those whose state it can keep in the host's memory, where it divides it among ranks. On GPUs it divides Adam's alone.
_DIVIDED = ("adam", "sgd")
_GATHER = f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather"
# What does not go with any other: NeMo-RL's guide says so of Muon, or a worker once it has started. Megatron steps all
# parameters on every rank then, while data parallel ranks of a distributed optimizer have only parts of the gradients.
_NOT_WITH_OTHERS = (
    f"{OPTIMIZER}.use_distributed_optimizer",
    f"{OPTIMIZER}.use_precision_aware_optimizer",
    f"{OPTIMIZER}.optimizer_cpu_offload",
    _GATHER,
)


def optimizer_conflicts(config: Mapping[str, Any], targets: Collection[str]) -> list[str]:
    """Say which optimizer there is none of, and which settings do not go with one.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.
        targets: the run's; a model has experts where they are among them, or does not start.

    Returns:
        One line each: key, value, why, and what to set.
    """
    optimizer = look_up(config, OPTIMIZER, None) or {}
    name, offloaded = optimizer.get("optimizer", "adam"), optimizer.get("optimizer_cpu_offload", False)
    problems = []
    if name not in _NAMES:
        said = "null" if name is None else name
        problems.append(f"{OPTIMIZER}.optimizer={said}: Megatron has no such optimizer; {hint(str(name), _NAMES)}")
    if optimizer.get("overlap_cpu_optimizer_d2h_h2d", False) and not offloaded:
        problems.append(
            f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true: optimizer_cpu_offload=false leaves nothing to overlap; "
            "set false, or optimizer_cpu_offload=true"
        )
    if "muon" in str(name) or (name in _NAMES and name not in _DIVIDED):
        return problems + _undivided_problems(config, name)
    if name in _DIVIDED:
        problems += _gather_problems(config, optimizer, targets)
    # `DistributedOptimizer` asserts it, once workers have started.
    if name == "sgd" and optimizer.get("use_distributed_optimizer", False) and not offloaded:
        problems.append(
            f"{OPTIMIZER}.use_distributed_optimizer=true: Megatron divides SGD's momentum only in the host's memory; "
            "set false, or optimizer_cpu_offload=true"
        )
    return problems + (_offload_problems(optimizer) if offloaded else [])


def _undivided_problems(config: Mapping[str, Any], name: str) -> list[str]:
    return [
        f"{key}=true: optimizer={name} does not go with it; set false"
        for key in _NOT_WITH_OTHERS
        if look_up(config, key, False)
    ]


def _gather_problems(config: Mapping[str, Any], optimizer: Mapping[str, Any], targets: Collection[str]) -> list[str]:
    # Megatron gathers whole layers then, which only Muon's ranks divide: a TypeError where there is more than one rank.
    if optimizer.get("use_distributed_optimizer", True) or not look_up(config, _GATHER, False):
        return []
    layout = None if count_problems(config) else read_layout(config)
    if layout is not None and _most_copies(layout, targets) <= 1:
        return []
    divided = "set true, or" if optimizer.get("optimizer", "adam") == "adam" else "set"
    return [
        f"{OPTIMIZER}.use_distributed_optimizer=false: every rank has all parameters, and {_GATHER}=true would gather "
        f"parts of them; {divided} {_GATHER}=false"
    ]


def _most_copies(layout: Layout, targets: Collection[str]) -> int:
    """Return how many learner ranks have the same parameters, of those that most ranks have."""
    sizes = layout.sizes
    # Context parallel ranks share gradients, too.
    dense = layout.data_parallel * sizes["cp"]
    # Experts have groups of their own: ranks that share attention may each have all of them.
    experts = layout.learner_gpus // (sizes["ep"] * sizes["etp"] * sizes["pp"]) if "experts" in targets else 0
    return max(dense, experts)


def _offload_problems(optimizer: Mapping[str, Any]) -> list[str]:
    problems, fraction = [], optimizer.get("optimizer_offload_fraction", 0.0)
    if not 0 < fraction <= 1:
        problems.append(
            f"{OPTIMIZER}.optimizer_offload_fraction={fraction}: optimizer_cpu_offload=true keeps that part of the "
            "state in the host's memory; set more than 0 and at most 1"
        )
    if not optimizer.get("use_distributed_optimizer", False):
        problems.append(f"{OPTIMIZER}.use_distributed_optimizer=false: optimizer_cpu_offload=true needs it; set true")
    return problems
