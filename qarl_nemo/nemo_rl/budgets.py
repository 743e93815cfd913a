"""The largest budgets that fit a run's GPUs: tokens of a micro-batch, and the engine's share of a GPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any

from qarl_nemo.memory import (
    ASLEEP_BYTES,
    ENGINE_BYTES,
    GIB,
    MAX_TOKENS,
    OVERHEAD_BYTES,
    largest_budget,
    logprob_bytes,
    rank_memory,
)
from qarl_nemo.nemo_rl.layout import read_layout, responses_per_step
from qarl_nemo.nemo_rl.layout_memory import Needed, card, learner_of
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.model_shapes import read_model_size

_LONGEST = "policy.max_total_sequence_length"
_SHORT = 1024
# Rows of a rank: with so many, launching takes a sixth to a quarter of a layer (docs/evidence/megatron_cost.md).
_PLENTY = 32768
# Phase -> its keys: tokens of a micro-batch, or responses if a run neither packs nor batches dynamically.
_KEYS = {
    "update": ("train_mb_tokens", "train_micro_batch_size"),
    "logprobs": ("logprob_mb_tokens", "logprob_batch_size"),
}


@dataclass(frozen=True)
class Budget:
    """A key that bounds micro-batches.

    Attributes:
        key: its dotted name.
        trains: whether its micro-batches have a backward.
        value: what the config says, tokens or responses.
        needed: bytes of tensors that a learner rank holds at the phase's peak.
        room: bytes that it may hold.
        sequence: the longest sequence that fits alone; 0 if none does.
        largest: the largest value that fits, if it can hold a response; else 0.
        useful: the value that takes all that a rank has; a larger one changes nothing.
        plenty: the value from which a larger one saves little.
    """

    key: str
    trains: bool
    value: int
    needed: float
    room: float
    sequence: int
    largest: int
    useful: int
    plenty: int

    @property
    def fits(self) -> bool:
        """Whether the config's value fits."""
        return self.needed <= self.room

    @property
    def most(self) -> int:
        """The largest value that fits and changes anything."""
        return min(self.largest, self.useful) if self.useful else self.largest


def token_budgets(config: Mapping[str, Any], qarl: Any, *, optimizer_stays: bool) -> list[Budget]:
    """Compute which micro-batches fit.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without `layout_conflicts`.
        qarl: its checked `NemoQarlConfig`.
        optimizer_stays: whether the optimizer stays on the GPU while engines generate and until the update.

    Returns:
        The update's budget and that of log-probabilities; none if the `cluster` block or the model's config.json is
        missing.
    """
    layout, model = read_layout(config), read_model_size(config)
    if layout is None or model is None:
        return []
    learner = learner_of(config, qarl)
    # Beside engines with GPUs of their own nothing has to leave before rollouts.
    stays = optimizer_stays or not layout.colocated
    held = stays and not look_up(config, "policy.offload_optimizer_for_logprob", False)
    peaks: dict[str, Callable[[int], float]] = {
        "update": lambda tokens: rank_memory(model, layout.ranks, replace(learner, tokens=tokens)).peak_bytes,
        "logprobs": lambda tokens: logprob_bytes(model, layout.ranks, replace(learner, tokens=tokens), optimizer=held),
    }
    responses = {"update": look_up(config, "policy.train_global_batch_size", 0), "logprobs": responses_per_step(config)}
    room = card(qarl).gib * GIB - OVERHEAD_BYTES - (ASLEEP_BYTES if layout.colocated else 0)
    longest, found = look_up(config, _LONGEST, None) or _SHORT, []
    plenty = _PLENTY * layout.sizes["tp"] * layout.sizes["cp"]
    for phase, peak in peaks.items():
        key, unit = _key(config, phase)
        value = look_up(config, key, None)
        if isinstance(value, int) and value > 0:
            useful = responses[phase] // layout.data_parallel * longest
            tokens = largest_budget(peak, room) or 0
            largest = tokens // unit if tokens >= longest else 0
            needed = peak(min(value * unit, useful or MAX_TOKENS, MAX_TOKENS))
            trains = phase == "update"
            found.append(Budget(key, trains, value, needed, room, tokens, largest, useful // unit, plenty // unit))
    return found


def smallest_engine(needed: Needed, config: Mapping[str, Any]) -> float:
    """Compute an engine's weights and its cache of one response of the largest length.

    Args:
        needed: what GPUs will hold.
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        Bytes on each of its GPUs, less than it can run with.
    """
    return needed.engine + needed.token * (look_up(config, _LONGEST, None) or _SHORT)


def smallest_share(needed: Needed, gpu_bytes: float, config: Mapping[str, Any]) -> float:
    """Compute the smallest `gpu_memory_utilization` with which an engine has room for one response.

    Args:
        needed: what GPUs will hold.
        gpu_bytes: one GPU's memory.
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        A share with two decimals, rounded up; above 1 if the GPU is too small.
    """
    return ceil((smallest_engine(needed, config) + ENGINE_BYTES) / gpu_bytes * 100) / 100


def largest_share(needed: Needed, gpu_bytes: float, *, optimizer_stays: bool) -> float:
    """Compute the largest `gpu_memory_utilization` beside what else the GPU holds.

    Args:
        needed: what GPUs will hold.
        gpu_bytes: one GPU's memory.
        optimizer_stays: whether the optimizer stays there; parameters leave if they have to and can.

    Returns:
        A share with two decimals, rounded down; negative if the learner alone is too large. An engine with GPUs of its
        own leaves room for the update that arrives there.
    """
    held = needed.arriving
    if needed.refit is not None:
        held = OVERHEAD_BYTES + needed.kept + (needed.learner.parts["optimizer"] if optimizer_stays else 0.0)
    return floor((1 - held / gpu_bytes) * 100) / 100


def waiting_answers(needed: Needed, share: float, gpu_bytes: float, config: Mapping[str, Any]) -> tuple[int, int]:
    """Compute how many answers an engine's cache holds at once, of how many it gets.

    Args:
        needed: what GPUs will hold.
        share: the engine's `gpu_memory_utilization`.
        gpu_bytes: one GPU's memory.
        config: the whole NeMo-RL config, as nested dictionaries, with a `cluster` block.

    Returns:
        Answers of the largest length that fit; answers of a step for each engine.
    """
    layout = read_layout(config)
    assert layout is not None, "without a cluster block nothing is needed"
    cache = share * gpu_bytes - needed.engine - ENGINE_BYTES
    longest = look_up(config, _LONGEST, None) or _SHORT
    return max(0, int(cache // (needed.token * longest))), responses_per_step(config) // layout.engines


def _key(config: Mapping[str, Any], phase: str) -> tuple[str, int]:
    """Return a phase's key, and how many tokens one of its units is."""
    tokens, responses = _KEYS[phase]
    for kind in ("sequence_packing", "dynamic_batching"):
        if look_up(config, f"policy.{kind}.enabled", False):
            return f"policy.{kind}.{tokens}", 1
    return f"policy.{responses}", look_up(config, _LONGEST, None) or 8192
