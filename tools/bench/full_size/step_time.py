"""Seconds of a step's phases, computed from measurements of their parts on H200s.

rollout        a token of every sequence at a time: measured by the number of sequences, and what longer answers read
log-probs      layers x micro-batches x (launches + tokens), fitted to micro-batches of two sizes; and the vocabulary
update         likewise with recomputation, forward and backward; and the exchange of gradients and parameters
refit          publishing from the learner's ranks, and one engine's transfer
other          what a whole step was measured to spend beside these
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qarl_nemo.memory import ModelSize, Parallelism
from qarl_nemo.metrics.results import read_results

MEMORY_BYTES_S, PEAK_FLOPS_S = 4.8e12, 989e12
GEMM_SHARE = 0.6
"""Of the peak, in the GEMMs of the vocabulary."""
NETWORK_BYTES_S = 40e9
"""One GPU's share of its node's network: 400 Gbit/s at four fifths."""
# What NeMo-RL's log-probabilities in chunks read and write of an entry, counted in its source.
_LOGPROB_BYTES, _LOGPROB_BACKWARD_BYTES = 38, 110
_MEASURED_CONTEXT = 320
_SIZES = (8192, 32768)
_LAYERS = 48
OTHER = ("refit", "logprob_prep", "training_prep", "reward")


@dataclass(frozen=True)
class Launched:
    """Seconds of a layer and micro-batch: a + b x tokens."""

    fixed: float
    token: float

    @classmethod
    def through(cls, small: float, large: float) -> "Launched":
        """Fit both sizes that were measured, seconds of a layer and micro-batch."""
        token = (large - small) / (_SIZES[1] - _SIZES[0])
        return cls(small - token * _SIZES[0], token)

    def seconds(self, tokens: float) -> float:
        """Return the time of a micro-batch in one layer."""
        return self.fixed + self.token * tokens


@dataclass(frozen=True)
class Rates:
    """What was measured of one format.

    Attributes:
        decode: sequences -> seconds of one token of each, 48 layers.
        prefill: prompt tokens a second, 48 layers.
        forward: without gradients.
        training: forward and backward.
        refit_s: publication and one engine's refit, 48 layers.
        other_s: what a step spends beside its phases.
    """

    decode: Mapping[int, float]
    prefill: float
    forward: Launched
    training: Launched
    refit_s: float
    other_s: float

    @classmethod
    def read(cls, results: Path, arm: str, ep: int) -> "Rates":
        """Read them from docs/results.

        Args:
            results: the folder.
            arm: a format.
            ep: expert-parallel ranks; more than four count as four, the most that were measured.

        Returns:
            The rates; what a step spends beside its phases is `a24`'s for every arm.
        """
        files = ("vllm", "megatron", "full_size")
        found = [row for file in files for row in read_results(results / f"{file}.json")]
        rows = {row.name: row.value for row in found if "H200" in row.hardware}
        layout = f"ep{min(ep, 4)}"

        def fitted(what: str, micro_batches: int) -> Launched:
            # Two layers, in milliseconds.
            names = (f"{arm}_{what}_ms_{layout}_{_SIZES[0]}", f"{arm}_{what}_ms_{layout}")
            return Launched.through(*(rows[name] / 2e3 / micro_batches for name in names))

        spent = sum(rows[f"full_phase_s_{phase}_w4a16_a24"] for phase in OTHER)
        return cls(
            decode={size: size / rows[f"rollout_tokens_s_{arm}_b{size}"] for size in (32, 128, 512)},
            prefill=rows[f"rollout_prefill_tokens_s_{arm}_b32"],
            forward=fitted("forward", 1),
            training=fitted("forward_backward", 2),
            refit_s=rows[f"publish_update_s_{arm}_ep4"] + rows[f"refit_{arm}_ipc_s"],
            other_s=spent - rows["full_refit_s_w4a16_a24"],
        )


@dataclass(frozen=True)
class Workload:
    """A step's work and its GPUs; engines have one GPU each, and ranks hold whole layers outside the experts.

    Attributes:
        gpus: the learner's, which the engines share.
        ep: expert-parallel ranks.
        responses: answers of a step.
        prompt: tokens of a prompt.
        shortest: tokens of the shortest answer; lengths are spread evenly between it and `longest`.
        longest: tokens of the longest answer.
        updates: optimizer steps.
        train_tokens: tokens of the update's micro-batches.
        logprob_tokens: tokens of the log-probabilities' micro-batches.
        gpus_per_node: expert-parallel ranks are of one node, data-parallel ones of several.
    """

    gpus: int
    ep: int
    responses: int
    prompt: int
    shortest: int
    longest: int
    updates: int
    train_tokens: int
    logprob_tokens: int
    gpus_per_node: int = 8

    @property
    def tokens(self) -> float:
        """Prompt and answer tokens of a step."""
        return self.responses * (self.prompt + (self.shortest + self.longest) / 2)

    @property
    def ranks(self) -> Parallelism:
        """The learner's layout."""
        return Parallelism(self.gpus, ep=self.ep)


