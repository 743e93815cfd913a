"""Transformer-Engine's own FP8 block recipe in place of this package's kernels, for `fp8_block`.

Its forward multiplies what the engine multiplies, up to the last bit of a scale: 1x128 activations, 128x128 weights,
FP32 scales. It differs from this package's kernels in three ways: SwiGLU's output is rounded to BF16 before it is
quantized, weights are quantized a second time besides the published ones, and the backward multiplies in FP8, too,
instead of straight-through.
"""

import functools
from typing import Any

from torch import Tensor, nn

from qarl_kernels import QuantFormat
from qarl_kernels.expert_mlp import swiglu


@functools.cache
def _recipe() -> Any:
    from transformer_engine.common.recipe import Float8BlockScaling, QParams

    # Its default scales are powers of two; the engine's are any FP32 number.
    recipe, exact = Float8BlockScaling(), QParams(power_2_scale=False)
    recipe.fp8_quant_fwd_inp = recipe.fp8_quant_fwd_weight = recipe.fp8_quant_bwd_grad = exact
    return recipe


def recipe_rows(
    rows: Tensor, row_weight: Tensor, counts: list[int], fc1: nn.Module, fc2: nn.Module, fmt: QuantFormat
) -> Tensor:
    """Run rows sorted by expert through Transformer-Engine's grouped linears under its block recipe.

    Args:
        rows: [M, H] BF16.
        row_weight: [M] FP32 router weights.
        counts: rows of each of this rank's experts; they are padded to the multiples of 16 that its GEMM takes.
        fc1: E_local weights [2 I, H].
        fc2: E_local weights [H, I].
        fmt: `fp8_block`.

    Returns:
        [M, H] BF16.

    Source: Transformer-Engine 2.14.1 common/recipe/__init__.py, Float8BlockScaling.
    """
    from transformer_engine import pytorch as te

    with te.autocast(enabled=True, recipe=_recipe()):
        padded, splits = te.Fp8Padding(len(counts))(rows, counts)
        hidden, _ = fc1(padded, splits)
        out, _ = fc2(swiglu(hidden, fmt).to(rows.dtype), splits)
        out = te.Fp8Unpadding(len(counts))(out, counts)
    return (out * row_weight.unsqueeze(-1)).to(rows.dtype)
