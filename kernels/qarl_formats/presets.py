"""The formats, one record each, and the lookup of a record by its name.

| name          | weights                      | activations    | router weight     |
|---------------|------------------------------|----------------|-------------------|
| `w4a16`       | int4, BF16 scale per group   | BF16           | `rounded_product` |
| `w4a8`        | the same checkpoint          | FP8 per token  | `weighted_sum`    |
| `fp8_block`   | E4M3, FP32 scale per 128x128 | FP8 per 1x128  | `on_accumulator`  |
| `fp8_channel` | E4M3, FP32 scale per row     | FP8 per token  | `weighted_sum`    |
| `int8`        | INT8, FP32 scale per row     | INT8 per token | `on_accumulator`  |
| `nvfp4`       | E2M1, E4M3 scale per 16      | BF16           | `scaled_product`  |
| `w8a16`       | int8, BF16 scale per group   | BF16           | `rounded_product` |
| `bf16`        | BF16                         | BF16           | `on_accumulator`  |

`w3a16` and `w2a16` are `w4a16` with codes on a grid of 3 or 2 bits: stored, served and multiplied as int4, or in their
own width. `w5a16` .. `w7a16` have their own width only. Of vLLM 0.25.1's kernels Humming's alone take such widths: they
serve checkpoints of dense layers, and no run's engine.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace

from qarl_formats.record import (
    BF16_BYTES,
    Kernel,
    OnDevice,
    OtherStorage,
    QuantFormat,
    ScaleConvention,
    VllmKernels,
)

SCALE_CONVENTIONS = ("narrow_range", "full_range", "clipped_range")
# The formats whose codes others may round: eight bits, of which 4 and 2 are whole parts.
NESTING = {"w8a16": 8}
FP8_BLOCK = 128
# Follows the name of a method of vLLM that serves scales of rows and of blocks in one class, where it has blocks.
BLOCKS = f" of {FP8_BLOCK}x{FP8_BLOCK} blocks"


def codes_of(num_bits: int) -> str:
    """Return what follows the name of a method of vLLM that serves several widths in one class; nothing for 4 bits."""
    return "" if num_bits == 4 else f" of {num_bits}-bit codes"


def _weight_only(num_bits: int, vllm: VllmKernels) -> QuantFormat:
    return QuantFormat(
        name=f"w{num_bits}a16",
        weight_kind="int",
        activation_kind="none",
        num_bits=num_bits,
        grid_bits=num_bits,
        router_weight="rounded_product",
        storage="pack-quantized",
        group_size=128,
        group_sizes=(128, 64, 32),
        scale_bits=16,
        # By measured error up to 4 bits (docs/design/formats.md), and what compressed-tensors and llm-compressor write.
        scale_convention="full_range",
        operand_bytes=BF16_BYTES,
        vllm=vllm,
    )


def _marlin(num_bits: int, cpu: OnDevice | None = None) -> VllmKernels:
    codes = codes_of(num_bits)
    return VllmKernels(
        experts=Kernel(f"CompressedTensorsWNA16MarlinMoEMethod{codes}", backend="marlin", followed=("MARLIN",)),
        # vLLM takes Machete on Hopper where it takes the shape and the group size, else Marlin: the same products.
        linear=Kernel(
            f"CompressedTensorsLinearMethod/CompressedTensorsWNA16{codes}",
            choices=("auto", "machete", "marlin"),
            followed=("MacheteLinearKernel", "MarlinLinearKernel"),
        ),
        experts_in=(32, 128),
        experts_out=(128, 32),
        linear_shape=(64, 128),
        several_groups=True,
        cpu=cpu,
    )


def _humming(num_bits: int) -> VllmKernels:
    # vLLM's last resort among its kernels for integer weights of dense layers: it takes any width, and compiles itself
    # when a model is loaded. Its routed experts take 4 and 8 bits only.
    return VllmKernels(
        experts=Kernel("no method of vLLM 0.25.1"),
        linear=Kernel(
            f"CompressedTensorsLinearMethod/CompressedTensorsWNA16{codes_of(num_bits)}",
            followed=("HummingLinearKernel",),
        ),
        linear_shape=(32, 32),
        drops_bias=True,
        linear_only=True,
        # Nobody has seen what a reload does to the layout that it makes of a checkpoint's tensors.
        refits=False,
    )


_W4A16 = _weight_only(4, _marlin(4, cpu=OnDevice("CompressedTensorsWNA16MoEMethod", group_sizes=(64, 128))))
_W8A16 = _weight_only(8, _marlin(8))
_W4A8 = replace(
    _W4A16,
    name="w4a8",
    activation_kind="fp8_token",
    router_weight="weighted_sum",
    group_sizes=(128,),
    # The engine re-encodes the group scales to FP8 under one scale per row.
    row_scaled=True,
    operand_bytes=1,
    vllm=VllmKernels(
        experts=Kernel("CompressedTensorsW4A8Fp8MoEMethod", followed=("CUTLASS",), adapters=False),
        linear=Kernel(
            "CompressedTensorsLinearMethod/CompressedTensorsW4A8Fp8",
            choices=("auto", "cutlass"),
            followed=("CutlassW4A8LinearKernel",),
        ),
        experts_in=(256, 256),
        experts_out=(256, 256),
        linear_shape=(128, 128),
        capabilities=((9, 0), (9, 0)),
        # A reciprocal would round the experts' FP8 scales differently from the learner's division.
        custom_op="+quant_fp8",
    ),
)
_FP8_BLOCK = QuantFormat(
    name="fp8_block",
    weight_kind="fp8_blocks",
    activation_kind="fp8_group",
    num_bits=8,
    router_weight="on_accumulator",
    storage="fp8",
    group_size=FP8_BLOCK,
    scale_rows=FP8_BLOCK,
    scale_bits=32,
    other_storage=OtherStorage(
        storage="float-quantized",
        scales=("weight_scale", "weight_scale_inv"),
        experts=f"CompressedTensorsW8A8Fp8MoEMethod{BLOCKS}",
        linear=f"CompressedTensorsLinearMethod/CompressedTensorsW8A8Fp8{BLOCKS}",
    ),
    vllm=VllmKernels(
        experts=Kernel("Fp8MoEMethod", backend="triton", followed=("TRITON",)),
        linear=Kernel("Fp8LinearMethod", backend="cutlass"),
        experts_in=(128, 128),
        experts_out=(128, 128),
        linear_shape=(128, 128),
        cpu=OnDevice(experts_only=True),
    ),
)
_FP8_CHANNEL = QuantFormat(
    name="fp8_channel",
    weight_kind="fp8_rows",
    activation_kind="fp8_token",
    num_bits=8,
    router_weight="weighted_sum",
    storage="float-quantized",
    row_scaled=True,
    fuses_bias=True,
    vllm=VllmKernels(
        # With adapters vLLM takes Triton in CUTLASS's place, which multiplies by the router weight elsewhere.
        experts=Kernel(
            "CompressedTensorsW8A8Fp8MoEMethod",
            choices=("auto", "cutlass", "triton"),
            followed=("VLLM_CUTLASS", "TRITON"),
            adapters=False,
        ),
        linear=Kernel(
            "CompressedTensorsLinearMethod/CompressedTensorsW8A8Fp8",
            choices=("auto", "cutlass"),
            followed=("CutlassFP8ScaledMMLinearKernel",),
        ),
        experts_in=(16, 16),
        experts_out=(16, 16),
        linear_shape=(16, 16),
    ),
)
_INT8 = QuantFormat(
    name="int8",
    weight_kind="int8_rows",
    activation_kind="int8_token",
    num_bits=8,
    router_weight="on_accumulator",
    storage="int-quantized",
    row_scaled=True,
    fuses_bias=True,
    vllm=VllmKernels(
        experts=Kernel("CompressedTensorsW8A8Int8MoEMethod", backend="triton", followed=("TRITON",), mended=True),
        linear=Kernel("CompressedTensorsLinearMethod/CompressedTensorsW8A8Int8", backend="cutlass"),
        experts_in=(16, 16),
        experts_out=(16, 16),
        linear_shape=(16, 16),
        # Turing to Hopper: Blackwell's tensor cores have no INT8 for CUTLASS.
        capabilities=((7, 5), (9, 0)),
    ),
)
_NVFP4 = QuantFormat(
    name="nvfp4",
    weight_kind="nvfp4",
    activation_kind="none",
    num_bits=4,
    router_weight="scaled_product",
    storage="nvfp4-pack-quantized",
    group_size=16,
    scale_bits=8,
    tensor_scaled=True,
    operand_bytes=BF16_BYTES,
    vllm=VllmKernels(
        experts=Kernel("CompressedTensorsW4A4Nvfp4MoEMethod", backend="marlin", followed=("MARLIN",)),
        linear=Kernel(
            "CompressedTensorsLinearMethod/CompressedTensorsW4A4Fp4",
            choices=("auto", "marlin"),
            followed=("MarlinNvFp4LinearKernel",),
        ),
        # Sizes that Marlin does not pad.
        experts_in=(64, 128),
        experts_out=(128, 64),
        linear_shape=(64, 128),
    ),
)
_BF16 = QuantFormat(
    name="bf16",
    weight_kind="plain",
    activation_kind="none",
    num_bits=16,
    router_weight="on_accumulator",
    storage=None,
    fuses_bias=True,
    vllm=VllmKernels(
        experts=Kernel("UnquantizedFusedMoEMethod", backend="triton"),
        linear=Kernel("UnquantizedLinearMethod"),
        cpu=OnDevice(),
    ),
)

_SERVED = {fmt.name: fmt for fmt in (_W4A16, _W4A8, _FP8_BLOCK, _FP8_CHANNEL, _INT8, _NVFP4, _W8A16, _BF16)}
# Every code of a narrower grid is an int4 code, so that what serves w4a16 serves it, too.
_NARROW = {name: replace(_W4A16, name=name, grid_bits=bits) for name, bits in (("w3a16", 3), ("w2a16", 2))}
# vLLM has a kernel for their width in dense layers only, so that runs sample from them with the built-in engine.
_WIDE = {fmt.name: fmt for fmt in (_weight_only(bits, _humming(bits)) for bits in (5, 6, 7))}
_KNOWN = _SERVED | _NARROW | _WIDE
FORMAT_NAMES = tuple(_SERVED)
_FEW_ACTIVATION_BITS = re.compile(r"w\d+a[1-7]", re.IGNORECASE)
NARROW_NAMES = tuple(_NARROW)
WIDE_NAMES = tuple(_WIDE)
# What messages say of the names beside `FORMAT_NAMES`.
OTHER_NAMES = (
    f"{', '.join(NARROW_NAMES)} (fewer levels in w4a16's storage); {', '.join(WIDE_NAMES)} (vLLM serves checkpoints of "
    "dense layers only)"
)
DEFAULT_FORMAT = _W4A16.name
# The unquantized format: the other side of every comparison, and what stays BF16 in a quantized model.
BASELINE = _BF16.name


def find_format(name: str) -> QuantFormat | None:
    """Return the record of a name with its defaults; None if there is none.

    Args:
        name: one of `FORMAT_NAMES` or of `OTHER_NAMES`.
    """
    return _KNOWN.get(name)


def why_impossible(name: str) -> str:
    """Return why no engine could serve a format of such a name, in brackets; nothing if it is merely unknown."""
    if not _FEW_ACTIVATION_BITS.fullmatch(name):
        return ""
    return " (activations of fewer than 8 bits have no tensor-core path on Hopper)"


def served_formats(device: str) -> tuple[str, ...]:
    """Return the formats that a run's vLLM engines serve on `cpu` or `cuda`."""
    return tuple(name for name, fmt in (_SERVED | _NARROW).items() if fmt.served_on(device))