def phases(model: ModelSize, rates: Rates, work: Workload) -> dict[str, float]:
    """Compute a step's phases.

    Args:
        model: its sizes.
        rates: what was measured of its format.
        work: the step's work.

    Returns:
        Seconds of `rollout`, `prev_logprobs`, `update`, `refit` and `other`.
    """
    share = model.num_layers / _LAYERS
    forward = _vocabulary_s(model, backward=False)
    training = _vocabulary_s(model, backward=True)
    per_gpu = work.tokens / work.gpus
    passes = (rates.forward.fixed + rates.training.fixed, rates.forward.token + rates.training.token)
    return {
        "rollout": _rollout_s(model, rates, work),
        "prev_logprobs": _layers_s(model, rates.forward, per_gpu, work.logprob_tokens) + per_gpu * forward,
        "update": work.updates
        * (
            _layers_s(model, Launched(*passes), per_gpu / work.updates, work.train_tokens)
            + per_gpu / work.updates * training
            + _exchange_s(model, work)
        ),
        "refit": rates.refit_s * share,
        "other": rates.other_s,
    }


def _layers_s(model: ModelSize, cost: Launched, tokens: float, budget: int) -> float:
    micro_batches = math.ceil(tokens / budget)
    return model.num_layers * micro_batches * cost.seconds(tokens / micro_batches)


def _vocabulary_s(model: ModelSize, *, backward: bool) -> float:
    """Return the seconds of a token's logits and log-probability."""
    multiplied, moved = 2 * model.vocab_size * model.hidden, model.vocab_size * _LOGPROB_BYTES
    if backward:
        multiplied, moved = 3 * multiplied, moved + model.vocab_size * _LOGPROB_BACKWARD_BYTES
    return multiplied / (GEMM_SHARE * PEAK_FLOPS_S) + moved / MEMORY_BYTES_S


def _rollout_s(model: ModelSize, rates: Rates, work: Workload) -> float:
    share, answers = model.num_layers / _LAYERS, work.responses // work.gpus
    gap = (work.longest - work.shortest) / max(1, answers - 1)
    lengths = [round(work.shortest + gap * index) for index in range(answers)]
    seconds, done = answers * work.prompt * share / rates.prefill, 0
    for ended, length in enumerate(lengths):
        running, context = answers - ended, work.prompt + (done + length) / 2 - _MEASURED_CONTEXT
        token = _interpolated(rates.decode, running) * share + running * context * model.cache_bytes / MEMORY_BYTES_S
        seconds, done = seconds + (length - done) * token, length
    return seconds


def _interpolated(measured: Mapping[int, float], size: int) -> float:
    """Return the line through two neighbours; below the smallest size, its time."""
    sizes: Sequence[int] = sorted(measured)
    if size <= sizes[0]:
        return measured[sizes[0]]
    right = next((place for place in range(1, len(sizes)) if size <= sizes[place]), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    return measured[low] + (measured[high] - measured[low]) * (size - low) / (high - low)


def _exchange_s(model: ModelSize, work: Workload) -> float:
    """Return the seconds in which gradients are reduced and parameters gathered over nodes, BF16, not overlapped."""
    experts = model.num_layers * model.expert_parameters / work.ep
    dense = model.num_parameters - model.num_layers * model.expert_parameters
    moved = 0.0
    for parameters, ranks in ((experts, work.gpus // work.ep), (dense, work.gpus)):
        if work.gpus > work.gpus_per_node:
            moved += 2 * 2 * parameters * (ranks - 1) / ranks
    return moved / NETWORK_BYTES_S
