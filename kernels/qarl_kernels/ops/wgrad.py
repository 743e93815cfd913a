"""Weight gradient over ragged experts: dW[e] = grad_out[rows of e]^T @ x[rows of e], BF16 in, FP32 accumulation.

The contracted axis is the ragged one: ragged descriptors read zeros beyond an expert's last row, so a partial step
needs no mask. A stack is written by the copy engine. Separate buffers (Megatron's `main_grad`) and those that are added
to are reached through a table of addresses, one per expert, with ordinary stores that hold up the products. Experts are
taken in order of falling row count, so that the longest tiles do not start last.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor

from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.gemm_checks import offsets_problems
from qarl_kernels.ops.launch import TileConfig, num_sms, tile_config
from qarl_kernels.ops.stacks import address_table, stack_shape
from qarl_kernels.ops.tiles import build_expert_order, descriptor, halves, load_ragged, tile_position

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
_OUT_DTYPES = tuple(_TRITON_DTYPES)


@triton.jit
def _store_stacked(out_desc, tile, expert, n, k, SPLIT: tl.constexpr):
    if SPLIT == 1:
        out_desc.store([expert, n, k], tile.to(out_desc.dtype).reshape(1, tile.shape[0], tile.shape[1]))
    else:
        left, right = halves(tile)
        half: tl.constexpr = tile.shape[1] // 2
        _store_stacked(out_desc, left, expert, n, k, SPLIT // 2)
        _store_stacked(out_desc, right, expert, n, k + half, SPLIT // 2)


@triton.jit
def _store_by_pointer(out_ptr, tile, n, k, N, K, ACCUMULATE: tl.constexpr, SPLIT: tl.constexpr):
    if SPLIT == 1:
        rows = n + tl.arange(0, tile.shape[0])
        columns = k + tl.arange(0, tile.shape[1])
        address = out_ptr + rows[:, None].to(tl.int64) * K + columns[None, :]
        mask = (rows < N)[:, None] & (columns < K)[None, :]
        if ACCUMULATE:
            tile += tl.load(address, mask=mask, other=0.0).to(tl.float32)
        tl.store(address, tile.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        # Slices limit the registers that hold the old values.
        left, right = halves(tile)
        half: tl.constexpr = tile.shape[1] // 2
        _store_by_pointer(out_ptr, left, n, k, N, K, ACCUMULATE, SPLIT // 2)
        _store_by_pointer(out_ptr, right, n, k + half, N, K, ACCUMULATE, SPLIT // 2)


@triton.jit
def _grouped_wgrad_kernel(
    grad_desc,  # [M, N] BF16, ragged
    x_desc,  # [M, K] BF16, ragged
    out_desc,  # [E, N, K], if STORED_BY_TABLE is false
    out_table_ptr,  # [E] int64, addresses of [N, K], if it is true
    order_ptr,  # [E] int32
    offsets_ptr,  # [E + 1] int32
    num_experts,
    N,
    K,
    OUT_DTYPE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # along N
    BLOCK_N: tl.constexpr,  # along K
    BLOCK_K: tl.constexpr,  # along rows
    GROUP_M: tl.constexpr,
    SPLIT: tl.constexpr,
    STORED_BY_TABLE: tl.constexpr,
):
    num_m_tiles = tl.cdiv(N, BLOCK_M)
    num_n_tiles = tl.cdiv(K, BLOCK_N)
    tiles_per_expert = num_m_tiles * num_n_tiles
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, num_experts * tiles_per_expert, step):
        expert = tl.load(order_ptr + tile // tiles_per_expert)
        m_tile, n_tile = tile_position(tile % tiles_per_expert, num_m_tiles, num_n_tiles, GROUP_M)
        start = tl.load(offsets_ptr + expert)
        stop = tl.load(offsets_ptr + expert + 1)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for row in tl.range(start, stop, BLOCK_K):
            grad = load_ragged(grad_desc, stop, row, m_tile * BLOCK_M, BLOCK_K, BLOCK_M)
            x = load_ragged(x_desc, stop, row, n_tile * BLOCK_N, BLOCK_K, BLOCK_N)
            acc = tl.dot(grad.T, x, acc)
        n, k = m_tile * BLOCK_M, n_tile * BLOCK_N
        if STORED_BY_TABLE:
            out_ptr = tl.multiple_of(tl.load(out_table_ptr + expert).to(tl.pointer_type(OUT_DTYPE)), 16)
            num_rows = tl.where((start < stop) | (not ACCUMULATE), N, 0)
            _store_by_pointer(out_ptr, acc, n, k, num_rows, K, ACCUMULATE, SPLIT)
        else:
            _store_stacked(out_desc, acc, expert, n, k, SPLIT)


def launch_grouped_wgrad(
    grad_out: Tensor, x: Tensor, offsets: Tensor, out: list[Tensor], accumulate: bool, config: TileConfig
) -> None:
    """Run the kernel with a given tile (for the operators below and for the tuner).

    Args:
        grad_out: [M, N] BF16.
        x: [M, K] BF16.
        offsets: [E + 1] int32.
        out: one tensor [E, N, K] or E tensors [N, K], written.
        accumulate: add to what out holds.
        config: the tile; programs_per_sm 0 launches one program per tile instead of persistent ones.
    """
    num_experts, n, k = stack_shape(out)
    if grad_out.shape[0] == 0:
        for tensor in [] if accumulate else out:
            tensor.zero_()
        return
    # The copy engine writes a stack while the next tile is computed; it cannot follow a table or add in BF16.
    by_table = accumulate or len(out) > 1 or out[0].dim() == 2 or not out[0].is_contiguous()
    box = [1, config.block_m, config.block_n // config.epilogue_split]
    tiles = num_experts * triton.cdiv(n, config.block_m) * triton.cdiv(k, config.block_n)
    persistent = num_sms(x.device.index if x.is_cuda else None) * config.programs_per_sm
    _grouped_wgrad_kernel[(min(tiles, persistent) if persistent else tiles,)](
        create_ragged_descriptor(grad_out, [config.block_k, config.block_m]),
        create_ragged_descriptor(x, [config.block_k, config.block_n]),
        None if by_table else descriptor(out[0], box),
        address_table(out)[0] if by_table else None,
        build_expert_order(offsets),
        offsets,
        num_experts,
        n,
        k,
        OUT_DTYPE=_TRITON_DTYPES[out[0].dtype],
        ACCUMULATE=accumulate,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        SPLIT=config.epilogue_split,
        STORED_BY_TABLE=by_table,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@torch.library.custom_op("qarl::grouped_wgrad", mutates_args=())
def _wgrad_op(grad_out: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    num_experts, n, k = offsets.shape[0] - 1, grad_out.shape[1], x.shape[1]
    out = x.new_empty(num_experts, n, k)
    launch_grouped_wgrad(grad_out, x, offsets, [out], False, tile_config("wgrad", x, n, k, num_experts, out.dtype))
    return out


@_wgrad_op.register_fake
def _(grad_out: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0] - 1, grad_out.shape[1], x.shape[1])


@torch.library.custom_op("qarl::grouped_wgrad_into", mutates_args=("out",))
def _wgrad_into_op(grad_out: Tensor, x: Tensor, offsets: Tensor, out: list[Tensor], accumulate: bool) -> None:
    num_experts, n, k = stack_shape(out)
    config = tile_config("wgrad", x, n, k, num_experts, out[0].dtype)
    launch_grouped_wgrad(grad_out, x, offsets, out, accumulate, config)


@_wgrad_into_op.register_fake
def _(grad_out: Tensor, x: Tensor, offsets: Tensor, out: list[Tensor], accumulate: bool) -> None:
    pass


def grouped_wgrad(
    grad_out: Tensor,
    x: Tensor,
    offsets: Tensor,
    *,
    out: Tensor | Sequence[Tensor] | None = None,
    accumulate: bool = False,
) -> Tensor | Sequence[Tensor]:
    """Sum each expert's outer products: dW[e] = grad_out_e^T @ x_e, or dW[e] += it; zero for an expert without rows.

    Args:
        grad_out: [M, N] BF16, rows sorted by expert.
        x: [M, K] BF16.
        offsets: [E + 1] int32.
        out: BF16 or FP32: [E, N, K] with any stride between experts, E tensors [N, K], or None = a new BF16 [E, N, K].
        accumulate: add to out in FP32, rounding once; out of an expert without rows stays as it is.

    Returns:
        out.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.
    """
    legal = (torch.bfloat16,)
    problems = tensor_problems("grad_out", grad_out, legal) + tensor_problems("x", x, legal)
    if not problems:
        problems += _shape_problems(grad_out, x) + offsets_problems(x, offsets.shape[0] - 1, offsets)
    if accumulate and out is None:
        problems.append("accumulate without out (legal: out, the tensor or tensors to add to)")
    tensors = [out] if isinstance(out, Tensor) else list(out or [])
    if not problems and out is not None:
        problems += _out_problems(tensors, [offsets.shape[0] - 1, grad_out.shape[1], x.shape[1]], x.device)
    refuse("grouped_wgrad", problems)
    if out is None:
        return _wgrad_op(grad_out, x, offsets)
    _wgrad_into_op(grad_out, x, offsets, tensors, accumulate)
    return out


def _shape_problems(grad_out: Tensor, x: Tensor) -> list[str]:
    problems = []
    if grad_out.shape[0] != x.shape[0]:
        problems.append(f"grad_out has {grad_out.shape[0]} rows (legal: {x.shape[0]}, as x)")
    for name, columns in (("grad_out", grad_out.shape[1]), ("x", x.shape[1])):
        if columns % 8 or columns == 0:
            problems.append(f"{name} has {columns} columns (legal: multiples of 8)")
    return problems


def _is_unaligned(tensor: Tensor) -> bool:
    step = tensor.stride(0) * tensor.element_size() if tensor.dim() == 3 else 0
    return bool(tensor.data_ptr() % 16 or step % 16)


def _out_problems(out: list[Tensor], shape: list[int], device: torch.device) -> list[str]:
    problems = []
    stacked = len(out) == 1 and out[0].dim() == 3
    if not stacked and len(out) != shape[0]:
        problems.append(f"out has {len(out)} tensors (legal: {shape[0]}, one per expert)")
    for index, tensor in enumerate(out):
        expected = shape if stacked else shape[1:]
        if list(tensor.shape) != expected or tensor.device != device:
            problems.append(f"out[{index}] is {list(tensor.shape)} on {tensor.device} (legal: {expected} on {device})")
        elif not (tensor[0] if stacked else tensor).is_contiguous() or _is_unaligned(tensor):
            problems.append(f"out[{index}] has strides {tensor.stride()} (legal: [K, 1] in an expert, 16-byte aligned)")
        if tensor.dtype not in _OUT_DTYPES or tensor.dtype != out[0].dtype:
            problems.append(f"out[{index}] is {tensor.dtype} (legal: {', '.join(map(str, _OUT_DTYPES))}, all the same)")
    return problems
