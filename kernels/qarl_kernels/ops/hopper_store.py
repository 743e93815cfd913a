"""What a warpgroup of the Hopper FP8 grouped GEMM does with its two FP32 accumulators of 64 rows x 128 columns.

Rounding points: an output is rounded once, to BF16. SwiGLU rounds gate and up to BF16 first; then either
bf16(bf16(silu) * up), or v = silu * up in FP32, s = max(amax_128(v) / 448, 1 / (448 * 512)) and fp8(v / s).
Full tiles leave by TMA while the next one is multiplied; an expert's last rows under a mask, so that the rows of the
next expert stay as they are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

FP8_MAX = gl.constexpr(448.0)
MIN_SCALE = gl.constexpr(1.0 / (448.0 * 512.0))
FP8_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
BF16_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def _store_rows(desc, out, smem, value, row, stop, column, width):
    """Store the rows before `stop` of a [64, 128] tile."""
    tma.store_wait(0)
    smem.store(value)
    if row + 64 <= stop:
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [row, column], smem)
    else:
        rows = gl.arange(0, 64, gl.SliceLayout(1, COPY))
        columns = gl.arange(0, 128, gl.SliceLayout(0, COPY))
        base = out + row.to(gl.int64) * width + column
        gl.store(base + (rows * width)[:, None] + columns[None, :], smem.load(COPY), mask=(rows < stop - row)[:, None])


@gluon.jit
def _pin(value):
    """Keep the compiler from moving what follows above this point, where it would spill the accumulators."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], gl.bfloat16, False, 2)


# d = 1 + expf(-g) and r = rn(1 / d) by CUDA's own instructions, so that SwiGLU has the bits of the kernels that are not
# fused. CUDA's slow paths, for d near the largest number, are left out: g stays above -87, where silu is 1e-36.
_RECIPROCAL = """
    .reg .f32 g, x, t, d, r; .reg .b32 s;
    max.NaN.f32 g, $1, 0fC2AE0000;
    neg.f32 x, g;
    fma.rn.sat.f32 t, x, 0f3BBB989D, 0f3F000000;
    fma.rm.f32 t, t, 0f437C0000, 0f4B400001;
    mov.b32 s, t;
    shl.b32 s, s, 23;
    add.f32 t, t, 0fCB40007F;
    neg.f32 t, t;
    fma.rn.f32 t, x, 0f3FB8AA3B, t;
    fma.rn.f32 t, x, 0f32A57060, t;
    ex2.approx.ftz.f32 t, t;
    mov.b32 x, s;
    mul.f32 t, t, x;
    add.f32 d, t, 0f3F800000;
    rcp.approx.ftz.f32 r, d;
    neg.f32 d, d;
    fma.rn.f32 t, d, r, 0f3F800000;
    fma.rn.f32 r, r, t, r;
"""
_QUOTIENT = """
    mul.f32 x, g, r;
    fma.rn.f32 t, d, x, g;
    fma.rn.f32 x, r, t, x;
    fma.rn.f32 t, d, x, g;
    fma.rn.f32 $0, r, t, x;
"""
_SILU_BY_DIVISION = gl.constexpr("{" + _RECIPROCAL + _QUOTIENT + "}")
_SILU_BY_SIGMOID = gl.constexpr("{" + _RECIPROCAL + "mul.f32 $0, g, r;}")


@gluon.jit
def _silu(gate, BY_SIGMOID: gl.constexpr):
    """Return gate / (1 + exp(-gate)), or with BY_SIGMOID gate * (1 / (1 + exp(-gate))): see `exact_math`."""
    if BY_SIGMOID:
        silu = gl.inline_asm_elementwise(_SILU_BY_SIGMOID, "=f,f", [gate], gl.float32, True, 1)
    else:
        silu = gl.inline_asm_elementwise(_SILU_BY_DIVISION, "=f,f", [gate], gl.float32, True, 1)
    return silu


@gluon.jit
def _quantize_rows(value):
    """Return fp8(value / s), the division correctly rounded, and s of each row of 128."""
    amax = gl.max(gl.abs(value), 1)
    scale = gl.maximum(gl.div_rn(amax, gl.full_like(amax, FP8_MAX)), MIN_SCALE)
    # Markstein: the rounded reciprocal and one correction round the quotient as a division does.
    inverse = gl.div_rn(gl.full_like(scale, 1.0), scale)[:, None] + gl.zeros_like(value)
    quotient = value * inverse
    remainder = gl.fma(-quotient, scale[:, None] + gl.zeros_like(value), value)
    # The conversion saturates at +-448.
    return gl.fma(remainder, inverse, quotient).to(gl.float8e4nv), scale


@gluon.jit
def _store_swiglu(
    gate,
    up,
    smem,
    outputs,
    row,
    stop,
    column,
    sizes,
    BLOCK: gl.constexpr,
    HIDDEN: gl.constexpr,
):
    out_desc, out, hidden_desc, hidden, out_scale = outputs
    N, _K, n_tiles = sizes
    if HIDDEN:
        _store_rows(hidden_desc, hidden, smem, gate, row, stop, column, N)
        _store_rows(hidden_desc, hidden, smem, up, row, stop, column + N // 2, N)
    else:
        gate = _pin(gate)
        up = _pin(up)
    silu = _silu(gate.to(gl.float32), BLOCK)
    up = up.to(gl.float32)
    if BLOCK:
        a8, scale = _quantize_rows(silu * up)
        narrow = smem._reinterpret(gl.float8e4nv, [64, 128], FP8_TILE)
        _store_rows(out_desc, out, narrow, a8, row, stop, column, n_tiles * 128)
        local = gl.arange(0, 64, gl.SliceLayout(1, MMA))
        to = out_scale + row.to(gl.int64) * n_tiles + column // 128 + local * n_tiles
        gl.store(to, scale, mask=local < stop - row)
    else:
        product = silu.to(gl.bfloat16).to(gl.float32) * up
        _store_rows(out_desc, out, smem, product.to(gl.bfloat16), row, stop, column, n_tiles * 128)


@gluon.jit
def store_tile(
    acc0,
    acc1,
    smem,
    outputs,
    row,
    stop,
    column,
    sizes,
    BLOCK: gl.constexpr,
    SWIGLU: gl.constexpr,
    HIDDEN: gl.constexpr,
) -> None:
    """Round both bands of columns and store them, or what SwiGLU makes of them."""
    band0 = acc0.to(gl.bfloat16)
    band1 = acc1.to(gl.bfloat16)
    if SWIGLU:
        _store_swiglu(band0, band1, smem, outputs, row, stop, column, sizes, BLOCK, HIDDEN)
    else:
        out_desc, out, _hidden_desc, _hidden, _out_scale = outputs
        N, _K, _n_tiles = sizes
        _store_rows(out_desc, out, smem, band0, row, stop, column, N)
        if column + 128 < N:
            _store_rows(out_desc, out, smem, band1, row, stop, column + 128, N)
