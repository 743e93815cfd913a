"""Number formats of quantized rollouts, one record each: arithmetic, storage, vLLM's kernels. Standard library only."""

from qarl_formats.hf_config import quantization_config
from qarl_formats.presets import (
    BASELINE,
    DEFAULT_FORMAT,
    FORMAT_NAMES,
    FP8_BLOCK,
    NARROW_NAMES,
    OTHER_NAMES,
    SCALE_CONVENTIONS,
    find_format,
    formats_with_groups,
    get_format,
    served_formats,
    why_impossible,
)
from qarl_formats.record import (
    ActivationKind,
    Kernel,
    OnDevice,
    QuantFormat,
    Role,
    RouterWeight,
    ScaleConvention,
    VllmKernels,
    WeightKind,
)

__all__ = [
    "BASELINE",
    "DEFAULT_FORMAT",
    "FORMAT_NAMES",
    "FP8_BLOCK",
    "NARROW_NAMES",
    "OTHER_NAMES",
    "SCALE_CONVENTIONS",
    "ActivationKind",
    "Kernel",
    "OnDevice",
    "QuantFormat",
    "Role",
    "RouterWeight",
    "ScaleConvention",
    "VllmKernels",
    "WeightKind",
    "find_format",
    "formats_with_groups",
    "get_format",
    "quantization_config",
    "served_formats",
    "why_impossible",
]
