"""Arithmetic that rounds the same on a GPU and in Triton's interpreter.

Triton's `/` and `tl.exp` are approximations on a GPU, while torch and the rollout engine's CUDA kernels divide and
exponentiate with CUDA's correctly rounded division and `expf`. A correctly rounded division costs about a dozen
instructions; where many numbers share a divisor, `divide` needs three, and no special-function unit.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

INTERPRETED = bool(triton.knobs.runtime.interpret)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def exp(x) -> tl.tensor:
    """CUDA's `expf`; numpy's in the interpreter, which has no libdevice and may differ in the last bit."""
    if _INTERPRETED:
        result = tl.exp(x)
    else:
        result = libdevice.exp(x)
    return result


@triton.jit
def log(x) -> tl.tensor:
    """CUDA's `logf`, which keeps the digits of logarithms near 0; numpy's in the interpreter."""
    if _INTERPRETED:
        result = tl.log(x)
    else:
        result = libdevice.log(x)
    return result


@triton.jit
def silu(gate) -> tl.tensor:
    """FP32 g / (1 + exp(-g)) with a correctly rounded division, as torch and vLLM's activation kernel compute it."""
    return tl.math.div_rn(gate, 1.0 + exp(-gate))


@triton.jit
def silu_by_sigmoid(gate):
    """FP32 g * (1 / (1 + exp(-g))), as vLLM's kernel that fuses SwiGLU with the 1x128 quantization computes it."""
    return gate * tl.math.div_rn(1.0, 1.0 + exp(-gate))


@triton.jit
def round_half_even(x) -> tl.tensor:
    """FP32 rounded to a whole number, ties to even, for |x| below 2^22."""
    if _INTERPRETED:
        # Here FP32 has steps of one. A GPU might fuse the addition with the product that x is.
        whole = (x + 12582912.0) - 12582912.0
    else:
        whole = libdevice.rint(x)
    return whole


@triton.jit
def round_half_away(x) -> tl.tensor:
    """FP32 rounded to a whole number, ties away from zero."""
    if _INTERPRETED:
        size = tl.abs(x)
        whole = tl.floor(size)
        whole += tl.where(size - whole >= 0.5, 1.0, 0.0)
        whole = tl.where(x < 0, -whole, whole)
    else:
        whole = libdevice.round(x)
    return whole


@triton.jit
def largest_magnitude(values, axis: tl.constexpr) -> tl.tensor:
    """Maximum of |values| along `axis` in FP32; NaN wins, as in torch."""
    # Reinterpreted as integers, non-negative floats keep their order and NaN is above infinity; a float maximum would
    # drop NaN.
    bits = tl.abs(values).to(tl.int32, bitcast=True)
    return tl.max(bits, axis=axis).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(x) -> tl.tensor:
    """1 / x to 2 units in the last place, for |x| from 2^-126 to 2^126; Triton's `1 / x` takes more to know others."""
    if _INTERPRETED:
        estimate = 1.0 / x
    else:
        estimate = libdevice.fast_dividef(1.0, x)
    return estimate


@triton.jit
def multiply_add(x, y, addend) -> tl.tensor:
    """FP32 x * y + addend, rounded once."""
    if _INTERPRETED:
        # The interpreter's fma rounds twice; in FP64 the product is exact.
        total = (x.to(tl.float64) * y.to(tl.float64) + addend.to(tl.float64)).to(tl.float32)
    else:
        total = tl.fma(x, y, addend)
    return total


@triton.jit
def divide(x, divisor) -> tl.tensor:
    """Correctly rounded x / divisor, for one positive divisor of many x.

    Markstein's division: with r = rn(1 / divisor), q = rn(x * r) and q -= (q * divisor - x) * r in fused multiply-adds.
    An infinite divisor gives 0, or NaN for an infinite x; signs of zeros are those of x.

    Source: P. Markstein, Computation of elementary functions on the IBM RISC System/6000 processor, 1990.
    """
    if _INTERPRETED:
        # The interpreter's fma rounds twice, so the steps below would not be exact there.
        quotient = tl.math.div_rn(x, divisor)
    else:
        reciprocal = tl.math.div_rn(1.0, divisor)
        # 0 * inf would make the residual NaN.
        finite = tl.where(divisor == float("inf"), 0.0, divisor)
        # Triton's -x is the subtraction 0 - x; a product with -1 becomes a free sign flip.
        negative = x * -1.0
        quotient = x * reciprocal
        quotient = tl.fma(tl.fma(quotient, finite, negative), -reciprocal, quotient)
    return quotient
