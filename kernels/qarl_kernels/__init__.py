"""Number formats of quantized rollouts and their arithmetic; the torch reference defines what is correct."""

from qarl_formats import FORMAT_NAMES, QuantFormat, get_format, quantization_config
from qarl_kernels.dispatch import (
    Weights,
    backward_weight,
    expert_mlp,
    gemm_operand,
    grouped_gemm,
    grouped_input_grad,
    grouped_weight_grad,
    largest,
    quantize_weight,
    quantize_with_operand,
    require_finite,
    runs_kernels,
)
from qarl_kernels.dispatch_logprobs import token_logprobs, token_logprobs_backward, token_logprobs_reference
from qarl_kernels.dispatch_norms import rms_norm, rms_norm_backward, rotate_pairs, swiglu_pair, swiglu_pair_backward
from qarl_kernels.dispatch_rows import combine_rows, expert_rows, expert_rows_backward, spread_rows
from qarl_kernels.expert_mlp import expert_mlp_reference
from qarl_kernels.gemm import GemmOperand, gemm
from qarl_kernels.nested import narrow_tensor
from qarl_kernels.routing import RoutedRows, one_group, route_rows, rows_scale
from qarl_kernels.weights import TOO_LARGE, QuantizedWeight, stored_layout, unfit_values, weight_problems

__all__ = [
    "FORMAT_NAMES",
    "TOO_LARGE",
    "GemmOperand",
    "QuantFormat",
    "QuantizedWeight",
    "RoutedRows",
    "Weights",
    "backward_weight",
    "combine_rows",
    "expert_mlp",
    "expert_mlp_reference",
    "expert_rows",
    "expert_rows_backward",
    "gemm",
    "gemm_operand",
    "get_format",
    "grouped_gemm",
    "grouped_input_grad",
    "grouped_weight_grad",
    "largest",
    "narrow_tensor",
    "one_group",
    "quantization_config",
    "quantize_weight",
    "quantize_with_operand",
    "require_finite",
    "rms_norm",
    "rms_norm_backward",
    "rotate_pairs",
    "route_rows",
    "rows_scale",
    "runs_kernels",
    "spread_rows",
    "stored_layout",
    "swiglu_pair",
    "swiglu_pair_backward",
    "token_logprobs",
    "token_logprobs_backward",
    "token_logprobs_reference",
    "unfit_values",
    "weight_problems",
]
