"""int4 weights in the order of vLLM's Marlin, and rows sorted as vLLM sorts them."""

import torch
from torch import Tensor

from qarl_kernels.decode_experts import BLOCK_ROWS, SortedRows


def pack_marlin(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Invert `unpack_marlin`, written from vLLM's kernel: lane 4 g + t of a 16 x 64 tile holds four words."""
    num_experts, n, k = codes.shape
    unsigned = (codes.to(torch.int32) + 8).mT
    words = torch.zeros(num_experts, k // 16, n // 64, 32, 4, dtype=torch.int32)
    tiles = unsigned.reshape(num_experts, k // 16, 16, n // 64, 64).transpose(2, 3)
    for lane in range(32):
        for part in range(4):
            column, row = part * 16 + lane // 4, lane % 4 * 2
            values = [tiles[:, :, :, row + offset, column + high] for high in (0, 8) for offset in (0, 1, 8, 9)]
            for place, value in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                words[:, :, :, lane, part] |= values[value] << (4 * place)
    order = [i + 8 * j for i in range(8) for j in range(8)]
    scales = scale.mT.reshape(num_experts, -1, n // 64, 64)[..., order]
    return words.view(num_experts, k // 16, 2 * n), scales.reshape(num_experts, -1, n).contiguous()


def sort_rows(index: Tensor, num_experts: int) -> SortedRows:
    """Sort rows by expert into blocks; the last block of each expert, and one after all, are filled with padding."""
    flat, rows, experts = index.flatten(), [], []
    for expert in range(num_experts):
        mine = (flat == expert).nonzero().flatten().tolist()
        mine += [flat.numel()] * (-len(mine) % BLOCK_ROWS)
        rows += mine
        experts += [expert] * (len(mine) // BLOCK_ROWS)
    count, unused = len(rows), [flat.numel()] * BLOCK_ROWS
    tensors = (rows + unused, [*experts, 0], [count])
    return SortedRows(*(torch.tensor(values, dtype=torch.int32, device=index.device) for values in tensors))
