"""Decides whether the optimizer's state stays on the GPU while engines generate.

By default NeMo-RL copies it to the host and back through pageable memory: for Qwen3-30B-A3B, 46 GB of Adam's state per
rank, which took 75 of a step's 143 s. Beside an int4 engine it can stay on a GPU of 141 GB.
"""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.memory import ASLEEP_BYTES, GIB, OVERHEAD_BYTES
from qarl_nemo.nemo_rl.budgets import token_budgets
from qarl_nemo.nemo_rl.engine_room import engine_room
from qarl_nemo.nemo_rl.layout import read_layout
from qarl_nemo.nemo_rl.layout_memory import Needed, card, needed_memory
from qarl_nemo.nemo_rl.lookup import look_up

OFFLOAD = "policy.offload_optimizer_for_refit"


def optimizer_stays(config: Mapping[str, Any], qarl: Any) -> bool:
    """Return whether the optimizer's state stays on the GPU: as NeMo-RL's key or `qarl.resident` says, else if it fits.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without `layout_conflicts`.
        qarl: its checked `NemoQarlConfig`.

    Returns:
        The answer; False if it cannot be computed.

    Raises:
        ValueError: the model's config.json lacks keys.
    """
    said = look_up(config, OFFLOAD, None)
    if isinstance(said, bool):
        return not said
    if qarl.resident != "auto":
        return qarl.resident
    layout = read_layout(config)
    if layout is None or not layout.colocated:
        return False
    needed, gpu_bytes = needed_memory(config, qarl, optimizer_stays=True), card(qarl).gib * GIB
    if needed is None:
        return False
    room = engine_room(config, needed, gpu_bytes)
    return fits_beside_engine(needed, room.share if room else None, gpu_bytes) and fits_beside_logprobs(config, qarl)


def fits_beside_engine(needed: Needed, share: float | None, gpu_bytes: float) -> bool:
    """Return whether optimizer and engine fit on a GPU together, during a refit and during generation.

    Args:
        needed: what GPUs will hold, computed with the optimizer on them.
        share: the part of a GPU that the engine takes; None if the config does not say.
        gpu_bytes: one GPU's memory.

    Returns:
        The answer; True for engines with GPUs of their own.
    """
    if needed.refit is None:
        return True
    if share is None:
        return False
    generating = needed.learner.parts["optimizer"] + needed.kept + share * gpu_bytes
    refit = needed.refit + OVERHEAD_BYTES + ASLEEP_BYTES
    return generating + OVERHEAD_BYTES <= gpu_bytes and refit <= gpu_bytes


def fits_beside_logprobs(config: Mapping[str, Any], qarl: Any) -> bool:
    """Return whether log-probabilities have room beside the optimizer, or would have none without it either.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without `layout_conflicts`.
        qarl: its checked `NemoQarlConfig`.

    Raises:
        ValueError: the model's config.json lacks keys.
    """
    beside, alone = (
        all(budget.fits for budget in token_budgets(config, qarl, optimizer_stays=stays) if not budget.trains)
        for stays in (True, False)
    )
    return beside or not alone


def residency_conflicts(config: Mapping[str, Any], qarl: Any) -> list[str]:
    """Say where NeMo-RL's key is no answer, or `qarl.resident` contradicts it.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.
        qarl: its checked `NemoQarlConfig`.

    Returns:
        No line, or one: key, value, why, and what to set.
    """
    said = look_up(config, OFFLOAD, None)
    if said is not None and not isinstance(said, bool):
        return [f"{OFFLOAD}={said}: not true or false; set one, or remove it"]
    if said is None or qarl.resident == "auto" or qarl.resident != said:
        return []
    word = str(said).lower()
    return [f"{OFFLOAD}={word}: qarl.resident={word} says the opposite; remove one of them"]


def short_of_room(share: float, spare_bytes: float) -> str | None:
    """Say why an engine could not wake on this GPU beside what the learner holds there now.

    Args:
        share: the engine's `gpu_memory_utilization`.
        spare_bytes: what counts as free: what the engine holds already, or what the learner will free in time.

    Returns:
        A reason; None if there is room.
    """
    import torch

    free, total = torch.cuda.mem_get_info()
    missing = share * total - free - spare_bytes
    if missing <= 0:
        return None
    return f"an engine of {share} of {total / GIB:.0f} GiB would lack {missing / GIB:.1f} GiB beside the optimizer"
