"""GPU memory of a Megatron learner's rank, computed: which model fits on which GPUs, before anything is started.

All sizes are bytes of tensors on the fullest rank. What tensors do not account for (CUDA's context, NCCL's buffers,
fragmentation) is `OVERHEAD_BYTES`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from qarl_formats import BASELINE, DEFAULT_FORMAT, QuantFormat, find_format, get_format, served_formats
from qarl_nemo.architecture import MEGATRON_FAMILIES, read_architecture
from qarl_nemo.files import FileError
from qarl_nemo.parallelism import Parallelism

BF16, FP32 = 2, 4
GIB = 2**30
OVERHEAD_BYTES = 4 * GIB
_CHUNK_BYTES = 28  # of a logit while its chunk is computed: NeMo-RL 7ea279ab, nemo_rl/distributed/model_utils.py
PARTS = ("weights", "gradients", "optimizer", "packed", "activations", "working", "logits")

MAX_TOKENS = 2**24
_LOOKED_AT = 1025
Recompute = Literal["none", "full"]
# Bytes per parameter beside its BF16 weight and its gradient: FP32 master and two moments; the master's other 16 bits
# and two BF16 moments; master and momentum; nothing, because the state is in the host's memory.
OPTIMIZERS = {"adam": 12.0, "adam_bf16": 6.0, "muon": 8.0, "offloaded": 0.0}


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a Qwen3, Qwen3-MoE or Qwen2 model that memory depends on; a model without experts is dense."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    inner: int
    num_experts: int = 0
    top_k: int = 0
    tied_head: bool = False

    @classmethod
    def read(cls, path: Path) -> "ModelSize":
        """Read a Hugging Face folder, or its config.json.

        Args:
            path: folder or file.

        Returns:
            The model's sizes.

        Raises:
            FileError: no readable config.json of a supported model, or its layers are not alike.
        """
        model = read_architecture(path, MEGATRON_FAMILIES)
        dense = model.num_hidden_layers - len(model.sparse_layers)
        if model.num_experts and dense:
            raise FileError(
                f"{path}: {dense} of {model.num_hidden_layers} layers have no experts (mlp_only_layers, "
                "decoder_sparse_step); memory is computed for layers that are alike"
            )
        return cls(
            num_layers=model.num_hidden_layers,
            hidden=model.hidden_size,
            num_heads=model.num_attention_heads,
            num_kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            vocab_size=model.vocab_size,
            inner=model.moe_intermediate_size or model.intermediate_size,
            num_experts=model.num_experts,
            top_k=model.num_experts_per_tok,
            tied_head=model.tie_word_embeddings,
        )

    @property
    def expert_parameters(self) -> int:
        """Parameters of one layer's experts."""
        return self.num_experts * 3 * self.inner * self.hidden

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's four projections."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden

    @property
    def mlp_parameters(self) -> int:
        """Parameters of a dense layer's MLP."""
        return 0 if self.num_experts else 3 * self.inner * self.hidden

    @property
    def small_parameters(self) -> int:
        """Parameters of one layer that no rank splits: norms and router."""
        return 2 * self.hidden + 2 * self.head_dim + self.num_experts * self.hidden

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        layer = self.expert_parameters + self.attention_parameters + self.mlp_parameters + self.small_parameters
        return self.num_layers * layer + (1 if self.tied_head else 2) * self.vocab_size * self.hidden + self.hidden


@dataclass(frozen=True)
class Learner:
    """What a learner holds and computes.

    Attributes:
        format: the executed format, such as `w4a16`; None for Megatron's own BF16.
        group_size: elements per scale of integer formats.
        attention: whether attention is quantized, too.
        keep_operand: whether it keeps what GEMMs multiply.
        optimizer: one of `OPTIMIZERS`.
        gradient_bytes: bytes of one gradient element: 4 (FP32) or 2.
        tokens: tokens of a microbatch, before tensor- and context-parallel ranks share them.
        recompute: `full` keeps only a layer's input.
        logits: whether to count them: `tokens` x vocabulary in BF16, FP32 and FP32 gradient.
        logprob_chunk: tokens whose logits are FP32 at a time (NeMo-RL's `logprob_chunk_size`); None: all at once.
        busiest: rows that the busiest rank's experts get, over the mean.
    """

    format: str | None = DEFAULT_FORMAT
    group_size: int = 128
    attention: bool = False
    keep_operand: bool = False
    optimizer: str = "adam"
    gradient_bytes: int = FP32
    tokens: int = 8192
    recompute: Recompute = "none"
    logits: bool = True
    busiest: float = 1.0
    logprob_chunk: int | None = None

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
        if problems:
            raise ValueError("; ".join(problems))
        if self.format not in (None, *(legal := served_formats("cuda"))):
            raise ValueError(f"unknown format {self.format!r}; legal: {', '.join(legal)}")

    @property
    def record(self) -> QuantFormat | None:
        """What is known of the format; None for Megatron's own BF16."""
        if self.format is None:
            return None
        fmt = get_format(self.format)
        return replace(fmt, group_size=self.group_size) if fmt.group_sizes else fmt


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by purpose.

    Attributes:
        parts: `weights`, `gradients`, `optimizer`, `packed`, `activations`, `working`, `logits`.
    """

    parts: Mapping[str, float]

    @property
    def static_bytes(self) -> float:
        """What is held between steps."""
        return sum(self.parts[name] for name in ("weights", "gradients", "optimizer", "packed"))

    @property
    def peak_bytes(self) -> float:
        """The most that is held in a step: logits are freed before a layer's backward needs its working memory."""
        return self.static_bytes + self.parts["activations"] + max(self.parts["working"], self.parts["logits"])

    def fits(self, gpu_bytes: float) -> bool:
        """Return whether it fits on a GPU of this size, with `OVERHEAD_BYTES` to spare."""
        return self.peak_bytes + OVERHEAD_BYTES <= gpu_bytes


