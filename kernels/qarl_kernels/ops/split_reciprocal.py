"""Divide BF16 numbers by an FP32 divisor so that FP8 rounds the result as it rounds the correctly rounded quotient.

1 / divisor = high + low with 16 significant bits in high, so x * high is exact for a BF16 x, and x * high + x * low has
a relative error below 2^-36 before its one rounding to FP32, with fused multiply-adds or without. Where the FP32
rounding of a quotient decides its FP8 rounding, the quotient is further than 2^-32 from the point where that flips, if
the divisor is fl(amax / 448) of a BF16 amax: tested over all pairs of significands. Zeros keep the sign of x.

This takes two instructions for each x and some thirty for each divisor; a correctly rounded division takes a dozen for
each x.
"""

import triton
import triton.language as tl

from qarl_kernels.fp8 import FP8_MAX

# 1 / 448 in the same two parts.
_HIGH = tl.constexpr(int(2**24 / FP8_MAX) / 2**24)
_LOW = tl.constexpr(1 / FP8_MAX - int(2**24 / FP8_MAX) / 2**24)


@triton.jit
def split_reciprocal(divisor) -> tuple[tl.tensor, tl.tensor]:
    """1 / divisor as FP32 high + low, low >= 0, for positive divisors from 2^-126 to 2^126."""
    estimate = 1.0 / divisor
    # The estimate may be 2 units in the last place too large; reduced by 4 and cut to 16 bits it is <= 1 / divisor.
    high = ((estimate.to(tl.int32, bitcast=True) - 4) & -256).to(tl.float32, bitcast=True)
    # 40 bits: exact in FP64.
    missing = 1.0 - divisor.to(tl.float64) * high.to(tl.float64)
    return high, missing.to(tl.float32) * estimate


@triton.jit
def split_multiply(x, high, low) -> tl.tensor:
    """FP32 x * (high + low), rounded once."""
    return x * high + x * low


@triton.jit
def divide_by_fp8_max(amax) -> tl.tensor:
    """Correctly rounded amax / 448 for a BF16 amax >= 2^-100: amax / 7 is at least 1/14 ulp away from a midpoint."""
    return split_multiply(amax, _HIGH, _LOW)
