"""Decide from names and shapes alone what is quantized, what is copied and which shard each tensor goes to."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from qarl_formats import QuantFormat
from qarl_nemo import names
from qarl_nemo.architecture import CONFIG_FILE, Architecture
from qarl_nemo.checkpoints.content import content_problems, drop_reason
from qarl_nemo.checkpoints.reader import Checkpoint, TensorInfo
from qarl_nemo.checkpoints.shapes import shape_problems, stored_bytes
from qarl_nemo.checkpoints.split_channels import Splitting, plan_splitting

DEFAULT_MAX_SHARD_BYTES = 2**30
_QUANTIZED_SUFFIXES = (
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
    ".input_scale",
    ".qweight",
    ".qzeros",
    ".scales",
)
_KEPT = {
    "router": "the router stays BF16",
    "shared_experts": "shared experts are never quantized",
    "norm": "not a linear layer",
    "embedding": "not a linear layer",
    "lm_head": "lm_head stays BF16",
    "other": "not a linear layer this tool knows",
}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One source tensor and what becomes of it.

    Attributes:
        info: the source tensor.
        kind: target or other kind of the module that owns it.
        quantized: whether it is stored in the plan's format; else its numbers are, in `dtype`.
        reason: why.
        shape: its shape in the output.
        num_bytes: size in the output, scales included.
        dtype: safetensors' name of the dtype in which a tensor that is not quantized is stored: the source's, of which
            every bit is copied, or BF16 where the whole output is.
        fused: the other source tensors with which it shares a scale, if the format has one for weights that engines
            fuse.
    """

    info: TensorInfo
    kind: str
    quantized: bool
    reason: str
    shape: tuple[int, ...]
    num_bytes: int
    dtype: str
    fused: tuple[TensorInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One output file.

    Attributes:
        file: its name.
        tensors: source tensors written into it, in order.
    """

    file: str
    tensors: tuple[PlannedTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """The whole conversion, decided before anything is written.

    Attributes:
        checkpoint: the source, without what is dropped.
        fmt: format of the quantized tensors.
        targets: what is quantized, in canonical order.
        max_shard_bytes: limit of one output file; a single larger tensor gets a file of its own.
        shards: the output files.
        dropped: source tensor that no engine reads -> why it is left out.
        splitting: which MLPs get more channels; None: none.
    """

    checkpoint: Checkpoint
    fmt: QuantFormat
    targets: tuple[str, ...]
    max_shard_bytes: int
    shards: tuple[PlannedShard, ...]
    dropped: dict[str, str] = field(default_factory=dict)
    splitting: Splitting | None = None

    @property
    def tensors(self) -> Iterator[PlannedTensor]:
        """Every tensor in output order."""
        return (tensor for shard in self.shards for tensor in shard.tensors)

    def source_files(self, shard: PlannedShard) -> list[str]:
        """Return the source's files that decide what a shard holds, sorted."""
        infos = {info.name: info for info in self.checkpoint.tensors}
        made_from = [info for tensor in shard.tensors for info in (tensor.info, *tensor.fused)]
        if self.splitting is not None:
            orders = [self.splitting.ordered_by(one.info.name, one.kind, one.info.shape) for one in shard.tensors]
            made_from += [infos[name] for name in orders if name]
        return sorted({file for info in made_from for file in info.files})

    @property
    def num_bytes(self) -> int:
        """Size of all output tensors in bytes."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def source_bytes(self) -> int:
        """Size of all source tensors in bytes."""
        return sum(info.num_bytes for info in self.checkpoint.tensors)


def plan_quantization(
    checkpoint: Checkpoint,
    fmt: QuantFormat,
    targets: Sequence[str],
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    split_channels: float | None = None,
) -> QuantizePlan:
    """Plan a conversion; the same inputs always give the same plan.

    Args:
        checkpoint: the source, from `open_checkpoint`.
        fmt: format of the quantized tensors.
        targets: what to quantize or split, out of `names.TARGETS`.
        max_shard_bytes: limit of one output file.
        split_channels: least share of the inner channels of targeted MLPs that become pairs; None: none.

    Raises:
        ValueError: the conversion cannot give a checkpoint vLLM serves; every problem is listed with every name.
    """
    targets = names.check_targets(targets)
    architecture = Architecture.parse(checkpoint.config, str(checkpoint.companions / CONFIG_FILE))
    found = {info.name: drop_reason(info.name, architecture) for info in checkpoint.tensors}
    dropped = {name: reason for name, reason in found.items() if reason}
    checkpoint = replace(checkpoint, tensors=tuple(info for info in checkpoint.tensors if info.name not in dropped))
    problems = [] if max_shard_bytes >= 1 else [f"max_shard_bytes={max_shard_bytes} must be at least 1"]
    quantized = _quantized_problems(checkpoint)
    problems += quantized or content_problems(checkpoint.tensors, architecture)
    splitting = None if split_channels is None else _splitting(split_channels, architecture, fmt, targets, problems)
    problems += _tensor_problems(checkpoint, fmt, targets, splitting)
    # Nothing else depends on the targets of a conversion that neither quantizes nor splits.
    needed = not quantized and (fmt.is_quantized or split_channels is not None)
    problems += _target_problems(checkpoint, targets) if needed else []
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        verb = "quantize" if fmt.is_quantized else "convert"
        raise ValueError(f"cannot {verb} {checkpoint.folder} to {fmt.name}:\n{listed}")
    fused = _fused(checkpoint) if fmt.tensor_scaled else {}
    tensors = [_plan_tensor(info, fmt, targets, splitting, fused.get(info.name, ())) for info in checkpoint.tensors]
    shards = _into_shards(tensors, max_shard_bytes)
    return QuantizePlan(checkpoint, fmt, targets, max_shard_bytes, shards, dropped, splitting)


def _splitting(
    share: float, architecture: Architecture, fmt: QuantFormat, targets: Sequence[str], problems: list[str]
) -> Splitting | None:
    widths = {"experts": architecture.moe_intermediate_size, "mlp": architecture.intermediate_size}
    try:
        return plan_splitting(share, {target: widths[target] for target in targets if widths.get(target)}, fmt)
    except ValueError as error:
        problems.append(str(error))
        return None


def _quantized_problems(checkpoint: Checkpoint) -> list[str]:
    quantized = [
        info.name
        for info in checkpoint.tensors
        if info.name.endswith(_QUANTIZED_SUFFIXES) or info.dtype.startswith(("F8_", "F6_", "F4"))
    ]
    if checkpoint.config.get("quantization_config") is None and not quantized:
        return []
    if not quantized and checkpoint.companions != checkpoint.folder:
        return [
            f"--hf-model {checkpoint.companions} is quantized (its config.json says so), and what is converted is not; "
            "name the BF16 model's folder, of which only config.json and tokenizer are read"
        ]
    where = f" (tensors {names.summarize_names(quantized, 8)})" if quantized else " (config.json says so)"
    return [f"the source is already quantized{where}; start from the BF16 checkpoint"]


def _shape(info: TensorInfo, splitting: Splitting | None) -> tuple[int, ...]:
    return splitting.shape(info.name, names.tensor_kind(info.name), info.shape) if splitting else info.shape


def _tensor_problems(
    checkpoint: Checkpoint, fmt: QuantFormat, targets: tuple[str, ...], splitting: Splitting | None
) -> list[str]:
    by_problem: dict[str, list[str]] = {}
    for info in checkpoint.tensors:
        target = names.target_of(info.name)
        if target not in targets:
            continue
        for problem in shape_problems(info.name, target, _shape(info, splitting), fmt):
            by_problem.setdefault(problem, []).append(info.name)
    biases = [info.name for info in checkpoint.tensors if info.name.endswith(".bias")]
    dropped = [name for name in biases if names.tensor_kind(name) in targets]
    if fmt.vllm.drops_bias and dropped:
        kinds = ", ".join(sorted({names.tensor_kind(name) for name in dropped}))
        problem = (
            f"vLLM's {fmt.name} kernel leaves the bias of a quantized layer out; take w4a16 or w8a16, or no {kinds}"
        )
        by_problem[problem] = dropped
    return [f"{problem}: {names.summarize_names(offending)}" for problem, offending in by_problem.items()]


def _target_problems(checkpoint: Checkpoint, targets: tuple[str, ...]) -> list[str]:
    counts = Counter(names.target_of(info.name) for info in checkpoint.tensors)
    unmatched = [target for target in targets if not counts[target]]
    if not unmatched:
        return []
    present = [target for target in names.TARGETS if counts[target]]
    found = ", ".join(f"{target} ({counts[target]} weights)" for target in present)
    fix = f"; set --targets {','.join(present)}" if present else ""
    return [
        f"targets that match no weight: {', '.join(unmatched)}; legal targets are {', '.join(names.TARGETS)}, and this "
        f"model has {found or 'none of them'}{fix}"
    ]


def _fused(checkpoint: Checkpoint) -> dict[str, tuple[TensorInfo, ...]]:
    infos = {info.name: info for info in checkpoint.tensors}
    groups = names.fused_groups(infos)
    return {name: tuple(infos[other] for other in group if other != name) for group in groups for name in group}


def _plan_tensor(
    info: TensorInfo,
    fmt: QuantFormat,
    targets: tuple[str, ...],
    splitting: Splitting | None,
    fused: tuple[TensorInfo, ...],
) -> PlannedTensor:
    kind = names.tensor_kind(info.name)
    target, shape = names.target_of(info.name), _shape(info, splitting)
    if target and not fmt.is_quantized:
        reason = f"format {fmt.name} quantizes nothing"
    elif target not in targets:
        reason = _KEPT.get(kind) or ("not a target" if target else "not a weight matrix")
    else:
        return PlannedTensor(info, kind, True, f"target {target}", shape, stored_bytes(shape, fmt), info.dtype, fused)
    # config.json will say bfloat16, and an output without a format has nothing else to go by.
    stored = replace(info, shape=shape, dtype=info.dtype if fmt.is_quantized else "BF16")
    return PlannedTensor(info, kind, False, reason, shape, stored.num_bytes, stored.dtype)


def _into_shards(tensors: list[PlannedTensor], max_shard_bytes: int) -> tuple[PlannedShard, ...]:
    groups: list[list[PlannedTensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.num_bytes > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(tensor)
        room -= tensor.num_bytes
    count = len(groups)
    return tuple(
        PlannedShard(f"model-{number:05d}-of-{count:05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, 1)
    )
