"""Memory of a NeMo-RL run's learner ranks, engines and hosts, computed from its config."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl_nemo.memory import (
    ASLEEP_BYTES,
    GIB,
    MAX_TOKENS,
    Learner,
    Memory,
    Recompute,
    arriving_bytes,
    engine_bytes,
    host_memory,
    rank_memory,
    refit_bytes,
)
from qarl_nemo.nemo_rl.layout import read_layout
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.model_shapes import read_model_size
from qarl_nemo.nemo_rl.optimizer_dtypes import has_16_bit_moments

_MEGATRON = "policy.megatron_cfg"
# What the driver shows of 80 GB, the size of the paper's GPUs.
DEFAULT_GIB = 79.0
# Of control groups, version 2 and 1; "max" is none.
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Card:
    """One GPU's memory.

    Attributes:
        gib: its size.
        source: where the size comes from, for messages.
    """

    gib: float
    source: str


@dataclass(frozen=True)
class Needed:
    """What GPUs and hosts will hold, in bytes.

    Attributes:
        learner: what the fullest learner rank holds.
        refit: what a GPU holds during a refit beside its engine; None if engines have GPUs of their own.
        engine: an engine's weights on each of its GPUs.
        asleep: what an engine on the learner's GPU keeps while it sleeps.
        arriving: what an engine with GPUs of its own holds on each of them of an update until all of it is there.
        token: an engine's cache of one token on each of its GPUs.
        kept: what the learner's parameters take beside a generating engine because they cannot leave.
        host: what a node's host memory holds by purpose, as `host_memory` computes it, and a reference model; empty if
            engines have GPUs of their own.
    """

    learner: Memory
    refit: float | None
    engine: float
    asleep: float
    arriving: float
    token: float
    kept: float
    host: Mapping[str, float]


def card(qarl: Any) -> Card:
    """Return the size of a GPU: `qarl.gpu_memory_gib`, or this machine's first GPU's, or 80 GB.

    Args:
        qarl: the checked `NemoQarlConfig`.

    Returns:
        The size and where it comes from.
    """
    if qarl.gpu_memory_gib is not None:
        return Card(qarl.gpu_memory_gib, "qarl.gpu_memory_gib")
    found = first_gpu_gib()
    if found is None:
        return Card(DEFAULT_GIB, "assumed: no GPU on this machine; ++qarl.gpu_memory_gib=... says otherwise")
    return Card(found, "this machine's first GPU")


def needed_memory(
    config: Mapping[str, Any],
    qarl: Any,
    *,
    optimizer_stays: bool,
    parameters_stay: bool | None = None,
    engines_forget: bool = True,
) -> Needed | None:
    """Compute what the run's GPUs and hosts will hold.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without `layout_conflicts`.
        qarl: its checked `NemoQarlConfig`.
        optimizer_stays: whether the optimizer stays on the GPU while engines generate.
        parameters_stay: whether parameters do; None: as the optimizer.
        engines_forget: whether they are ours, which sleep without a copy of their weights.

    Returns:
        Bytes; None if the `cluster` block or the model's config.json is missing.

    Raises:
        ValueError: the config.json lacks keys.
    """
    layout, model = read_layout(config), read_model_size(config)
    if layout is None or model is None:
        return None
    learner, served = learner_of(config, qarl), _served(qarl)
    held = rank_memory(model, layout.ranks, learner)
    engine = engine_bytes(model, served, layout.engine_tp, layout.engine_ep)
    # More ranks than heads hold copies.
    token = model.cache_bytes / min(layout.engine_tp, model.num_kv_heads)
    if not layout.colocated:
        arriving = arriving_bytes(model, served, layout.engine_tp, layout.engine_ep)
        return Needed(held, None, engine, 0.0, arriving, token, 0.0, {})
    leave, stay = parameters_can_leave(config), optimizer_stays if parameters_stay is None else parameters_stay
    both = {"served": served, "engine_tp": layout.engine_tp, "engine_ep": layout.engine_ep}
    layerwise = qarl.layerwise_refit is not False
    refit = refit_bytes(model, layout.ranks, learner, layerwise=layerwise, optimizer_stays=optimizer_stays, **both)
    host = host_memory(
        model,
        layout.ranks,
        learner,
        gpus=layout.gpus_per_node,
        engines_forget=engines_forget,
        parameters_leave=leave and not stay,
        optimizer_leaves=not optimizer_stays,
        **both,
    )
    if look_up(config, "loss_fn.reference_policy_kl_penalty", 0.0) > 0:
        # Each rank keeps the reference's weights there, and the learner's while it computes with the reference's.
        host["reference"] = layout.gpus_per_node * 2 * held.parts["weights"]
    kept = 0.0 if leave else held.parts["weights"]
    return Needed(held, refit, engine, ASLEEP_BYTES, 0.0, token, kept, host)


def parameters_can_leave(config: Mapping[str, Any]) -> bool:
    """Return whether a learner's parameters can leave the GPU.

    NeMo-RL moves Megatron's buffers, and parameters are in some only with a distributed optimizer.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.
    """
    return bool(look_up(config, f"{_MEGATRON}.optimizer.use_distributed_optimizer", True))


def first_gpu_gib() -> float | None:
    """Return the memory of this machine's first GPU, in GiB; None where there is none."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total / GIB
    except pynvml.NVMLError:
        return None


