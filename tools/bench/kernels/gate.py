"""The correctness gate: kernels against float64 at the sizes that are timed; no benchmark reports while it is red.

    sqnr_db = 10 log10( sum expected^2 / sum (actual - expected)^2 )

`gemm`: the GEMM alone on the same quantized operands, where only the accumulation order may differ. `mlp`: the whole
expert MLP against the torch reference on the same device. Tensor cores sum FP8 products in a shorter accumulator than
the reference's FP32, and fc2's quantizer amplifies the last bits of fc1 that differ: 36 to 44 dB, while the kernels are
78 to 95 dB from vLLM's own (tests/parity/test_vllm_kernels.py).
"""

from itertools import pairwise

import torch
from moe_shapes import MoeCase, expert_weights
from torch import Tensor

from qarl_kernels import QuantFormat, expert_mlp_reference, gemm_operand, get_format, quantize_weight
from qarl_kernels.fp8 import expand_block_scale
from qarl_kernels.gemm import GemmOperand, grouped_gemm
from qarl_kernels.ops.mlp import expert_mlp_forward
from qarl_kernels.ops.operand_gemm import QuantizedRows, multiply_rows, quantize_rows
from qarl_kernels.routing import route_rows
from qarl_kernels.weights import quantize_weight_reference

EQUAL_DB = 200.0
MIN_GEMM_DB = 45.0
MIN_MLP_DB = {"none": 45.0, "fp8_token": 34.0, "fp8_group": 38.0, "int8_token": 45.0}
NUM_TOKENS, TOP_K, NUM_EXPERTS = 1024, 8, 16


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio in dB, computed in float64; `EQUAL_DB` for equal tensors."""
    expected = expected.double()
    ratio_db = float(10 * torch.log10(expected.square().sum() / (actual.double() - expected).square().sum()))
    return min(ratio_db, EQUAL_DB)


def exact_product(rows: QuantizedRows, operand: GemmOperand, offsets: Tensor) -> Tensor:
    """Return the product of the same quantized operands in float64, [M, N]."""
    values, weight = rows.values.double(), operand.values.double()
    if rows.scale is not None and operand.format.activation_kind == "fp8_group":
        values = values * rows.scale.double().repeat_interleave(128, -1)
        weight = weight * expand_block_scale(operand.scale.double(), *weight.shape[-2:])
    elif rows.scale is not None:
        values, weight = values * rows.scale.double(), weight * operand.scale.double()
    if operand.tensor_scale is not None:
        weight = weight * operand.tensor_scale
    bounds = offsets.tolist()
    return torch.cat([values[a:b] @ weight[e].mT for e, (a, b) in enumerate(pairwise(bounds))])


def gemm_db(fmt: QuantFormat) -> float:
    """Return the dB of fc1 with Zipf-skewed rows."""
    offsets = MoeCase(8192, NUM_EXPERTS, "zipf").offsets()
    weight = expert_weights(NUM_EXPERTS)[0]
    operand = gemm_operand(quantize_weight(weight, fmt), torch.bfloat16)
    rows = quantize_rows(torch.randn(8192, weight.shape[-1], device="cuda", dtype=torch.bfloat16), fmt)
    return sqnr_db(multiply_rows(rows, operand, offsets), exact_product(rows, operand, offsets))


def mlp_db(fmt: QuantFormat) -> float:
    """Return the dB of the whole expert MLP against the torch reference."""
    weights = expert_weights(NUM_EXPERTS)
    x = torch.randn(NUM_TOKENS, weights[0].shape[-1], device="cuda", dtype=torch.bfloat16)
    scores = torch.randn(NUM_TOKENS, NUM_EXPERTS, device="cuda")
    weight, index = scores.softmax(-1).topk(TOP_K)
    stored = [quantize_weight_reference(w, fmt, name="weight") for w in weights]
    fc1, fc2 = (gemm_operand(w, torch.bfloat16) for w in stored)
    actual, _ = expert_mlp_forward(x, route_rows(index, NUM_EXPERTS), weight, fc1, fc2)
    ref1, ref2 = (GemmOperand.from_weight(w, torch.bfloat16) for w in stored)
    unscaled = ref2.unscaled()
    expected = expert_mlp_reference(
        x,
        index,
        weight,
        lambda rows, offsets, dtype: grouped_gemm(rows, ref1, offsets, out_dtype=dtype),
        lambda rows, offsets, dtype: grouped_gemm(rows, unscaled, offsets, out_dtype=dtype, after_swiglu=True),
        fmt,
        NUM_EXPERTS,
        fc2_scale=ref2.tensor_scale,
    )
    return sqnr_db(actual, expected)


def require_green(format_names: list[str]) -> list[tuple[str, float, float]]:
    """Check every format.

    Returns:
        `<format>_gemm_sqnr_db` and `<format>_mlp_sqnr_db`, each with what was measured and what it should be.

    Raises:
        SystemExit: a figure is too low; all are named.
    """
    torch.manual_seed(0)
    figures, red = [], []
    for name in format_names:
        fmt = get_format(name)
        for kind, value, least in (
            ("gemm", gemm_db(fmt), MIN_GEMM_DB),
            ("mlp", mlp_db(fmt), MIN_MLP_DB[fmt.activation_kind]),
        ):
            figures.append((f"{name}_{kind}_sqnr_db", value, least))
            if not value >= least:
                red.append(f"{name} {kind}: {value:.1f} dB < {least} dB")
    if red:
        raise SystemExit("nothing is reported, the kernels are wrong: " + "; ".join(red))
    return figures
