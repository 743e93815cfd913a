"""Computes which parts of a run do not fit on its GPUs."""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.memory import ASLEEP_BYTES, GIB, OVERHEAD_BYTES
from qarl_nemo.nemo_rl.layout_memory import budget_of, card, needed_memory
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.residency import OFFLOAD, UTILIZATION, fits_beside_engine, optimizer_stays, residency_conflicts

_MEGATRON = "policy.megatron_cfg"
_ENGINE = "policy.generation.vllm_cfg"


def memory_conflicts(config: Mapping[str, Any], qarl: Any) -> list[str]:
    """Say which parts of a run do not fit on its GPUs.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without `layout_conflicts`.
        qarl: its checked `NemoQarlConfig`.

    Returns:
        One line each: what is needed, what there is, and which keys reduce it.
    """
    try:
        stays = optimizer_stays(config, qarl)
        needed = needed_memory(config, qarl, optimizer_stays=stays)
    except ValueError as error:
        return [f"memory: {error}"]
    if needed is None:
        return []
    gpu, problems = card(qarl), residency_conflicts(config, qarl)
    of = f"where it has {gpu.gib:.0f} ({gpu.source})"
    if not needed.learner.fits(gpu.gib * GIB - needed.asleep):
        most = budget_of(config, qarl)
        smaller = f"at most {most} tokens a micro-batch" if most else "a layout with less a rank"
        problems.append(
            f"memory: a learner rank needs {needed.learner.peak_bytes / GIB:.0f} GiB and "
            f"{(OVERHEAD_BYTES + needed.asleep) / GIB:g} beside its tensors, {of}; set "
            f"qarl.keep_operand=false, {_MEGATRON}.activation_checkpointing=true, {smaller}, or more GPUs"
        )
    beside = OVERHEAD_BYTES + ASLEEP_BYTES
    # Whether the optimizer fits beside it is asked below.
    refit = (needed.refit or 0.0) - (needed.learner.parts["optimizer"] if stays else 0.0)
    if refit + beside > gpu.gib * GIB:
        problems.append(
            f"memory: a refit needs {refit / GIB:.0f} GiB a GPU and {beside / GIB:g} beside its tensors, {of}; set "
            f"qarl.layerwise_refit=true, a larger {_ENGINE}.tensor_parallel_size, or more GPUs"
        )
    share = look_up(config, UTILIZATION, None)
    if stays and not fits_beside_engine(needed, share, gpu.gib * GIB):
        problems.append(
            f"{OFFLOAD}=false: the optimizer's {needed.learner.parts['optimizer'] / GIB:.0f} GiB stay beside an engine "
            f"of {share} of the GPU, {of}; set a smaller {UTILIZATION}, or qarl.resident=auto without this key"
        )
    if isinstance(share, float) and needed.engine > share * gpu.gib * GIB:
        problems.append(
            f"{UTILIZATION}={share}: an engine's weights alone are {needed.engine / GIB:.0f} GiB a GPU, {of}; set a "
            f"larger share, or a larger {_ENGINE}.tensor_parallel_size"
        )
    return problems