def rank_memory(model: ModelSize, ranks: Parallelism, learner: Learner) -> Memory:
    """Compute the memory of the fullest rank.

    Args:
        model: its sizes.
        ranks: how GPUs share it.
        learner: what it holds and computes.

    Returns:
        Bytes by purpose.
    """
    layers = -(-model.num_layers // ranks.pp)
    experts = layers * model.expert_parameters / (ranks.ep * ranks.etp)
    targeted_attention = layers * model.attention_parameters / ranks.tp
    # The first stage has the embedding, the last one the head; without pipelines one rank has both.
    tables = 1 if model.tied_head or ranks.pp > 1 else 2
    mlp = layers * model.mlp_parameters / ranks.tp
    dense = targeted_attention + mlp + layers * model.small_parameters
    dense += tables * model.vocab_size * model.hidden / ranks.tp + model.hidden
    state = OPTIMIZERS[learner.optimizer]
    activations, working = _activations(model, ranks, learner, layers)
    return Memory(
        {
            "weights": BF16 * (experts + dense),
            "gradients": learner.gradient_bytes * (experts + dense),
            "optimizer": state * (experts / ranks.expert_optimizer_shards + dense / ranks.optimizer_shards),
            "packed": _cache_bytes(learner) * (experts + mlp + (targeted_attention if learner.attention else 0)),
            "activations": activations,
            "working": working,
            "logits": _logits_bytes(model, ranks, learner) if learner.logits else 0.0,
        }
    )


def served_bytes(model: ModelSize, served: Learner) -> float:
    """Compute the weights of one rollout engine.

    Args:
        model: its sizes.
        served: the engine's format, group size and targets.

    Returns:
        Bytes, on all of the engine's GPUs together.
    """
    per_layer = model.expert_parameters + model.mlp_parameters
    per_layer += model.attention_parameters if served.attention else 0
    quantized = model.num_layers * per_layer
    packed = _stored_bytes(served.record or get_format(BASELINE))
    return packed * quantized + BF16 * (model.num_parameters - quantized)


def refit_bytes(
    model: ModelSize,
    ranks: Parallelism,
    learner: Learner,
    engine_tp: int,
    *,
    layerwise: bool,
    served: Learner | None = None,
    optimizer_stays: bool = False,
) -> float:
    """Compute what a GPU holds during a refit of the engine beside the learner, whose gradients are gone.

    Args:
        model: its sizes.
        ranks: how GPUs share the learner.
        learner: what it executes.
        engine_tp: GPUs that share one engine.
        layerwise: one layer of the update is held at a time; else all of it.
        served: what the engine serves, if it is not what the learner executes.
        optimizer_stays: whether the optimizer is not offloaded.

    Returns:
        Bytes of the learner's BF16 and packed weights, of its optimizer if that stays, of the engine's weights and of
        the update; the engine's KV cache is asleep.
    """
    whole = served_bytes(model, served or learner)
    held = rank_memory(model, ranks, learner).parts
    update = max(whole / model.num_layers, BF16 * model.vocab_size * model.hidden) if layerwise else whole
    optimizer = held["optimizer"] if optimizer_stays else 0.0
    return held["weights"] + held["packed"] + optimizer + whole / engine_tp + update


def layouts(model: ModelSize, num_gpus: int) -> list[Parallelism]:
    """Return layouts to choose from: one to four tensor-parallel ranks, and experts over as many ranks as possible.

    Args:
        model: its sizes.
        num_gpus: GPUs that share it.

    Returns:
        Layouts without pipeline, context or expert tensor parallelism.

    Raises:
        ValueError: there is none; names the nearest numbers of GPUs that have one.
    """
    Parallelism(num_gpus)  # refuses numbers that are none
    found = _layouts(model, num_gpus)
    if not found:
        counts = [count for count in range(1, _LOOKED_AT) if _layouts(model, count)]
        near = sorted(sorted(counts, key=lambda count: abs(count - num_gpus))[:3])
        raise ValueError(
            f"num_gpus={num_gpus}: no layout puts {model.num_experts} experts on 4, 8, 16, 32 or {num_gpus} ranks that "
            f"divide them and the GPUs; numbers of GPUs that have layouts: {', '.join(map(str, near))}. Others are "
            "named with a layout: dp, or tp, pp, cp, ep and etp with their sizes, e.g. tp2_ep8"
        )
    return found


def require_layout(model: ModelSize, ranks: Parallelism) -> None:
    """Require that a layout splits a model evenly.

    Args:
        model: its sizes.
        ranks: how GPUs share it.

    Raises:
        ValueError: it does not; names every wrong size and what it has to divide.
    """
    needed = [
        ("tp", ranks.tp, "attention heads", model.num_heads),
        ("tp", ranks.tp, "key-value heads", model.num_kv_heads),
        ("pp", ranks.pp, "layers", model.num_layers),
    ]
    if model.num_experts:
        needed += [("ep", ranks.ep, "experts", model.num_experts), ("etp", ranks.etp, "rows of an expert", model.inner)]
    else:
        needed += [("tp", ranks.tp, "rows of the MLP", model.inner)]
    problems = [f"{name}={size} does not divide {count} {what}" for name, size, what, count in needed if count % size]
    if not model.num_experts and ranks.ep * ranks.etp > 1:
        problems.append("ep and etp share experts, which this model does not have")
    if problems:
        raise ValueError(f"layout {ranks.name}: " + "; ".join(problems))


def require_targets(model: ModelSize, targets: Sequence[str]) -> None:
    """Require that a model has what is to be quantized.

    Args:
        model: its sizes.
        targets: names out of `names.TARGETS`.

    Raises:
        ValueError: it lacks some; names those it has.
    """
    legal = ("experts", "attention") if model.num_experts else ("mlp", "attention")
    wrong = [target for target in targets if target not in legal]
    if wrong or not targets:
        raise ValueError(f"targets {', '.join(wrong) or '(none)'}: this model has {', '.join(legal)}")


def _layouts(model: ModelSize, num_gpus: int) -> list[Parallelism]:
    found = []
    for tp in (1, 2, 4):
        if num_gpus % tp or model.num_heads % tp or model.num_kv_heads % tp:
            continue
        sizes = [size for size in (4, 8, 16, 32, num_gpus) if num_gpus % size == 0 and not model.num_experts % size]
        found += [Parallelism(num_gpus, tp=tp, ep=ep) for ep in sorted(set(sizes))] if model.num_experts else []
        found += [] if model.num_experts else [Parallelism(num_gpus, tp=tp)]
    return found


def _cache_bytes(learner: Learner) -> float:
    fmt = learner.record
    if fmt is None:
        return 0.0
    return _stored_bytes(fmt) + (fmt.operand_bytes if learner.keep_operand else 0)


def _stored_bytes(fmt: QuantFormat) -> float:
    return fmt.bits_per_weight / 8


def _logits_bytes(model: ModelSize, ranks: Parallelism, learner: Learner) -> float:
    vocabulary, tokens = model.vocab_size / ranks.tp, learner.tokens / ranks.cp
    if learner.logprob_chunk is None:
        return (BF16 + 2 * FP32) * tokens * vocabulary
    # BF16 logits and their gradient; of a chunk also FP32 logits, probabilities and gradient, and an int64 one-hot.
    return 2 * BF16 * tokens * vocabulary + _CHUNK_BYTES * min(learner.logprob_chunk, tokens) * vocabulary


def _activations(model: ModelSize, ranks: Parallelism, learner: Learner, layers: int) -> tuple[float, float]:
    # Sequence-parallel ranks share the activations between attention and MLP.
    tokens = learner.tokens / ranks.cp / ranks.tp
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # What is saved: the layer's input and its norm; q, k and v before and after norm and rotation; attention's output;
    # the second norm's input and output.
    attention = BF16 * (4 * model.hidden + 2 * (queries + keys) + keys + queries)
    layer = tokens * (attention + FP32 * 2 * model.num_experts)
    # Gradients of the layer's output, input and residuals.
    working = BF16 * tokens * 4 * model.hidden
    if model.num_experts:
        rows = tokens * model.top_k * ranks.etp * learner.busiest
        inner = model.inner / ranks.etp
        # Rows and fc1's output; Megatron's own layer keeps fc2's input, too.
        layer += BF16 * rows * (model.hidden + (2 if learner.format else 3) * inner)
        # Gradients of the output rows and of SwiGLU's output and input, its weighted output, gradients of the rows.
        working += BF16 * rows * (2 * model.hidden + 4 * inner)
        fmt = learner.record
        if fmt and fmt.is_quantized and not (learner.keep_operand and fmt.operand_bytes == BF16):
            # The backward multiplies by the weight that ran, unpacked to BF16.
            working += BF16 * model.expert_parameters / (ranks.ep * ranks.etp)
    else:
        layer += BF16 * tokens * ranks.tp * 3 * model.inner / ranks.tp
    # The first pipeline stage has run as many microbatches ahead as there are stages.
    if learner.recompute == "none":
        return ranks.pp * layers * layer, working
    return ranks.pp * layers * BF16 * tokens * model.hidden + layer, working