def formats_with_groups() -> tuple[str, ...]:
    """Return the served formats that have a choice of group sizes."""
    return tuple(name for name, fmt in (_SERVED | _NARROW).items() if fmt.group_sizes)


def get_format(
    name: str,
    *,
    group_size: int | None = None,
    scale_convention: ScaleConvention | None = None,
    nested_in: str | None = None,
    own_width: bool = False,
) -> QuantFormat:
    """Return the format called `name`, its options filled with the format's defaults.

    Args:
        name: one of `FORMAT_NAMES` or of `OTHER_NAMES`.
        group_size: elements per scale along K; integer formats only, None = 128.
        scale_convention: integer formats only, None = `full_range`; of the grid that codes are nested in, if they are.
        nested_in: integer formats only: the format whose codes are published, and rounded to this format's.
        own_width: integer formats only: store codes in no more bits than their grid has, which changes `w3a16` and
            `w2a16` alone. vLLM then serves checkpoints of dense layers, with its Humming kernels.

    Returns:
        The format's record.

    Raises:
        ValueError: the name is unknown, or an option is not legal for it; every problem is listed.
    """
    fmt = find_format(name)
    if fmt is None:
        legal = f"{meant_formats(name)}legal: {', '.join(FORMAT_NAMES)}; {OTHER_NAMES}"
        raise ValueError(f"unknown format {name[:80]!r}{why_impossible(name)}: {legal}")
    _require_groups(
        fmt, group_size=group_size, scale_convention=scale_convention, nested_in=nested_in, own_width=own_width
    )
    if own_width and fmt.grid_bits < fmt.num_bits:
        fmt = replace(fmt, num_bits=fmt.grid_bits, vllm=_humming(fmt.grid_bits))
    problems = []
    if group_size is not None and group_size not in fmt.group_sizes:
        problems.append(f"group_size={group_size} (legal for {name}: {', '.join(map(str, fmt.group_sizes))})")
    if scale_convention is not None and scale_convention not in SCALE_CONVENTIONS:
        problems.append(f"scale_convention={scale_convention!r} (legal: {', '.join(SCALE_CONVENTIONS)})")
    if nested_in is not None and (nested_in not in NESTING or 8 % fmt.num_bits):
        problems.append(f"nested_in={nested_in!r} (legal: {', '.join(NESTING)}, for codes stored in 8, 4 or 2 bits)")
    if problems:
        raise ValueError(f"format {name!r} cannot take {'; '.join(problems)}; null, in a config, takes the default")
    return replace(
        fmt,
        group_size=group_size or fmt.group_size,
        scale_convention=scale_convention or fmt.scale_convention,
        nested_bits=NESTING[nested_in] if nested_in else 0,
    )


