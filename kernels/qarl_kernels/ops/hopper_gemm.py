"""Gluon kernel of the warp-specialised FP8 grouped GEMM for sm_90; `hopper_fp8` states its formulas and launches it.

One persistent program runs on each SM. A producer warp fills a ring of 128-wide K-blocks by TMA; two warpgroups of 64
rows each multiply from it. A tile is 128 rows of one expert by 256 weight rows, in two bands. The producer goes on to
the next tile while the warpgroups store. Tiles are taken in order, so each role finds its expert by stepping through
`offsets`, without a table or a second launch.
With channel scales, all K-blocks add up in the tensor cores. With block scales, each product is scaled and added in
FP32 on the CUDA cores, and the warpgroups take turns, so that one multiplies while the other adds.
Two accumulators and a product take 192 registers per thread, so a tile cannot be larger. Every expert costs whole tiles
of 128 rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from qarl_kernels.ops.hopper_store import BF16_TILE, MMA, store_tile

WIDE_MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 32]))


@gluon.jit
def _seek(offsets, num_experts, tile_m, state):
    """Step to the expert of row tile `tile_m`: (expert, its first row tile, first row, end row)."""
    expert, first, start, stop = state
    tiles = (stop - start + 127) // 128
    while (tile_m >= first + tiles) & (expert + 1 < num_experts):
        first += tiles
        expert += 1
        start = stop
        stop = gl.load(offsets + expert + 1)
        tiles = (stop - start + 127) // 128
    return expert, first, start, stop


@gluon.jit
def _produce(a_desc, w_desc, ring, offsets, num_experts, num_tiles, sizes, STAGES: gl.constexpr):
    a_ring, w_ring, full, empty, _turns = ring
    N, K, n_tiles = sizes
    step = 0
    state = (0, 0, 0, gl.load(offsets + 1))
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile_m = tile // n_tiles
        state = _seek(offsets, num_experts, tile_m, state)
        expert, first, start, _stop = state
        row = start + (tile_m - first) * 128
        w_row = expert * N + (tile % n_tiles) * 256
        for k in range(0, K, 128):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            landed = full.index(slot)
            mbarrier.expect(landed, 2 * a_desc.block_type.nbytes + 2 * w_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(a_desc, [row, k], landed, a_ring.index(2 * slot))
            tma.async_copy_global_to_shared(w_desc, [w_row, k], landed, w_ring.index(2 * slot))
            tma.async_copy_global_to_shared(w_desc, [w_row + 128, k], landed, w_ring.index(2 * slot + 1))
            tma.async_copy_global_to_shared(a_desc, [row + 64, k], landed, a_ring.index(2 * slot + 1))
            step += 1


@gluon.jit
def _accumulate(ring, step, k_blocks, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """Sum all K-blocks in the tensor cores, both bands in one instruction, one block in flight."""
    a_ring, w_ring, full, empty, _turns = ring
    acc = gl.zeros([64, 256], gl.float32, WIDE_MMA)
    w_wide = w_ring._reinterpret(gl.float8e4nv, [STAGES, 256, 128], w_ring.layout)
    for block in range(k_blocks):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        a = a_ring.index(2 * slot + GROUP)
        acc = warpgroup_mma(a, w_wide.index(slot).permute((1, 0)), acc, use_acc=block > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=block > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    acc0, acc1 = acc.reshape([64, 2, 128]).permute([0, 2, 1]).split()
    return gl.convert_layout(acc0, MMA, assert_trivial=True), gl.convert_layout(acc1, MMA, assert_trivial=True), step


@gluon.jit
def _multiply(a, w, zero, turns, phase, GROUP: gl.constexpr):
    """Multiply one band's K-block when it is this warpgroup's turn; pass the turn on as soon as it is issued."""
    mbarrier.wait(turns.index(GROUP), phase)
    part = warpgroup_mma(a, w.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - GROUP), count=1)
    return part


@gluon.jit
def _accumulate_scaled(ring, step, k_blocks, pointers, loaded, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """Add each K-block's product, times its scales, in FP32: acc += (a8 @ w8^T) * (a_scale * w_scale)."""
    a_ring, w_ring, full, empty, turns = ring
    to_a, to_w0, to_w1 = pointers
    a_scale, w_scale0, w_scale1 = loaded
    acc0 = gl.zeros([64, 128], gl.float32, MMA)
    acc1 = gl.zeros([64, 128], gl.float32, MMA)
    zero = gl.zeros([64, 128], gl.float32, MMA)
    for block in range(k_blocks):
        slot = step % STAGES
        scale0 = a_scale * w_scale0
        scale1 = a_scale * w_scale1
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        a = a_ring.index(2 * slot + GROUP)
        part = _multiply(a, w_ring.index(2 * slot), zero, turns, 1 - GROUP, GROUP)
        # Load the next block's scales while this block is multiplied.
        ahead = gl.minimum(block + 1, k_blocks - 1)
        a_scale = gl.load(to_a + ahead)
        w_scale0 = gl.load(to_w0 + ahead)
        w_scale1 = gl.load(to_w1 + ahead)
        part = warpgroup_mma_wait(0, deps=(part,))
        acc0 += part * scale0[:, None]
        part = _multiply(a, w_ring.index(2 * slot + 1), zero, turns, GROUP, GROUP)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(slot), count=1)
        acc1 += part * scale1[:, None]
        step += 1
    return acc0, acc1, step


