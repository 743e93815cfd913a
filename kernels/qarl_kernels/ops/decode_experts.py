"""Launches `decode_experts.cu`, compiled for a problem's sizes when they are first met."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from qarl_kernels.ops.cuda_source import compile_source

BLOCK_ROWS = 8
"""Rows of a block, the columns of a tensor-core instruction."""

_TILE_K, _TILE_N = 16, 64
_MOST_WARPS, _FEWEST_WARPS = 8, 2
# Registers of a warp's chunks leave an SM room for so many warps.
_WARPS_OF_AN_SM = 24


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The kernel's constants, under the names that it has for them."""

    K: int
    N: int
    GROUP: int
    WARPS: int
    CHUNK: int
    BLOCKS: int

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory of a block: each warp's part of the rows, and its sums."""
        row_bytes = self.K // self.WARPS * 2 + 16
        return self.WARPS * BLOCK_ROWS * (row_bytes + (_TILE_N + 4) * 4)


@functools.cache
def decode_config(k: int, n: int, group: int) -> DecodeConfig | None:
    """Return how the kernel runs weights of these sizes; None if it does not take them.

    Args:
        k: in-features.
        n: out-features.
        group: codes per scale, along K.
    """
    if group not in (32, 64, 128) or k % group or n % _TILE_N:
        return None
    # A warp's slice of K is whole groups, and whole chunks of 128 where K allows.
    step = group if k % 128 else 128
    warps = max((count for count in range(1, _MOST_WARPS + 1) if k // step % count == 0), default=1)
    config = DecodeConfig(k, n, group, warps, step // _TILE_K, _WARPS_OF_AN_SM // warps)
    return config if warps >= _FEWEST_WARPS else None


@functools.cache
def decode_kernel(config: DecodeConfig, device_index: int) -> Callable[..., None] | None:
    """Compile and load the kernel; None on a GPU before Hopper, or whose blocks have too little shared memory."""
    kernel = compile_source("decode_experts", config, config.shared_bytes, device_index)
    if kernel is None:
        return None
    return functools.partial(kernel, block=(config.WARPS * 32, 1, 1), shared_mem=config.shared_bytes)


def launch(
    kernel: Callable[..., None],
    config: DecodeConfig,
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    top_k: int,
    weight: Tensor | None,
    out: Tensor,
) -> None:
    """Run the kernel on the tensors of `qarl_kernels.decode_experts`, whose sizes the config has."""
    sorted_rows, experts, count = rows
    grid = (config.N // _TILE_N, sorted_rows.shape[0] // BLOCK_ROWS, 1)
    # The kernel reads no weights where rows are not weighted, but takes a pointer.
    weights = out if weight is None else weight
    scalars = [out.shape[0], top_k, int(weight is not None)]
    kernel(grid=grid, args=[words, scale, x, out, sorted_rows, experts, count, weights, *scalars])
