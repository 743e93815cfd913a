"""How a token's activations become 8-bit numbers with one scale, for the kernels that hold a whole row.

    fp8_token          scale = max(amax / 448, 1/(448*512))     a8 = fp8(x / scale)
    int8_token         scale = amax / 127                       a8 = round(x * (127 / amax))     amax at least 1e-10
    int8_token, DENSE  the same without a floor: a row of zeros has scale 0

Divisions are correctly rounded, but for those of `int8_token` in routed experts: the engine's kernel there is Triton,
too, and dividing as it does gives its bits. On a GPU these are up to two units in the last place from the reference's.
Ties of `int8_token` go away from zero in experts and to even in dense layers, as in the engine.
"""

import torch
import triton
import triton.language as tl

from qarl_kernels.fp8 import FP8_MAX, MIN_GROUP_AMAX, MIN_TOKEN_SCALE
from qarl_kernels.int8 import INT8_MAX, MIN_TOKEN_AMAX
from qarl_kernels.ops.exact_math import divide, round_half_away, round_half_even

TOKEN_DTYPES: dict[str, torch.dtype] = {"fp8_token": torch.float8_e4m3fn, "int8_token": torch.int8}
_FP8_MAX = tl.constexpr(FP8_MAX)
_MIN_TOKEN_SCALE = tl.constexpr(MIN_TOKEN_SCALE)
_MIN_GROUP_AMAX = tl.constexpr(MIN_GROUP_AMAX)
_INT8_MAX = tl.constexpr(INT8_MAX)
_MIN_TOKEN_AMAX = tl.constexpr(MIN_TOKEN_AMAX)


def kind_problems(kind: str) -> list[str]:
    """Say whether a kind of activations has no scale per token.

    Returns:
        One message, or none.
    """
    return [] if kind in TOKEN_DTYPES else [f"kind={kind!r} (legal: {', '.join(TOKEN_DTYPES)})"]


@triton.jit
def floored_scale(amax, BEFORE: tl.constexpr) -> tl.tensor:
    """Scale max(amax / 448, 1/(448*512)), or with BEFORE max(amax, 1e-10) / 448; NaN stays NaN."""
    if BEFORE:
        floored = tl.maximum(amax, _MIN_GROUP_AMAX, propagate_nan=tl.PropagateNan.ALL)
        scale = tl.math.div_rn(floored, _FP8_MAX)
    else:
        scale = tl.math.div_rn(amax, _FP8_MAX)
        scale = tl.maximum(scale, _MIN_TOKEN_SCALE, propagate_nan=tl.PropagateNan.ALL)
    return scale


@triton.jit
def token_scale(amax, KIND: tl.constexpr, DENSE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return a row's scale, and what `token_values` divides or multiplies by; NaN stays NaN."""
    if KIND == "fp8_token":
        scale = floored_scale(amax, False)
        factor = scale
    elif DENSE:
        scale = tl.math.div_rn(amax, _INT8_MAX)
        factor = tl.where(amax == 0.0, 0.0, tl.math.div_rn(_INT8_MAX, amax))
    else:
        amax = tl.maximum(amax, _MIN_TOKEN_AMAX, propagate_nan=tl.PropagateNan.ALL)
        scale = amax / _INT8_MAX
        factor = _INT8_MAX / amax
    return scale, factor


@triton.jit
def token_values(x, factor, KIND: tl.constexpr, DENSE: tl.constexpr) -> tl.tensor:
    """Return a row's 8-bit numbers."""
    if KIND == "fp8_token":
        # Saturation needs no clamp: |x / scale| <= 448 (1 + 2^-23).
        values = divide(x, factor).to(tl.float8e4nv)
    elif DENSE:
        values = tl.clamp(round_half_even(x * factor), -128.0, 127.0).to(tl.int8)
    else:
        values = round_half_away(x * factor).to(tl.int8)
    return values