def _require_groups(fmt: QuantFormat, **options: object) -> None:
    """Refuse the options of integer formats, those that are None or false excepted, for any other format."""
    given = {key: value for key, value in options.items() if value not in (None, False)}
    if fmt.group_sizes or not given:
        return
    wrong = ", ".join(f"{key}={value}" for key, value in given.items())
    legal = ", ".join(name for name, one in _KNOWN.items() if one.group_sizes)
    always = ", and its groups are always of 16" if "group_size" in given and fmt.weight_kind == "nvfp4" else ""
    # Runs have no own width.
    fix = ", ".join(f"qarl.{key}=null" for key in given if key != "own_width")
    raise ValueError(
        f"format {fmt.name!r} takes no {wrong}: only integer formats ({legal}) have such "
        f"options{always}; leave it out{f', in a config {fix}' if fix else ''}"
    )


# Names of weights alone, which others use and which resemble the wrong formats' names.
_ALIASES = {f"int{bits}": (f"w{bits}a16",) for bits in (2, 3, 4, 5, 6, 7)} | {"fp8": ("fp8_block", "fp8_channel")}


def meant_formats(name: str, legal: Sequence[str] = tuple(_KNOWN)) -> str:
    """Return which formats an unknown name probably means: `did you mean 'w4a16'? `, or nothing.

    Args:
        name: what the user wrote.
        legal: the formats that may be proposed.
    """
    alias = _ALIASES.get(name.lower())
    near = difflib.get_close_matches(name[:80].lower(), legal, n=1) if alias is None else alias
    named = " or ".join(repr(one) for one in near if one in legal)
    return f"did you mean {named}? " if named else ""
