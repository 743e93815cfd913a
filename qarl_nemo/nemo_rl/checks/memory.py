"""Computes which parts of a run do not fit on its GPUs."""

from collections.abc import Iterator, Mapping
from typing import Any

from qarl_nemo.memory import ASLEEP_BYTES, ENGINE_BYTES, GIB, OVERHEAD_BYTES
from qarl_nemo.nemo_rl.budgets import Budget, largest_share, smallest_engine, smallest_share, token_budgets
from qarl_nemo.nemo_rl.checks.other_layouts import layouts_that_fit
from qarl_nemo.nemo_rl.engine_room import CACHE, EngineRoom, engine_room
from qarl_nemo.nemo_rl.layout_memory import Card, Needed, card, learner_of, needed_memory
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.optimizer_dtypes import MOMENTS, OPTIMIZER
from qarl_nemo.nemo_rl.residency import OFFLOAD, optimizer_stays, residency_conflicts
from qarl_nemo.parallelism import either

_MEGATRON = "policy.megatron_cfg"
_ENGINE = "policy.generation.vllm_cfg"
_LONGEST = "policy.max_total_sequence_length"
_CHUNK = "policy.logprob_chunk_size"
_RECOMPUTE = f"{_MEGATRON}.activation_checkpointing"
_GRANULARITY = f"{_MEGATRON}.recompute_granularity"
_LET_IT_LEAVE = f"qarl.resident=auto and no {OFFLOAD}"


def memory_conflicts(config: Mapping[str, Any], qarl: Any) -> list[str]:
    """Say which parts of a run do not fit on its GPUs.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without `layout_conflicts`.
        qarl: its checked `NemoQarlConfig`.

    Returns:
        One line each: what is needed, what there is, and the largest value that fits, or which keys reduce it.
    """
    try:
        stays = optimizer_stays(config, qarl)
        needed = needed_memory(config, qarl, optimizer_stays=stays)
        budgets = token_budgets(config, qarl, optimizer_stays=stays)
    except ValueError as error:
        return [f"memory: {error}"]
    if needed is None:
        return []
    gpu, problems = card(qarl), residency_conflicts(config, qarl)
    problems += [_over(budget, needed, gpu, config, qarl) for budget in budgets if not budget.fits]
    held = _kept_by(config) if stays else None
    problems += _refit_problems(needed, gpu, held, whole=qarl.layerwise_refit is False)
    room = engine_room(config, needed, gpu.gib * GIB)
    return problems if room is None else [*problems, *_share_problems(needed, gpu, room, config, held)]


def _of(gpu: Card) -> str:
    return f"where it has {gpu.gib:.0f} ({gpu.source})"


def _kept_by(config: Mapping[str, Any]) -> str:
    """Return the key because of which the optimizer stays on the GPU; by itself it does only where it fits."""
    return "qarl.resident=true" if look_up(config, OFFLOAD, None) is None else f"{OFFLOAD}=false"


def _over(budget: Budget, needed: Needed, gpu: Card, config: Mapping[str, Any], qarl: Any) -> str:
    beside = (OVERHEAD_BYTES + needed.asleep) / GIB
    fixes = [f"at most {budget.most}"] if budget.most else _room_for_one(budget, config, qarl)
    learner = learner_of(config, qarl)
    if learner.logits and not look_up(config, _CHUNK, None):
        fixes.append(f"{_CHUNK}=1024 with {_MEGATRON}.defer_fp32_logits=true")
    if qarl.keep_operand:
        fixes.append("qarl.keep_operand=false")
    if budget.trains and learner.recompute == "none":
        fixes.append(f"{_GRANULARITY}=full" if look_up(config, _RECOMPUTE, False) else f"{_RECOMPUTE}=true")
    name = look_up(config, f"{OPTIMIZER}.optimizer", "adam")
    # Megatron divides no other's among ranks on GPUs.
    if budget.trains and learner.optimizer_whole and name in ("adam", "muon"):
        fixes.append(f"use_distributed_optimizer=true (of Muon: optimizer=dist_muon) in {OPTIMIZER}")
    if budget.trains and needed.learner.fp32_gradients_help:
        fixes.append(f"{_MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32=true")
    if budget.trains and learner.optimizer == name == "adam":
        keys = ", ".join(f"{key}=bfloat16" for key in MOMENTS)
        fixes.append(f"use_precision_aware_optimizer=true, {keys} in {OPTIMIZER}")
    advice = f"set {', '.join(fixes)}, or take" if fixes else "take"
    return (
        f"memory: {budget.key}={budget.value}: a learner rank needs {budget.needed / GIB:.0f} GiB and {beside:g} "
        f"beside its tensors, {_of(gpu)}; {advice} more GPUs"
    )


