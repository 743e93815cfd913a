"""GPU memory of a NeMo-RL run's learner ranks and engines, computed from its config and held against the card."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qarl_nemo.memory import (
    GIB,
    OVERHEAD_BYTES,
    Learner,
    Memory,
    ModelSize,
    Recompute,
    rank_memory,
    refit_bytes,
    served_bytes,
)
from qarl_nemo.nemo_rl.layout import Layout, read_layout
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.model_shapes import model_config_file
from qarl_nemo.nemo_rl.optimizer_dtypes import has_bf16_moments
from qarl_nemo.nemo_rl.token_budget import largest_budget

_MEGATRON = "policy.megatron_cfg"
_ENGINE = "policy.generation.vllm_cfg"
_UTILIZATION = f"{_ENGINE}.gpu_memory_utilization"
# What an engine keeps while it sleeps: its context, graphs, and what kernels hold.
_ASLEEP_BYTES = 5 * GIB
# Of 80 GB, what a driver shows; the paper's cards.
DEFAULT_GIB = 79.0


@dataclass(frozen=True)
class Card:
    """One GPU's memory.

    Attributes:
        gib: its size.
        source: how it is known, for messages.
    """

    gib: float
    source: str


@dataclass(frozen=True)
class Needed:
    """What GPUs will hold, in bytes.

    Attributes:
        learner: of the fullest learner rank.
        refit: of a GPU during a refit beside its engine; None where engines have GPUs of their own.
        engine: weights of an engine on each of its GPUs.
    """

    learner: Memory
    refit: float | None
    engine: float


def card(qarl: Any) -> Card:
    """Return the size of a GPU: `qarl.gpu_memory_gib`, or this machine's first GPU's, or 80 GB.

    Args:
        qarl: the checked `NemoQarlConfig`.

    Returns:
        The size and how it is known.
    """
    if qarl.gpu_memory_gib is not None:
        return Card(qarl.gpu_memory_gib, "qarl.gpu_memory_gib")
    found = _first_gpu_gib()
    if found is None:
        return Card(DEFAULT_GIB, "assumed: no GPU on this machine; qarl.gpu_memory_gib says otherwise")
    return Card(found, "this machine's first GPU")


def needed_memory(config: Mapping[str, Any], qarl: Any) -> Needed | None:
    """Compute what the run's GPUs will hold.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without `layout_conflicts`.
        qarl: its checked `NemoQarlConfig`.

    Returns:
        Bytes; None where the cluster or the model's config.json is not at hand.

    Raises:
        ValueError: the config.json lacks keys.
    """
    layout, path = read_layout(config), model_config_file(str(look_up(config, "policy.model_name", "")))
    if layout is None or path is None:
        return None
    model, learner, served = ModelSize.read(path), learner_of(config, qarl), _served(qarl)
    layerwise = qarl.layerwise_refit is not False
    refit = None
    if layout.colocated:
        refit = refit_bytes(
            model,
            layout.ranks,
            learner,
            layout.engine_tp,
            layerwise=layerwise,
            served=served,
            optimizer_stays=optimizer_stays(config),
        )
    return Needed(rank_memory(model, layout.ranks, learner), refit, _engine_bytes(model, layout, served))


def budget_of(config: Mapping[str, Any], qarl: Any) -> int | None:
    """Find the largest `policy.sequence_packing.train_mb_tokens` that a run can use.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without `layout_conflicts`.
        qarl: its checked `NemoQarlConfig`.

    Returns:
        Tokens, at most a data parallel rank's whole share of an optimizer step; None where nothing fits, or the
        cluster or the model's config.json is not at hand.
    """
    layout, path = read_layout(config), model_config_file(str(look_up(config, "policy.model_name", "")))
    if layout is None or path is None:
        return None
    room = card(qarl).gib * GIB - (_ASLEEP_BYTES if layout.colocated else 0)
    found = largest_budget(ModelSize.read(path), layout.ranks, learner_of(config, qarl), room)
    responses = look_up(config, "policy.train_global_batch_size", 0) // layout.data_parallel
    share = responses * look_up(config, "policy.max_total_sequence_length", 0)
    return min(found, share) if found and share else found


def memory_conflicts(config: Mapping[str, Any], qarl: Any) -> list[str]:
    """Say what does not fit on the GPUs.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without `layout_conflicts`.
        qarl: its checked `NemoQarlConfig`.

    Returns:
        One line each: what is needed, of what, and which keys bring it down.
    """
    try:
        needed = needed_memory(config, qarl)
    except ValueError as error:
        return [f"memory: {error}"]
    if needed is None:
        return []
    gpu, problems = card(qarl), []
    of, spare = f"where it has {gpu.gib:.0f} ({gpu.source})", OVERHEAD_BYTES / GIB
    if not needed.learner.fits(gpu.gib * GIB):
        most = budget_of(config, qarl)
        smaller = f"at most {most} tokens a micro-batch" if most else "a layout with less a rank"
        problems.append(
            f"memory: a learner rank needs {needed.learner.peak_bytes / GIB:.0f} GiB and {spare:g} more, {of}; set "
            f"qarl.keep_operand=false, {_MEGATRON}.activation_checkpointing=true, {smaller}, or more GPUs"
        )
    if needed.refit is not None and needed.refit + 2 * OVERHEAD_BYTES > gpu.gib * GIB:
        problems.append(
            f"memory: a refit needs {needed.refit / GIB:.0f} GiB a GPU and {2 * spare:g} more, {of}; set "
            f"qarl.layerwise_refit=true, a larger {_ENGINE}.tensor_parallel_size, or more GPUs"
        )
    share = look_up(config, _UTILIZATION, None)
    held = needed.learner.parts["optimizer"] + share * gpu.gib * GIB if isinstance(share, float) else 0.0
    if needed.refit is not None and optimizer_stays(config) and held + OVERHEAD_BYTES > gpu.gib * GIB:
        problems.append(
            f"policy.offload_optimizer_for_refit=false: the optimizer's {needed.learner.parts['optimizer'] / GIB:.0f} "
            f"GiB stay beside an engine of {share} of the GPU, {of}; set a smaller {_UTILIZATION}, or true"
        )
    if isinstance(share, float) and needed.engine > share * gpu.gib * GIB:
        problems.append(
            f"{_UTILIZATION}={share}: an engine's weights alone are {needed.engine / GIB:.0f} GiB a GPU, {of}; set a "
            f"larger share, or a larger {_ENGINE}.tensor_parallel_size"
        )
    return problems


def _first_gpu_gib() -> float | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total / GIB
    except pynvml.NVMLError:
        return None


def optimizer_stays(config: Mapping[str, Any]) -> bool:
    """Return whether the optimizer's state stays on the GPU while engines generate.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        The answer; NeMo-RL offloads it unless told otherwise.
    """
    return not look_up(config, "policy.offload_optimizer_for_refit", True)


def learner_of(config: Mapping[str, Any], qarl: Any) -> Learner:
    """Describe a config's learner to the memory model.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.
        qarl: its checked `NemoQarlConfig`.

    Returns:
        What it holds and computes.
    """
    policy, megatron = config.get("policy") or {}, look_up(config, _MEGATRON, {})
    return Learner(
        format=qarl.format if qarl.alignment == "aligned" else None,
        group_size=qarl.group_size or 128,
        attention="attention" in qarl.targets,
        keep_operand=qarl.keep_operand,
        optimizer=_optimizer(look_up(megatron, "optimizer", {})),
        gradient_bytes=4 if look_up(megatron, "distributed_data_parallel_config.grad_reduce_in_fp32", False) else 2,
        tokens=_tokens(policy),
        # What selective recomputation leaves is between none and this.
        recompute=_recompute(megatron),
        logits=not look_up(megatron, "use_fused_linear_logprobs", False),
        logprob_chunk=policy.get("logprob_chunk_size") or None,
    )


def _served(qarl: Any) -> Learner:
    return Learner(format=qarl.format, group_size=qarl.group_size or 128, attention="attention" in qarl.targets)


def _engine_bytes(model: ModelSize, layout: Layout, served: Learner) -> float:
    # Experts that span several engines' GPUs, vLLM's data parallel ranks, leave the rest whole on each.
    whole = served_bytes(model, served)
    if layout.engine_ep <= layout.engine_tp or not model.num_experts:
        return whole / layout.engine_tp
    rest = 2 * (model.num_parameters - model.num_layers * model.expert_parameters)
    return (whole - rest) / layout.engine_ep + rest / layout.engine_tp


def _optimizer(optimizer: Mapping[str, Any]) -> str:
    if optimizer.get("optimizer_cpu_offload") and optimizer.get("optimizer_offload_fraction") == 1.0:
        return "offloaded"
    if "muon" in str(optimizer.get("optimizer", "")):
        return "muon"
    return "adam_bf16" if has_bf16_moments(optimizer) else "adam"


def _tokens(policy: Mapping[str, Any]) -> int:
    for kind in ("sequence_packing", "dynamic_batching"):
        if look_up(policy, f"{kind}.enabled", False):
            return look_up(policy, f"{kind}.train_mb_tokens", 8192)
    return (policy.get("train_micro_batch_size") or 1) * (policy.get("max_total_sequence_length") or 8192)


def _recompute(megatron: Mapping[str, Any]) -> Recompute:
    return "full" if megatron.get("activation_checkpointing") else "none"
