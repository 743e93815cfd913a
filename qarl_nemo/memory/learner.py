"""GPU memory of a Megatron learner's rank, computed: bytes of tensors on the fullest one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from qarl_formats import (
    DEFAULT_FORMAT,
    WIDE_NAMES,
    QuantFormat,
    find_format,
    get_format,
    served_formats,
    why_impossible,
)
from qarl_nemo.memory.model_size import ModelSize
from qarl_nemo.memory.units import BF16, FP32
from qarl_nemo.parallelism import Parallelism

PARTS = ("weights", "gradients", "optimizer", "packed", "activations", "working", "logits")
MAX_TOKENS = 2**24
_STEP = 1024
Recompute = Literal["none", "full"]
# Bytes per parameter beside its BF16 weight and its gradient: FP32 master and two moments; the master's other 16 bits
# and two BF16 moments; master and momentum, SGD's or a hidden matrix's; nothing, as the state is in the host's memory.
OPTIMIZERS = {"adam": 12.0, "adam_bf16": 6.0, "muon": 8.0, "offloaded": 0.0}
_CHUNK_BYTES = 28  # of a logit while its chunk is computed: NeMo-RL 7ea279ab, nemo_rl/distributed/model_utils.py


@dataclass(frozen=True)
class Learner:
    """What a learner holds and computes.

    Attributes:
        format: the executed format, such as `w4a16`; None for Megatron's own BF16.
        group_size: elements per scale of integer formats.
        targets: what is quantized; of `experts` and `mlp` a model has one.
        keep_operand: whether it keeps what GEMMs multiply.
        optimizer: one of `OPTIMIZERS`.
        gradient_bytes: bytes of one gradient element: 4 (FP32) or 2.
        tokens: tokens of a microbatch, before tensor- and context-parallel ranks share them.
        recompute: `full` keeps only a layer's input.
        logits: whether to count them: `tokens` x vocabulary in BF16, FP32 and FP32 gradient.
        logprob_chunk: tokens whose logits are FP32 at a time (NeMo-RL's `logprob_chunk_size`); None: all at once.
        busiest: rows that the busiest rank's experts get, over the mean.
        nested_in: the finer format whose codes it stores; None: the format's own.
        optimizer_whole: whether every data parallel rank holds all of the state, rather than its share.
        precision_aware: whether Adam takes BF16 gradients as they are; Muon takes FP32 copies.
        kronecker: whether each matrix [M, N] outside embedding and head also has SOAP's four square ones in FP32, a
            factor and its eigenvectors for each side.
        leaves_to_adam: whether Muon leaves embedding, head, norms and routers to Adam; SGD has one momentum of all.
        sequence_parallel: whether tensor parallel ranks share what lies between attention and MLP.
        embedded: whether it is the learner of `qarl train`, whose built-in sampler serves formats that no run's vLLM
            does, too.
    """

    format: str | None = DEFAULT_FORMAT
    group_size: int = 128
    targets: tuple[str, ...] = ("experts", "mlp")
    keep_operand: bool = False
    optimizer: str = "adam"
    gradient_bytes: int = FP32
    tokens: int = 8192
    recompute: Recompute = "none"
    logits: bool = True
    busiest: float = 1.0
    logprob_chunk: int | None = None
    nested_in: str | None = None
    optimizer_whole: bool = False
    precision_aware: bool = True
    kronecker: bool = False
    leaves_to_adam: bool = True
    sequence_parallel: bool = True
    embedded: bool = False

    def __post_init__(self) -> None:
        fmt = find_format(self.format or "")
        group_sizes = fmt.group_sizes if fmt and fmt.group_sizes else (self.group_size,)
        problems = [
            f"unknown {name} {value!r}; legal: {', '.join(map(str, legal))}"
            for name, value, legal in (
                ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
                ("recompute", self.recompute, get_args(Recompute)),
                ("gradient_bytes", self.gradient_bytes, (FP32, BF16)),
                ("group_size", self.group_size, group_sizes),
            )
            if value not in legal
        ]
        for name, count in (("tokens", self.tokens), ("logprob_chunk", self.logprob_chunk)):
            if count is not None and not 1 <= count <= MAX_TOKENS:
                problems.append(f"{name}={count} is not from 1 to {MAX_TOKENS}")
        legal = served_formats("cuda") + (WIDE_NAMES if self.embedded else ())
        if self.format not in (None, *legal):
            known = find_format(self.format or "")
            wrong = "vLLM serves no run in format" if known else "unknown format"
            problems.append(f"{wrong} {self.format!r}{why_impossible(self.format or '')}; legal: {', '.join(legal)}")
        elif self.format is not None:
            try:
                get_format(self.format, nested_in=self.nested_in)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def record(self) -> QuantFormat | None:
        """What is known of the format; None for Megatron's own BF16."""
        if self.format is None:
            return None
        fmt = get_format(self.format, nested_in=self.nested_in)
        return replace(fmt, group_size=self.group_size) if fmt.group_sizes else fmt


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by purpose.

    Attributes:
        parts: `weights`, `gradients`, `optimizer`, `packed`, `activations`, `working`, `logits`.
        step: what the optimizer's step needs beside what is held between steps, when activations and packed weights
            are gone.
    """

    parts: Mapping[str, float]
    step: float = 0.0

    @property
    def static_bytes(self) -> float:
        """What is held between steps."""
        return sum(self.parts[name] for name in ("weights", "gradients", "optimizer", "packed"))

    @property
    def peak_bytes(self) -> float:
        """The most that is held in a step: logits are freed before a layer's backward needs its working memory."""
        return self.static_bytes + max(self._backward, self._step)

    @property
    def step_decides(self) -> bool:
        """Whether the peak is the optimizer's step, which copies gradients to FP32, and not the backward."""
        return self._step > self._backward

    @property
    def fp32_gradients_help(self) -> bool:
        """Whether the peak would be lower with FP32 gradients, twice as large, of which a step makes no copies."""
        return self._step > self.parts["gradients"] + self._backward

    @property
    def _step(self) -> float:
        return self.step - self.parts["packed"]

    @property
    def _backward(self) -> float:
        return self.parts["activations"] + max(self.parts["working"], self.parts["logits"])


def rank_memory(model: ModelSize, ranks: Parallelism, learner: Learner) -> Memory:
    """Compute the memory of the fullest rank.

    Returns:
        Bytes by purpose.
    """
    experts, dense = rank_parameters(model, ranks)
    layers = ranks.stage_layers(model.num_layers)
    linears = {target: layers * count / _shares(ranks)[target] for target, count in model.linears.items()}
    activations, working = _activations(model, ranks, learner, layers)
    optimizer, step = _optimizer_bytes(model, ranks, learner)
    return Memory(
        {
            "weights": BF16 * (experts + dense),
            "gradients": learner.gradient_bytes * (experts + dense),
            "optimizer": optimizer,
            "packed": _cache_bytes(learner) * sum(linears[target] for target in learner.targets),
            "activations": activations,
            "working": working,
            "logits": _logits_bytes(model, ranks, learner) if learner.logits else 0.0,
        },
        step,
    )


def rank_parameters(model: ModelSize, ranks: Parallelism) -> tuple[float, float]:
    """Count the parameters of the fullest rank.

    Args:
        model: its sizes.
        ranks: how GPUs share it.

    Returns:
        Those of experts, and all others.
    """
    layers, shares = ranks.stage_layers(model.num_layers), _shares(ranks)
    linears = {target: layers * count / shares[target] for target, count in model.linears.items()}
    return linears["experts"], linears["attention"] + linears["mlp"] + _no_hidden_matrices(model, ranks)


def largest_budget(peak_bytes: Callable[[int], float], room: float) -> int | None:
    """Find the largest micro-batch that fits.

    Args:
        peak_bytes: bytes that a rank holds at the peak, by the tokens of a micro-batch; grows with them.
        room: bytes that it may hold.

    Returns:
        Tokens, a multiple of 1024; None if not even 1024 fit.
    """
    low, high = 0, MAX_TOKENS // _STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak_bytes(middle * _STEP) <= room else (low, middle - 1)
    return low * _STEP or None


def logprob_bytes(model: ModelSize, ranks: Parallelism, learner: Learner, *, optimizer: bool) -> float:
    """Compute what the fullest rank holds while it computes log-probabilities, when its gradients are gone.

    Args:
        model: its sizes.
        ranks: how GPUs share it.
        learner: what it holds and computes; `tokens` are those of this phase's micro-batches.
        optimizer: whether the optimizer's state is on the GPU.

    Returns:
        Bytes of tensors at the peak.
    """
    held = rank_memory(model, ranks, learner).parts
    static = held["weights"] + held["packed"] + (held["optimizer"] if optimizer else 0.0)
    vocabulary, tokens = model.vocab_size / ranks.tp, learner.tokens / ranks.cp
    # BF16 logits; in FP32 the logits, what their maximum leaves, and its exponentials.
    chunk = min(learner.logprob_chunk or tokens, tokens)
    logits = (BF16 * tokens + 3 * FP32 * chunk) * vocabulary
    # One layer runs at a time, and keeps no more than it does for a backward.
    layer, _ = _layer_bytes(model, ranks, learner)
    return static + max(logits if learner.logits else 0.0, layer)


def _no_hidden_matrices(model: ModelSize, ranks: Parallelism) -> float:
    """Count a rank's parameters of embedding, head, norms and routers, which Muon leaves to Adam."""
    # The first stage has the embedding, the last one the head; without pipelines one rank has both.
    tables = 1 if model.tied_head or ranks.pp > 1 else 2
    small = ranks.stage_layers(model.num_layers) * model.small_parameters + model.hidden
    return tables * model.vocab_size * model.hidden / ranks.tp + small


def _optimizer_bytes(model: ModelSize, ranks: Parallelism, learner: Learner) -> tuple[float, float]:
    """Return what an optimizer holds between its steps, and what a step needs beside it."""
    experts, dense = rank_parameters(model, ranks)
    shards = (1, 1) if learner.optimizer_whole else (ranks.expert_optimizer_shards, ranks.optimizer_shards)
    stepped = experts / shards[0] + dense / shards[1]
    held = OPTIMIZERS[learner.optimizer] * stepped
    if learner.optimizer == "muon" and learner.leaves_to_adam:
        # Adam has a second moment of them.
        held += FP32 * _no_hidden_matrices(model, ranks) / shards[1]
    if learner.kronecker:
        squares = _squared_sides(model, ranks)
        held += 2 * FP32 * (squares[0] / shards[0] + squares[1] / shards[1])
    copies = learner.optimizer == "muon" or (learner.optimizer == "adam" and not learner.precision_aware)
    if not copies or learner.gradient_bytes == FP32:
        return held, 0.0
    # Megatron makes all of them before it steps a parameter. What was measured beside them is as much as the largest
    # table takes in FP32.
    return held, FP32 * (stepped + model.vocab_size * model.hidden / ranks.tp / shards[1])


def _squared_sides(model: ModelSize, ranks: Parallelism) -> tuple[float, float]:
    """Sum M^2 + N^2 over a rank's parts of experts' matrices [M, N], and over those of attention, MLP and router."""
    queries, keys, parts = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim, _shares(ranks)
    inner = model.inner / (ranks.etp if model.num_experts else parts["mlp"])
    block = 5 * inner**2 + 2 * model.hidden**2
    attention = ((queries + 2 * keys) ** 2 + queries**2) / parts["attention"] ** 2 + 2 * model.hidden**2
    router = model.num_experts**2 + model.hidden**2 if model.num_experts else 0
    layers = ranks.stage_layers(model.num_layers)
    return layers * model.num_experts / ranks.ep * block, layers * (attention + (router or block))


def _shares(ranks: Parallelism) -> dict[str, int]:
    return {"experts": ranks.ep * ranks.etp, "attention": ranks.tp, "mlp": ranks.tp}


def _cache_bytes(learner: Learner) -> float:
    fmt = learner.record
    if fmt is None:
        return 0.0
    return stored_bytes(fmt) + (fmt.operand_bytes if learner.keep_operand else 0)


def stored_bytes(fmt: QuantFormat) -> float:
    """Return the bytes of one quantized parameter, its share of scales included."""
    return fmt.bits_per_weight / 8


def _logits_bytes(model: ModelSize, ranks: Parallelism, learner: Learner) -> float:
    vocabulary, tokens = model.vocab_size / ranks.tp, learner.tokens / ranks.cp
    if learner.logprob_chunk is None:
        return (BF16 + 2 * FP32) * tokens * vocabulary
    # BF16 logits and their gradient; of a chunk also FP32 logits, probabilities and gradient, and an int64 one-hot.
    return 2 * BF16 * tokens * vocabulary + _CHUNK_BYTES * min(learner.logprob_chunk, tokens) * vocabulary


def _activations(model: ModelSize, ranks: Parallelism, learner: Learner, layers: int) -> tuple[float, float]:
    layer, working = _layer_bytes(model, ranks, learner)
    # The first pipeline stage has run as many microbatches ahead as there are stages.
    if learner.recompute == "none":
        return ranks.pp * layers * layer, working
    # A layer is computed again when the logits are gone.
    return ranks.pp * layers * BF16 * _shared_tokens(ranks, learner) * model.hidden, layer + working


def _shared_tokens(ranks: Parallelism, learner: Learner) -> float:
    return learner.tokens / ranks.cp / (ranks.tp if learner.sequence_parallel else 1)


def _layer_bytes(model: ModelSize, ranks: Parallelism, learner: Learner) -> tuple[float, float]:
    """Return what a layer saves for its backward, and what that needs beside it."""
    tokens, shared = learner.tokens / ranks.cp / ranks.tp, _shared_tokens(ranks, learner)
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # What is saved: the layer's input and its norm; q, k and v before and after norm and rotation; attention's output;
    # the second norm's input and output.
    layer = BF16 * (shared * 4 * model.hidden + tokens * (2 * (queries + keys) + keys + queries))
    layer += shared * FP32 * 2 * model.num_experts
    # Of a norm's output an aligned linear keeps all tokens, which Megatron's own gathers again.
    aligned = [target for target in ("attention", "mlp") if target in learner.targets and model.linears[target]]
    layer += BF16 * (tokens * ranks.tp - shared) * model.hidden * (len(aligned) if learner.format else 0)
    # Gradients of the layer's output, input and residuals.
    working = BF16 * shared * 4 * model.hidden
    if model.num_experts:
        rows = tokens * model.top_k * ranks.etp * learner.busiest
        fmt = learner.record if "experts" in learner.targets else None
        inner = model.inner / ranks.etp
        # Rows and fc1's output; Megatron's own layer keeps fc2's input, too.
        layer += BF16 * rows * (model.hidden + (2 if fmt else 3) * inner)
        # Gradients of the output rows and of SwiGLU's output and input, its weighted output, gradients of the rows.
        working += BF16 * rows * (2 * model.hidden + 4 * inner)
        if fmt and _is_unpacked(learner, fmt):
            working += BF16 * model.expert_parameters / (ranks.ep * ranks.etp)
    else:
        layer += BF16 * tokens * 3 * model.inner
        working += BF16 * _mlp_backward(model, ranks, learner, tokens)
    return layer, working


def _mlp_backward(model: ModelSize, ranks: Parallelism, learner: Learner, tokens: float) -> float:
    """Count what the backward of a dense MLP holds at once: at SwiGLU, or at fc1 behind it."""
    fmt = learner.record if "mlp" in learner.targets else None
    gradients = 2 * tokens * model.inner
    # The weight that ran, unpacked, and its gradient, before this is added to the others.
    weights = 0 if fmt is None else 1 + _is_unpacked(learner, fmt)
    fc1 = 2 * model.inner * model.hidden / ranks.tp
    return gradients + max(tokens * model.inner, weights * fc1)


def _is_unpacked(learner: Learner, fmt: QuantFormat) -> bool:
    """Tell whether the backward multiplies by a BF16 copy that it makes of the weight that ran."""
    return fmt.is_quantized and not (learner.keep_operand and fmt.operand_bytes == BF16)