@gluon.jit
def _place(routing, tile, sizes, state, GROUP: gl.constexpr):
    """Locate this warpgroup's 64 rows and the first column of a tile; past the end, those of the last tile."""
    _N, _K, n_tiles = sizes
    offsets, num_experts, num_rows, num_tiles = routing
    tile = gl.minimum(tile, gl.maximum(num_tiles - 1, 0))
    tile_m = tile // n_tiles
    state = _seek(offsets, num_experts, tile_m, state)
    _expert, first, start, _stop = state
    row = start + (tile_m - first) * 128 + GROUP * 64
    # Rows past the last one read the last one's scales; they are not stored.
    rows = gl.minimum(gl.arange(0, 64, gl.SliceLayout(1, MMA)), num_rows - 1 - row)
    return row, (tile % n_tiles) * 256, rows, state


@gluon.jit
def _block_scales(scales, expert, row, column, rows, sizes):
    """Return pointers to the first K-block's scales of the rows and of both bands, and what they point to."""
    a_scale, w_scale, _row_weight, _bias = scales
    N, K, _n_tiles = sizes
    k_blocks = K // 128
    to_a = a_scale + row.to(gl.int64) * k_blocks + rows * k_blocks
    to_w0 = w_scale + (expert.to(gl.int64) * (N // 128) + column // 128) * k_blocks
    # If the last band has no partner, nothing is stored with the second scale, so any will do.
    to_w1 = to_w0 + gl.where(column + 128 < N, 1, 0) * k_blocks
    return (to_a, to_w0, to_w1), (gl.load(to_a), gl.load(to_w0), gl.load(to_w1))


@gluon.jit
def _channel_scales(scales, expert, row, column, rows, sizes):
    a_scale, w_scale, _row_weight, _bias = scales
    N, _K, _n_tiles = sizes
    to_w = w_scale + expert.to(gl.int64) * N + column + gl.arange(0, 128, gl.SliceLayout(0, MMA))
    w_scale1 = gl.load(to_w + gl.where(column + 128 < N, 128, 0))
    return gl.load(a_scale + row + rows)[:, None], gl.load(to_w)[None, :], w_scale1[None, :]


@gluon.jit
def _scale_and_add(acc0, acc1, s_a, bias, column, N):
    """Multiply both bands by the rows' scales and add the biases of their columns, rounded once."""
    if bias is None:
        acc0 = s_a * acc0
        acc1 = s_a * acc1
    else:
        to_bias = bias + column + gl.arange(0, 128, gl.SliceLayout(0, MMA))
        acc0 = gl.fma(s_a, acc0, gl.load(to_bias).to(gl.float32)[None, :])
        to_bias += gl.where(column + 128 < N, 128, 0)
        acc1 = gl.fma(s_a, acc1, gl.load(to_bias).to(gl.float32)[None, :])
    return acc0, acc1


@gluon.jit
def _consume(
    ring,
    stage,
    outputs,
    scales,
    routing,
    sizes,
    BLOCK: gl.constexpr,
    WEIGHTED: gl.constexpr,
    CHANNEL_FIRST: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    offsets, _num_experts, _num_rows, num_tiles = routing
    _a_scale, _w_scale, row_weight, bias = scales
    N, K, _n_tiles = sizes
    out_desc, out = outputs
    step = 0
    state = (0, 0, 0, gl.load(offsets + 1))
    row, column, rows, state = _place(routing, gl.program_id(0), sizes, state, GROUP)
    pointers, loaded = (0, 0, 0), (0, 0, 0)
    if BLOCK:
        pointers, loaded = _block_scales(scales, state[0], row, column, rows, sizes)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        if BLOCK:
            acc0, acc1, step = _accumulate_scaled(ring, step, K // 128, pointers, loaded, GROUP, STAGES)
            if WEIGHTED:
                weight = gl.load(row_weight + row + rows)[:, None]
                acc0 *= weight
                acc1 *= weight
        else:
            s_a, s_w0, s_w1 = _channel_scales(scales, state[0], row, column, rows, sizes)
            acc0, acc1, step = _accumulate(ring, step, K // 128, GROUP, STAGES)
            if CHANNEL_FIRST:
                acc0, acc1 = _scale_and_add(s_w0 * acc0, s_w1 * acc1, s_a, bias, column, N)
            else:
                acc0 = s_w0 * (s_a * acc0)
                acc1 = s_w1 * (s_a * acc1)
        tile_row, tile_stop, tile_column = row, state[3], column
        row, column, rows, state = _place(routing, tile + gl.num_programs(0), sizes, state, GROUP)
        if BLOCK:
            # Load the next tile's first scales while this tile is stored.
            pointers, loaded = _block_scales(scales, state[0], row, column, rows, sizes)
        if tile_row < tile_stop:
            store_tile(acc0, acc1, stage.index(GROUP), out_desc, out, tile_row, tile_stop, tile_column, N)
    tma.store_wait(0)


# Specialized for num_experts == 1, the block kernel would spill its accumulators.
@gluon.jit(do_not_specialize=["num_experts"])
def hopper_gemm_kernel(
    a_desc,  # [M, K] FP8
    w_desc,  # [E * N, K] FP8
    out_desc,  # [M, N] BF16
    out,  # the memory of out_desc
    a_scale,  # [M, 1] or BLOCK: [M, K / 128]
    w_scale,  # [E, N, 1] or BLOCK: [E, N / 128, K / 128]
    row_weight,  # [M]
    bias,  # [N] BF16, for CHANNEL_FIRST; None without
    offsets,  # [E + 1]
    num_experts,
    num_rows,
    N,
    K,
    BLOCK: gl.constexpr,
    WEIGHTED: gl.constexpr,
    CHANNEL_FIRST: gl.constexpr,
    EXPERTS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Multiply each expert's rows by its weight."""
    experts = gl.arange(0, EXPERTS, gl.BlockedLayout([1], [32], [4], [0]))
    begin = gl.load(offsets + experts, mask=experts < num_experts, other=0)
    end = gl.load(offsets + experts + 1, mask=experts < num_experts, other=0)
    n_tiles = (N + 255) // 256
    num_tiles = gl.sum((end - begin + 127) // 128, 0) * n_tiles
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 64, 128], a_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], w_desc.layout)
    stage = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], BF16_TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    ring = (a_ring, w_ring, full, empty, turns)
    outputs = (out_desc, out)
    scales = (a_scale, w_scale, row_weight, bias)
    sizes = (N, K, n_tiles)
    routing = (offsets, num_experts, num_rows, num_tiles)
    load = (a_desc, w_desc, ring, offsets, num_experts, num_tiles, sizes, STAGES)
    gl.warp_specialize(
        [
            (_consume, (ring, stage, outputs, scales, routing, sizes, BLOCK, WEIGHTED, CHANNEL_FIRST, 0, STAGES)),
            (_consume, (ring, stage, outputs, scales, routing, sizes, BLOCK, WEIGHTED, CHANNEL_FIRST, 1, STAGES)),
            (_produce, load),
        ],
        [4, 1],
        [240, 24],
    )
