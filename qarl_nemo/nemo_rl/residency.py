"""Whether the optimizer's state stays on the GPU while engines generate.

Carrying Adam's 46 GB of a rank of Qwen3-30B-A3B to the host and back is what NeMo-RL does by default, through pageable
memory: 76 of the 143 s that a step took. An int4 engine is small enough to leave it where it is on a GPU of 141 GB.
"""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.memory import GIB, OVERHEAD_BYTES
from qarl_nemo.nemo_rl.layout import read_layout
from qarl_nemo.nemo_rl.layout_memory import Needed, card, needed_memory
from qarl_nemo.nemo_rl.lookup import look_up

OFFLOAD = "policy.offload_optimizer_for_refit"
UTILIZATION = "policy.generation.vllm_cfg.gpu_memory_utilization"


def optimizer_stays(config: Mapping[str, Any], qarl: Any) -> bool:
    """Return whether the optimizer's state is to stay on the GPU: as NeMo-RL's key or `qarl.resident` say, or as fits.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without `layout_conflicts`.
        qarl: its checked `NemoQarlConfig`.

    Returns:
        The answer; False where it cannot be computed.

    Raises:
        ValueError: the model's config.json lacks keys.
    """
    said = look_up(config, OFFLOAD, None)
    if said is not None:
        return not said
    if qarl.resident != "auto":
        return qarl.resident
    layout = read_layout(config)
    if layout is None or not layout.colocated:
        return False
    needed = needed_memory(config, qarl, optimizer_stays=True)
    return needed is not None and fits_beside_engine(needed, look_up(config, UTILIZATION, None), card(qarl).gib * GIB)


def fits_beside_engine(needed: Needed, share: float | None, gpu_bytes: float) -> bool:
    """Return whether optimizer and engine fit a GPU together, in a refit and while answers are generated.

    Args:
        needed: what GPUs will hold, computed with the optimizer on them.
        share: the engine's `gpu_memory_utilization`; None where the config does not say it.
        gpu_bytes: one GPU's memory.

    Returns:
        The answer; True for engines with GPUs of their own.
    """
    if needed.refit is None:
        return True
    if share is None:
        return False
    generating = needed.learner.parts["optimizer"] + share * gpu_bytes
    return generating + OVERHEAD_BYTES <= gpu_bytes and needed.refit + 2 * OVERHEAD_BYTES <= gpu_bytes


def residency_conflicts(config: Mapping[str, Any], qarl: Any) -> list[str]:
    """Say where NeMo-RL's key and `qarl.resident` contradict each other.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.
        qarl: its checked `NemoQarlConfig`.

    Returns:
        No line, or one: key, value, why, and what to set.
    """
    said = look_up(config, OFFLOAD, None)
    if said is None or qarl.resident == "auto" or qarl.resident != said:
        return []
    word = str(said).lower()
    return [f"{OFFLOAD}={word}: qarl.resident={word} says the opposite; remove one of them"]


def short_of_room(share: float, returning_bytes: float) -> str | None:
    """Say why an engine could not wake on this GPU with what the learner holds there now.

    Args:
        share: the engine's `gpu_memory_utilization`.
        returning_bytes: what the learner will free before the engine's cache wakes: its weights.

    Returns:
        A reason; None where there is room.
    """
    import torch

    free, total = torch.cuda.mem_get_info()
    missing = share * total - free - returning_bytes
    if missing <= 0:
        return None
    return f"an engine of {share} of {total / GIB:.0f} GiB would lack {missing / GIB:.1f} GiB beside the optimizer"
