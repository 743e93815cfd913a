"""How a warpgroup of the Hopper FP8 grouped GEMM stores its two FP32 accumulators of 64 rows x 128 columns.

An output is rounded once, to BF16. Full tiles are stored by TMA while the next one is multiplied; an expert's last rows
are stored under a mask, so that the next expert's rows stay as they are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

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
def store_tile(acc0, acc1, smem, out_desc, out, row, stop, column, N) -> None:
    """Round both bands of columns and store them; the second may be past the last column."""
    _store_rows(out_desc, out, smem, acc0.to(gl.bfloat16), row, stop, column, N)
    if column + 128 < N:
        _store_rows(out_desc, out, smem, acc1.to(gl.bfloat16), row, stop, column + 128, N)