def _room_for_one(budget: Budget, config: Mapping[str, Any], qarl: Any) -> list[str]:
    """Say what makes room for a response, of which not even one fits."""
    shorter = f"{_LONGEST} to at most {budget.sequence}"
    if budget.key.endswith("_tokens"):
        shorter = f"at most {budget.sequence} here and in {_LONGEST}"
    fixes = [shorter] if budget.sequence else []
    names = layouts_that_fit(config, qarl, optimizer_stays=optimizer_stays(config, qarl))
    return fixes + ([f"a layout in which it fits by computation ({either(names)}) in {_MEGATRON}"] if names else [])


def _refit_problems(needed: Needed, gpu: Card, stays: str | None, *, whole: bool) -> Iterator[str]:
    if needed.refit is None:
        return
    beside, optimizer = OVERHEAD_BYTES + ASLEEP_BYTES, needed.learner.parts["optimizer"] if stays else 0.0
    says = f"GiB a GPU and {beside / GIB:g} beside its tensors, {_of(gpu)}; set"
    if needed.refit - optimizer + beside > gpu.gib * GIB:
        parts = "qarl.layerwise_refit=true, " if whole else ""
        yield (
            f"memory: a refit needs {(needed.refit - optimizer) / GIB:.0f} {says} {parts}a larger "
            f"{_ENGINE}.tensor_parallel_size, or more GPUs"
        )
    elif needed.refit + beside > gpu.gib * GIB:
        yield (
            f"{stays}: a refit beside the optimizer's {optimizer / GIB:.0f} GiB needs {needed.refit / GIB:.0f} {says} "
            f"{_LET_IT_LEAVE}"
        )


def _share_problems(
    needed: Needed, gpu: Card, room: EngineRoom, config: Mapping[str, Any], stays: str | None
) -> Iterator[str]:
    gpu_bytes, said = gpu.gib * GIB, f"{room.key}={room.value}"
    least = smallest_share(needed, gpu_bytes, config)
    most = largest_share(needed, gpu_bytes, optimizer_stays=stays is not None)
    lowest, highest = (room.at(share, needed, gpu_bytes) for share in (least, most))
    # A cache of a size of its own is beside all that an engine has.
    beside = ENGINE_BYTES if room.key == CACHE else 0
    if room.share * gpu_bytes < smallest_engine(needed, config) + beside:
        fix = f"at least {lowest}, or " if least <= most else ""
        yield (
            f"{said}: an engine's weights are {needed.engine / GIB:.0f} GiB a GPU, {_of(gpu)}, and a "
            f"response needs room beside them; set {fix}a larger {_ENGINE}.tensor_parallel_size"
        )
    if room.share <= most:
        return
    if not stays or needed.refit is None:
        process, update = f"{OVERHEAD_BYTES / GIB:g} GiB of the learner's process", f"{needed.arriving / GIB:.1f} GiB"
        beside_it = f"{update} of an arriving update" if needed.refit is None else process
        yield f"{said}: more than a GPU has beside the {beside_it}, {_of(gpu)}; set at most {highest}"
    else:
        fix = f"{room.key} to at most {highest}, or " if most >= least else ""
        yield (
            f"{stays}: the optimizer's {needed.learner.parts['optimizer'] / GIB:.0f} GiB stay beside an engine of "
            f"{room.share:.2f} of the GPU, {_of(gpu)}; set {fix}{_LET_IT_LEAVE}"
        )
