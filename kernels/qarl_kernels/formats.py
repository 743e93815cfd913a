"""The format record: what is stored, how activations are rounded, and where the engine applies the router weight.

| name          | weights                          | activations   | router weight        |
|---------------|----------------------------------|---------------|----------------------|
| `w4a16`       | int4, BF16 scale per group       | BF16          | `rounded_product`    |
| `w4a8`        | the same checkpoint              | FP8 per token | `weighted_sum`       |
| `fp8_channel` | E4M3, FP32 scale per row         | FP8 per token | `weighted_sum`       |
| `fp8_block`   | E4M3, FP32 scale per 128x128     | FP8 per 1x128 | `on_accumulator`     |
| `bf16`        | BF16                             | BF16          | `on_accumulator`     |

`w2a16`, `w3a16`, `w5a16` .. `w8a16` share the integer arithmetic for experiments; no rollout kernel of vLLM 0.25.1
serves them.
"""

import re
from dataclasses import dataclass
from typing import Literal

WeightKind = Literal["int", "fp8_channel", "fp8_block", "bf16"]
ActivationKind = Literal["none", "fp8_token", "fp8_group"]
ScaleConvention = Literal["narrow_range", "full_range"]
RouterWeight = Literal["rounded_product", "weighted_sum", "on_accumulator"]

FORMAT_NAMES = ("w4a16", "w4a8", "fp8_block", "fp8_channel", "bf16")
SCALE_CONVENTIONS = ("narrow_range", "full_range")
# By measured error (docs/design/formats.md); also what compressed-tensors and llm-compressor write.
DEFAULT_SCALE_CONVENTION: ScaleConvention = "full_range"
FP8_BLOCK = 128
_GROUP_SIZES = {"w4a16": (128, 64, 32), "w4a8": (128,)}
_EXPERIMENTAL = re.compile(r"w([2-8])a16")


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """How one format stores weights and rounds activations.

    Attributes:
        name: the format's name in configs and tables.
        weight_kind: the stored representation.
        activation_kind: how the GEMM's input is quantized.
        num_bits: bits of one stored weight.
        group_size: elements per scale along K (`int`), the block edge (`fp8_block`), else 0.
        scale_convention: integer grids only: `narrow_range` is amax/(2^(b-1)-1) on the symmetric grid, `full_range`
            amax/((2^b-1)/2) on the whole two's-complement grid.
        router_weight: where the engine multiplies an expert's output by its router weight.
        served_by_vllm: whether vLLM 0.25.1 has a rollout kernel for it.
    """

    name: str
    weight_kind: WeightKind
    activation_kind: ActivationKind
    num_bits: int
    group_size: int
    scale_convention: ScaleConvention | None
    router_weight: RouterWeight
    served_by_vllm: bool

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, scales included."""
        if self.weight_kind == "int":
            return 32 / (32 // self.num_bits) + 16 / self.group_size
        if self.weight_kind == "fp8_block":
            return 8 + 32 / FP8_BLOCK**2
        return float(self.num_bits)


def get_format(
    name: str, *, group_size: int | None = None, scale_convention: ScaleConvention | None = None
) -> QuantFormat:
    """Return the format called `name`, its options filled with the format's defaults.

    Args:
        name: one of `FORMAT_NAMES`, or an experimental `w{2..8}a16`.
        group_size: elements per scale along K; integer formats only, None = 128.
        scale_convention: integer formats only, None = `DEFAULT_SCALE_CONVENTION`.

    Returns:
        The format's record.

    Raises:
        ValueError: the name is unknown, or an option is not legal for it; every problem is listed.
    """
    experimental = _EXPERIMENTAL.fullmatch(name)
    if name not in FORMAT_NAMES and not experimental:
        raise ValueError(
            f"unknown format {name!r}; legal: {', '.join(FORMAT_NAMES)} (experimental: w2a16 .. w8a16 with any bits)"
        )
    if name == "w4a8" or experimental:
        return _integer_format(name, group_size, scale_convention)
    if group_size is not None or scale_convention is not None:
        options = {"group_size": group_size, "scale_convention": scale_convention}
        given = {key: value for key, value in options.items() if value is not None}
        wrong, fix = (
            ", ".join(pattern.format(*item) for item in given.items()) for pattern in ("{}={}", "qarl.{}=null")
        )
        raise ValueError(
            f"format {name!r} takes no {wrong}: only integer formats (w4a16, w4a8) have these; leave it out, in a "
            f"config {fix}"
        )
    if name == "fp8_block":
        return QuantFormat(name, "fp8_block", "fp8_group", 8, FP8_BLOCK, None, "on_accumulator", True)
    if name == "fp8_channel":
        return QuantFormat(name, "fp8_channel", "fp8_token", 8, 0, None, "weighted_sum", True)
    return QuantFormat(name, "bf16", "none", 16, 0, None, "on_accumulator", True)


def _integer_format(name: str, group_size: int | None, scale_convention: ScaleConvention | None) -> QuantFormat:
    group_size = 128 if group_size is None else group_size
    scale_convention = scale_convention or DEFAULT_SCALE_CONVENTION
    legal = _GROUP_SIZES.get(name, _GROUP_SIZES["w4a16"])
    problems = []
    if group_size not in legal:
        problems.append(f"group_size={group_size} (legal for {name}: {', '.join(map(str, legal))})")
    if scale_convention not in SCALE_CONVENTIONS:
        problems.append(f"scale_convention={scale_convention!r} (legal: {', '.join(SCALE_CONVENTIONS)})")
    if problems:
        raise ValueError(f"format {name!r} cannot take {'; '.join(problems)}; null, in a config, takes the default")
    token_wise = name == "w4a8"
    return QuantFormat(
        name=name,
        weight_kind="int",
        activation_kind="fp8_token" if token_wise else "none",
        num_bits=int(name[1]),
        group_size=group_size,
        scale_convention=scale_convention,
        router_weight="weighted_sum" if token_wise else "rounded_product",
        served_by_vllm=name in FORMAT_NAMES,
    )
