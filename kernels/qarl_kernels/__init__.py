"""Number formats of quantized rollouts and their arithmetic; the torch reference defines what is correct."""

from qarl_kernels.expert_mlp import RoutedRows, expert_mlp, route_rows
from qarl_kernels.formats import FORMAT_NAMES, QuantFormat, get_format
from qarl_kernels.gemm import GemmOperand, gemm, grouped_gemm
from qarl_kernels.hf_config import quantization_config
from qarl_kernels.weights import QuantizedWeight, quantize_weight, stored_layout, weight_problems

__all__ = [
    "FORMAT_NAMES",
    "GemmOperand",
    "QuantFormat",
    "QuantizedWeight",
    "RoutedRows",
    "expert_mlp",
    "gemm",
    "get_format",
    "grouped_gemm",
    "quantization_config",
    "quantize_weight",
    "route_rows",
    "stored_layout",
    "weight_problems",
]
