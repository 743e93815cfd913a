"""Launches `decode_linear.cu`, compiled for a problem's sizes when they are first met."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from qarl_kernels.ops.cuda_source import compile_source

_TILE_K, _TILE_N = 16, 64
# Measured best on an H200, for Qwen3-30B-A3B's projections: columns that share rows pay with 32 of them alone.
_WARPS, _CLUSTERS = 4, (8, 4, 2, 1)
_TILES = {8: 1, 16: 1, 32: 2}
# Blocks that registers leave an SM room for.
_BLOCKS = {8: 5, 16: 5, 32: 3}
_FEWEST, _MOST = 4, 32


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """The kernel's constants, under the names that it has for them."""

    K: int
    N: int
    GROUP: int
    ROWS: int
    WARPS: int
    TILES: int
    CLUSTER: int
    CHUNK: int
    BLOCKS: int

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory of a block: x, codes and scales of its slices, and what other blocks send."""
        slices = self.WARPS // self.TILES
        tiles = self.K // _TILE_K // (self.CLUSTER * slices)
        groups = -(-tiles * _TILE_K // self.GROUP)
        part = self.ROWS * (tiles * 32 + 16) + self.TILES * (tiles * 512 + groups * 128)
        received = self.ROWS * self.TILES * _TILE_N * 4 + 16 if self.CLUSTER > 1 else 0
        return slices * max(part, self.TILES * self.ROWS * (_TILE_N + 4) * 4) + received


@functools.cache
def linear_config(k: int, n: int, group: int, rows: int) -> LinearConfig | None:
    """Return how the kernel runs a weight of these sizes; None if it does not take them.

    Args:
        k: in-features.
        n: out-features.
        group: codes per scale, along K.
        rows: 8, 16 or 32, which bounds those of x.
    """
    tiles = _TILES[rows]
    if group not in (32, 64, 128) or k % group or n % (_TILE_N * tiles):
        return None
    slices = _WARPS // tiles
    # As many blocks as leave each warp enough to read.
    for cluster in _CLUSTERS:
        length, rest = divmod(k // _TILE_K, cluster * slices)
        codes = length * _TILE_K
        aligned = not rest and codes and (codes % group == 0 or group % codes == 0)
        if aligned and _FEWEST <= length <= _MOST:
            return LinearConfig(k, n, group, rows, _WARPS, tiles, cluster, _chunk(length), _BLOCKS[rows])
    return None


def _chunk(length: int) -> int:
    # All of a slice is on its way at once; a warp waits for it in at most four parts.
    least = max(length / 4, min(4, length / 2))
    return next(chunk for chunk in range(1, length + 1) if length % chunk == 0 and chunk >= least)


@functools.cache
def linear_kernel(config: LinearConfig, device_index: int) -> Callable[..., None] | None:
    """Compile and load the kernel; None on a GPU before Hopper, or whose blocks have too little shared memory."""
    kernel = compile_source("decode_linear", config, config.shared_bytes, device_index)
    if kernel is None:
        return None
    grid = (config.N // (_TILE_N * config.TILES), config.CLUSTER, 1)
    return functools.partial(kernel, grid=grid, block=(config.WARPS * 32, 1, 1), shared_mem=config.shared_bytes)


def launch(kernel: Callable[..., None], x: Tensor, words: Tensor, scale: Tensor, out: Tensor) -> None:
    """Run the kernel on the tensors of `qarl_kernels.decode_linear`, whose sizes its config has."""
    kernel(args=[words, scale, x, out, x.shape[0]])
