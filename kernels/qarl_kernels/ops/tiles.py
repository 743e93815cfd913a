"""Row tiles of ragged groups, found on the device: which expert a tile belongs to and which rows it covers.

Experts own unequal, device-resident row ranges, so the number of tiles is unknown to the host, which launches for the
bound ceil(M / block) + E. The table is int32 [1 + bound, 4]: record 0 holds the number of tiles, record 1 + t a tile's
expert, first row and its expert's end. One small launch per GEMM spares the GEMM's programs the search.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_TILES_PER_PROGRAM = 128
# Extent of a ragged descriptor's row axis, see triton.tools.ragged_tma.
_RAGGED = tl.constexpr(2**30)


@triton.jit
def _tile_table_kernel(
    offsets_ptr,  # [E + 1] int32
    table_ptr,  # [1 + T, 4] int32
    num_experts,
    max_tiles,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,  # E rounded up to a power of two
    TILES: tl.constexpr,
):
    expert = tl.arange(0, EXPERTS)
    real = expert < num_experts
    first = tl.load(offsets_ptr + expert, mask=real, other=0)
    stop = tl.load(offsets_ptr + expert + 1, mask=real, other=0)
    num_tiles = tl.cdiv(stop - first, BLOCK_M)
    tile_stop = tl.cumsum(num_tiles, 0)
    tile_first = tile_stop - num_tiles
    total = tl.sum(num_tiles, 0)

    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    is_owner = (tile_first[None, :] <= tile[:, None]) & (tile[:, None] < tile_stop[None, :])
    owner = tl.sum(tl.where(is_owner, expert[None, :], 0), 1)
    owner_first = tl.sum(tl.where(is_owner, first[None, :], 0), 1)
    owner_stop = tl.sum(tl.where(is_owner, stop[None, :], 0), 1)
    owner_tile = tl.sum(tl.where(is_owner, tile_first[None, :], 0), 1)

    record = table_ptr + 4 * (tile + 1)
    written = tile < max_tiles
    tl.store(record, owner, mask=written)
    tl.store(record + 1, owner_first + (tile - owner_tile) * BLOCK_M, mask=written)
    tl.store(record + 2, owner_stop, mask=written)
    if tl.program_id(0) == 0:
        tl.store(table_ptr, total)


def build_tile_table(offsets: Tensor, num_rows: int, block_m: int) -> Tensor:
    """List the row tiles of every expert, in row order.

    Args:
        offsets: [E + 1] int32 on the device.
        num_rows: M, at least offsets[E].
        block_m: rows of a tile.

    Returns:
        [1 + ceil(M / block_m) + E, 4] int32, see the module.
    """
    num_experts = offsets.shape[0] - 1
    max_tiles = triton.cdiv(num_rows, block_m) + num_experts
    table = torch.empty(1 + max_tiles, 4, dtype=torch.int32, device=offsets.device)
    grid = (triton.cdiv(max_tiles, _TILES_PER_PROGRAM),)
    experts = triton.next_power_of_2(num_experts)
    _tile_table_kernel[grid](offsets, table, num_experts, max_tiles, block_m, experts, _TILES_PER_PROGRAM)
    return table


@triton.jit
def _expert_order_kernel(
    offsets_ptr,  # [E + 1] int32
    order_ptr,  # [E] int32
    num_experts,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    other = tl.arange(0, EXPERTS)
    real = other < num_experts
    first = tl.load(offsets_ptr + other, mask=real, other=0)
    # Padding has -1 rows and sorts last.
    other_rows = tl.load(offsets_ptr + other + 1, mask=real, other=-1) - first
    expert = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    written = expert < num_experts
    first = tl.load(offsets_ptr + expert, mask=written, other=0)
    rows = tl.load(offsets_ptr + expert + 1, mask=written, other=0) - first
    larger = other_rows[None, :] > rows[:, None]
    tied_before = (other_rows[None, :] == rows[:, None]) & (other[None, :] < expert[:, None])
    rank = tl.sum((larger | tied_before).to(tl.int32), 1)
    tl.store(order_ptr + rank, expert, mask=written)


def build_expert_order(offsets: Tensor) -> Tensor:
    """List the experts by falling row count.

    Args:
        offsets: [E + 1] int32 on the device.

    Returns:
        [E] int32.
    """
    num_experts, block = offsets.shape[0] - 1, 32
    order = torch.empty(num_experts, dtype=torch.int32, device=offsets.device)
    grid = (triton.cdiv(num_experts, block),)
    _expert_order_kernel[grid](offsets, order, num_experts, triton.next_power_of_2(num_experts), block)
    return order


@triton.jit
def tile_position(tile, num_m_tiles, num_n_tiles, GROUP_M: tl.constexpr):
    """Return (row tile, column tile); GROUP_M row tiles go over all column tiles together and share them in the L2."""
    group = tile // (GROUP_M * num_n_tiles)
    first = group * GROUP_M
    size = tl.minimum(num_m_tiles - first, GROUP_M)
    within = tile - group * GROUP_M * num_n_tiles
    return first + within % size, within // size


@triton.jit
def expert_tile(tile, tiles_ptr, num_m_tiles, num_n_tiles, GROUP_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return a tile's expert, its first row, the end of the expert's rows, and its first column."""
    m_tile, n_tile = tile_position(tile, num_m_tiles, num_n_tiles, GROUP_M)
    record = tiles_ptr + 4 * (m_tile + 1)
    return tl.load(record), tl.load(record + 1), tl.load(record + 2), n_tile * BLOCK_N


@triton.jit
def load_ragged(desc, stop, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Read a box [ROWS, COLUMNS] of a ragged descriptor; rows from `stop` on read as zeros."""
    return desc.load([_RAGGED, stop, _RAGGED - stop + row, column]).reshape(ROWS, COLUMNS)


@triton.jit
def store_ragged(desc, tile, stop, row, column):
    """Write a tile through a ragged descriptor, without its rows from `stop` on."""
    desc.store([_RAGGED, stop, _RAGGED - stop + row, column], tile.reshape(1, 1, tile.shape[0], tile.shape[1]))


@triton.jit
def halves(tile):
    """Cut a tile [M, N] into its left and right columns."""
    half: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, half)), (0, 2, 1)))


def descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe a contiguous tensor to the copy engine, which fills reads beyond its end with zeros.

    Args:
        tensor: contiguous, base and row sizes multiples of 16 bytes.
        block: shape of the box that one copy moves.
    """
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)