def first_host_gib() -> float | None:
    """Return the memory of this machine, or of its container, in GiB; None where there is no GPU, as on a laptop."""
    if first_gpu_gib() is None:
        return None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [path.read_text().strip() for path in _CONTAINER_LIMITS if path.is_file()]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())]) / GIB


def learner_of(config: Mapping[str, Any], qarl: Any) -> Learner:
    """Describe a config's learner to the memory model.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.
        qarl: its checked `NemoQarlConfig`.
    """
    policy, megatron = config.get("policy") or {}, look_up(config, _MEGATRON, {})
    return Learner(
        # BF16 runs through the same code, which stacks the experts' weights as it does packed ones.
        format=qarl.executed_format.name,
        group_size=qarl.group_size or 128,
        nested_in=qarl.nested_in if qarl.executed_format.nested_bits else None,
        targets=tuple(qarl.targets),
        keep_operand=qarl.keep_operand,
        optimizer=_optimizer(look_up(megatron, "optimizer", {})),
        kronecker=look_up(megatron, "optimizer.optimizer", "") == "soap",
        # Megatron-core's Float16OptimizerWithFloat16Params and SGD: an FP32 master and an FP32 momentum of each.
        leaves_to_adam=look_up(megatron, "optimizer.optimizer", "") != "sgd",
        precision_aware=bool(look_up(megatron, "optimizer.use_precision_aware_optimizer", False)),
        optimizer_whole=not _is_distributed(look_up(megatron, "optimizer", {})),
        gradient_bytes=4 if look_up(megatron, "distributed_data_parallel_config.grad_reduce_in_fp32", False) else 2,
        tokens=min(_tokens(policy), _rank_tokens(config)),
        recompute=_recompute(megatron),
        sequence_parallel=bool(look_up(megatron, "sequence_parallel", False)),
        logits=not look_up(megatron, "use_fused_linear_logprobs", False),
        logprob_chunk=policy.get("logprob_chunk_size") or None,
    )


def _served(qarl: Any) -> Learner:
    return Learner(
        format=qarl.format,
        group_size=qarl.group_size or 128,
        targets=tuple(qarl.targets),
        nested_in=qarl.nested_in,
    )


def _optimizer(optimizer: Mapping[str, Any]) -> str:
    if optimizer.get("optimizer_cpu_offload") and optimizer.get("optimizer_offload_fraction") == 1.0:
        return "offloaded"
    name, moments = str(optimizer.get("optimizer", "")), optimizer.get("adaptive_muon_moment2_method", "adamuon")
    # Its other methods keep no second moment of each element.
    if name == "adaptive_muon" and moments == "adamuon":
        return "adam"
    # Lion, too, leaves embedding, head and norms to Adam. Routers it steps itself, whose second moments this counts.
    if any(one in name for one in ("muon", "sgd", "lion")):
        return "muon"
    return "adam_bf16" if has_16_bit_moments(optimizer) else "adam"


def _is_distributed(optimizer: Mapping[str, Any]) -> bool:
    by_layers = optimizer.get("use_layer_wise_distributed_optimizer", False)
    named = str(optimizer.get("optimizer", "")).startswith("dist_")
    return bool(optimizer.get("use_distributed_optimizer", True) or by_layers or named)


def _tokens(policy: Mapping[str, Any]) -> int:
    for kind in ("sequence_packing", "dynamic_batching"):
        if look_up(policy, f"{kind}.enabled", False):
            return look_up(policy, f"{kind}.train_mb_tokens", 8192)
    return (policy.get("train_micro_batch_size") or 1) * (policy.get("max_total_sequence_length") or 8192)


def _rank_tokens(config: Mapping[str, Any]) -> int:
    """Return how many tokens of an optimizer step a learner rank can have, which no micro-batch exceeds."""
    layout, policy = read_layout(config), config.get("policy") or {}
    batch, longest = (policy.get(key) for key in ("train_global_batch_size", "max_total_sequence_length"))
    if layout is None or not batch or not longest:
        return MAX_TOKENS
    return min(max(batch // layout.data_parallel, 1) * longest, MAX_TOKENS)


def _recompute(megatron: Mapping[str, Any]) -> Recompute:
    # Of selective recomputation this is an upper bound; NeMo-RL's own default is attention's core, which saves little.
    whole = megatron.get("recompute_granularity", "full") == "full"
    return "full" if megatron.get("activation_checkpointing") and whole else "none"
