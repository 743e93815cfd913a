"""The record of one number format: its arithmetic, its storage, and how vLLM 0.25.1 serves it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Literal

WeightKind = Literal["int", "nvfp4", "int8_rows", "fp8_rows", "fp8_blocks", "plain"]
ActivationKind = Literal["none", "fp8_token", "fp8_group", "int8_token"]
ScaleConvention = Literal["narrow_range", "full_range", "clipped_range"]
RouterWeight = Literal["rounded_product", "scaled_product", "weighted_sum", "on_accumulator"]
Storage = Literal["pack-quantized", "nvfp4-pack-quantized", "int-quantized", "float-quantized", "fp8"]
Role = Literal["experts_in", "experts_out", "linear"]

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Kernel:
    """How vLLM multiplies one kind of layer.

    Attributes:
        method: class of the layer's quantization method, `/` and its scheme's class where there is one, and what tells
            widths apart that share a class.
        backend: engine argument that chooses, on a GPU, the kernel whose arithmetic the learner follows; None: vLLM
            has one kernel, or chooses a followed one by itself.
        choices: without a `backend`, the argument's values with which vLLM runs a followed kernel; empty: no value of
            it matters.
        followed: kernels, by vLLM's names, whose arithmetic the learner follows on a GPU; empty: vLLM names none, or
            all have the same arithmetic.
        mended: whether it quantizes activations only where this package extends vLLM's workers.
        adapters: whether an engine with low-rank adapters, on whichever layers, runs it.
    """

    method: str
    backend: str | None = None
    choices: tuple[str, ...] = ()
    followed: tuple[str, ...] = ()
    mended: bool = False
    adapters: bool = True

    @property
    def backends(self) -> tuple[str, ...]:
        """The argument's values with which vLLM runs a followed kernel; empty: any."""
        return (self.backend,) if self.backend else self.choices


@dataclass(frozen=True, slots=True)
class OnDevice:
    """What vLLM's kernels for one kind of device serve of a format.

    Attributes:
        experts_method: class of the experts' method, where it is not the one of a GPU.
        group_sizes: group sizes that they take, ascending; empty where the format has no choice.
        experts_only: no other layer is served.
    """

    experts_method: str | None = None
    group_sizes: tuple[int, ...] = ()
    experts_only: bool = False

    def serves(self, group_size: int, targets: Sequence[str]) -> bool:
        """Return whether a group size (0: none) and targets are served."""
        fits = not self.group_sizes or group_size in self.group_sizes
        return fits and (not self.experts_only or tuple(targets) == ("experts",))


@dataclass(frozen=True, slots=True)
class VllmKernels:
    """How vLLM 0.25.1 serves a format.

    A weight [N, K] has to have multiples of these sizes on one GPU, and K a multiple of the group size, too. Where vLLM
    fuses layers (q, k and v; gate and up), that is asked of each part.

    Attributes:
        experts: the layer of routed experts.
        linear: every other quantized layer.
        experts_in: multiples [N, K] of an expert's gate and up projections.
        experts_out: multiples of its down projection.
        linear_shape: multiples of other linears.
        capabilities: the first and the last compute capability of GPUs that serve it; None: those that vLLM runs on.
        custom_op: operator that has to be enabled for the learner's roundings; None: none.
        drops_bias: whether its kernel for other layers leaves out a bias.
        several_groups: whether experts no wider than one group are refused where the hidden size has several groups.
        linear_only: whether it has no kernel for routed experts.
        refits: whether a running engine takes new weights, as those of a run do; else it serves checkpoints only.
        cpu: what its CPU kernels serve; None: nothing.
    """

    experts: Kernel
    linear: Kernel
    experts_in: tuple[int, int] = (1, 1)
    experts_out: tuple[int, int] = (1, 1)
    linear_shape: tuple[int, int] = (1, 1)
    capabilities: tuple[tuple[int, int], tuple[int, int]] | None = None
    custom_op: str | None = None
    drops_bias: bool = False
    several_groups: bool = False
    linear_only: bool = False
    refits: bool = True
    cpu: OnDevice | None = None

    @property
    def shapes(self) -> dict[Role, tuple[int, int]]:
        """Multiples [N, K] by the kernel that multiplies the weight."""
        return {"experts_in": self.experts_in, "experts_out": self.experts_out, "linear": self.linear_shape}


