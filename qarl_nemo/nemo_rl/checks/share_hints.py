"""Hints about an engine's share of a GPU: a smaller one that lets the optimizer stay, or a larger one for answers."""

from collections.abc import Mapping
from math import floor
from typing import Any

from qarl_nemo.memory import GIB
from qarl_nemo.nemo_rl.budgets import largest_share, waiting_answers
from qarl_nemo.nemo_rl.engine_room import CACHE, UTILIZATION
from qarl_nemo.nemo_rl.layout_memory import Needed, card, needed_memory
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.residency import OFFLOAD, fits_beside_engine, fits_beside_logprobs

# vLLM's own default.
_USUAL_SHARE = 0.9
# Of what a learner leaves by computation. PyTorch's reserve is not computed: in rollouts it was 13 GiB more than what
# was allocated (docs/evidence/full_size_memory.md), a sixth of a GPU of 80 GB.
_CAREFUL = 0.8
# Answers at once below which an engine would decode too slowly for what an optimizer that stays saves.
_FEW = 4


def share_hints(needed: Needed, config: Mapping[str, Any], qarl: Any) -> list[str]:
    """Say which other share of a GPU lets the optimizer stay there, or holds many more answers.

    Args:
        needed: what GPUs will hold.
        config: the whole NeMo-RL config, as nested dictionaries, without conflicts, as it was before `apply_qarl`.
        qarl: its checked `NemoQarlConfig`, `resident` resolved.

    Returns:
        No line, or one: key, value, what it costs, and what to set. A share that lets the optimizer stay comes first,
        because a larger one leads away from it.
    """
    share = look_up(config, UTILIZATION, None)
    if not isinstance(share, float) or look_up(config, CACHE, None) is not None:
        return []
    hint = _smaller_share(share, needed, config, qarl) or _larger_share(share, needed, config, qarl)
    return [hint] if hint else []


def _smaller_share(share: float, needed: Needed, config: Mapping[str, Any], qarl: Any) -> str | None:
    # What the config said; the checked block's `resident` is what came of it.
    automatic = look_up(config, "qarl.resident", "auto") == "auto" and look_up(config, OFFLOAD, None) is None
    staying = needed_memory(config, qarl, optimizer_stays=True)
    if qarl.resident or not automatic or staying is None or needed.refit is None:
        return None
    gpu_bytes, optimizer = card(qarl).gib * GIB, staying.learner.parts["optimizer"]
    most = largest_share(staying, gpu_bytes, optimizer_stays=True)
    fits = fits_beside_engine(staying, most, gpu_bytes) and fits_beside_logprobs(config, qarl)
    if not optimizer or share <= most or not fits:
        return None
    now, wanted = waiting_answers(needed, share, gpu_bytes, config)
    then, _ = waiting_answers(staying, most, gpu_bytes, config)
    if then < max(1, min(_FEW, wanted)):
        return None
    return (
        f"{UTILIZATION}={share}: {optimizer / GIB:.1f} GiB of the optimizer go to the host and back in each step; with "
        f"at most {most} they stay by computation, which leaves PyTorch's reserve out (the cache then holds {then} "
        f"answer(s) of the largest length at once, now {now})"
    )


def _larger_share(share: float, needed: Needed, config: Mapping[str, Any], qarl: Any) -> str | None:
    gpu_bytes = card(qarl).gib * GIB
    # An optimizer that stays counts as left on the GPU, so no larger share sends it away.
    left = largest_share(needed, gpu_bytes, optimizer_stays=qarl.resident)
    most = min(left if needed.refit is None else floor(_CAREFUL * left * 100) / 100, _USUAL_SHARE)
    now, wanted = waiting_answers(needed, share, gpu_bytes, config)
    then, _ = waiting_answers(needed, most, gpu_bytes, config)
    if most <= share or now >= wanted or then < 2 * now:
        return None
    return (
        f"{UTILIZATION}={share}: an engine's cache holds {now} answer(s) of the largest length at once, of the "
        f"{wanted} that it gets; with {most} it holds {then} by computation. Go half of the way first, and look at "
        "train/qarl/memory in the run's metrics"
    )