@dataclass(frozen=True, slots=True)
class OtherStorage:
    """How other tools store the same numbers, which is read and never written.

    Attributes:
        storage: what `config.json` calls it.
        scales: suffix of its scales, and of ours.
        experts: vLLM's method for experts stored so, as in `Kernel.method`; its kernels are the format's own.
        linear: that for other layers.
    """

    storage: Storage
    scales: tuple[str, str]
    experts: str
    linear: str


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """How one format stores weights and rounds activations, and who serves it.

    Attributes:
        name: the format's name in configs and tables.
        weight_kind: the arithmetic of the stored representation.
        activation_kind: how the GEMM's input is quantized.
        num_bits: bits of one stored weight, without its share of a scale.
        router_weight: where the engine multiplies an expert's output by its router weight: `rounded_product`, both
            rounded to BF16; `scaled_product`, the same with the weight times the expert's scale; `weighted_sum`, in the
            sum over experts; `on_accumulator`, before the output is rounded.
        storage: what `config.json` calls the stored form; None where nothing is quantized.
        other_storage: a second form in which checkpoints are read; None: there is none.
        group_size: elements per scale along K; 0 where rows or nothing is scaled.
        group_sizes: those that a user may choose from; empty: there is no choice.
        scale_rows: rows that share a scale.
        scale_bits: bits of a group's or block's scale; 0 where a whole row has one.
        row_scaled: a scale that GEMMs apply spans a whole row of K: a shard of the row would get another scale.
        tensor_scaled: a scale spans a whole weight and those that engines fuse with it (q, k and v; gate and up).
        grid_bits: integer grids only: bits of the grid that codes lie on, `num_bits` or fewer of them.
        nested_bits: integer grids only: bits of the finer codes that the learner stores and publishes, and that are
            rounded to `grid_bits` where they are multiplied or served; 0 where codes are stored as they are served.
        scale_convention: integer grids only: `narrow_range` is amax/(2^(b-1)-1) on the symmetric grid, `full_range`
            amax/((2^b-1)/2) on the whole two's-complement grid, `clipped_range` amax/2^(b-1) on the same, where the
            largest positive weight loses a step.
        fuses_bias: the engine adds a dense layer's bias to the FP32 sum, and rounds once; else to the rounded product.
        operand_bytes: bytes a weight of what GEMMs multiply, where that is not the stored tensors; 0 where it is.
        vllm: how vLLM 0.25.1 serves it.
    """

    name: str
    weight_kind: WeightKind
    activation_kind: ActivationKind
    num_bits: int
    router_weight: RouterWeight
    storage: Storage | None
    group_size: int = 0
    group_sizes: tuple[int, ...] = ()
    scale_rows: int = 1
    scale_bits: int = 0
    row_scaled: bool = False
    tensor_scaled: bool = False
    grid_bits: int = 0
    nested_bits: int = 0
    scale_convention: ScaleConvention | None = None
    fuses_bias: bool = False
    operand_bytes: int = 0
    vllm: VllmKernels = field(repr=False, kw_only=True)
    other_storage: OtherStorage | None = field(default=None, repr=False)

    @property
    def is_quantized(self) -> bool:
        """Whether weights are stored in fewer bits than BF16 has."""
        return self.weight_kind != "plain"

    @property
    def weights_rows(self) -> bool:
        """Whether router weights are multiplied where the experts are, and not where their outputs are summed."""
        return self.router_weight in ("on_accumulator", "scaled_product")

    @property
    def stores_shape(self) -> bool:
        """Whether a checkpoint holds a packed weight's `weight_shape`, which its words do not tell."""
        return self.storage == "pack-quantized"

    @property
    def code_bits(self) -> int:
        """Bits of one code as the learner stores and publishes it."""
        return self.nested_bits or self.num_bits

    @property
    def published_name(self) -> str:
        """Name of the format that published tensors are in: another one's where codes are nested."""
        return f"w{self.nested_bits}a16" if self.nested_bits else self.name

    @property
    def narrowed(self) -> "QuantFormat":
        """What engines and quantized checkpoints hold of it: codes that are rounded already."""
        return replace(self, nested_bits=0)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, scales of groups and blocks included."""
        return self.code_bits + (self.scale_bits / (self.group_size * self.scale_rows) if self.scale_bits else 0.0)

    def served_on(self, device: str) -> OnDevice | None:
        """Return what a run's vLLM engines serve of this format on `cpu` or `cuda`; None: nothing."""
        if not self.vllm.refits:
            return None
        if device == "cpu":
            return self.vllm.cpu
        return OnDevice(group_sizes=tuple(sorted(self.group_sizes)))

    def runs_beside_adapters(self, targets: Sequence[str]) -> bool:
        """Return whether vLLM runs this format's kernels of these targets in an engine with low-rank adapters."""
        return "experts" not in targets or self.vllm.experts.adapters

    def multiples(self, role: Role) -> tuple[int, int]:
        """Return what N and K of a weight must be multiples of on one of vLLM's GPUs.

        Args:
            role: which of vLLM's kernels multiplies the weight.
        """
        rows, columns = self.vllm.shapes[role]
        return rows, lcm(columns, self.group_size or 1)
