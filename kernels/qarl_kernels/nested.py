"""Nested grids: one set of 8-bit codes, which an engine of fewer bits rounds when they arrive.

With codes c of 8 bits and their scale s, and b bits of the grid that is wanted:

    narrowed code    clamp(rn(c / 2^(8-b)), -2^(b-1), 2^(b-1) - 1)
    narrowed scale   s * 2^(8-b)                                    exact in BF16

Rounding goes to the nearest grid point, ties to even. A right shift would round down and lose 5 dB at 4 bits: it needs
a zero point half a step off, which the engines' kernels do not have.

Source: arXiv 2604.07888, nested grids by shifts; with rounding as in MatQuant, arXiv 2502.06786.
"""

import functools

import torch
from torch import Tensor

from qarl_formats import QuantFormat

_NESTED_BITS = 8
# Bounds the memory of indices, eight bytes a pair: 128 MiB.
_PAIRS_AT_ONCE = 2**24


def narrow_tensor(suffix: str, tensor: Tensor, fmt: QuantFormat) -> Tensor:
    """Round one published tensor to what the format's engines hold.

    Args:
        suffix: `weight_packed` or `weight_scale`.
        tensor: codes [..., N, K / 4] int32, four in a word, or scales [..., N, K / group_size] BF16.
        fmt: the format, with `nested_bits`.

    Returns:
        Codes [..., N, K * num_bits / 32] int32, or scales [..., N, K / group_size] BF16.
    """
    if suffix == "weight_scale":
        return tensor * 2.0 ** (_NESTED_BITS - fmt.grid_bits)
    return _narrow_words(tensor, fmt.grid_bits, fmt.num_bits)


def _narrow_words(words: Tensor, grid_bits: int, num_bits: int) -> Tensor:
    table = _pair_table(grid_bits, num_bits, words.device)
    pairs = words.contiguous().view(torch.int16)
    # Those of 2^15 and more read as negative, and count from the table's end.
    narrowed = torch.cat([table[some.long()] for some in pairs.flatten().split(_PAIRS_AT_ONCE)]).view(pairs.shape)
    if 2 * num_bits < _NESTED_BITS:
        first, second = narrowed.unflatten(-1, (-1, 2)).unbind(-1)
        narrowed = first | (second << (2 * num_bits))
    return narrowed.view(torch.int32)


@functools.lru_cache(maxsize=16)
def _pair_table(grid_bits: int, num_bits: int, device: torch.device) -> Tensor:
    """Return what each pair of neighbouring codes becomes: two bytes of a code each, a byte of both, or half a byte."""
    shift, offset = _NESTED_BITS - grid_bits, 1 << (num_bits - 1)
    code = torch.arange(256) - 128
    if shift:
        # Half a step less one, and one more above odd codes: ties go to the even neighbour.
        code = (code + ((1 << (shift - 1)) - 1) + ((code >> shift) & 1)) >> shift
    code = code.clamp(-(1 << (grid_bits - 1)), (1 << (grid_bits - 1)) - 1) + offset
    second, first = code[:, None], code[None, :]
    pair = (first + (second << num_bits)).flatten()
    table = pair.to(torch.uint8) if 2 * num_bits <= _NESTED_BITS else pair.to(torch.int32).view(torch.int16)[::2]
    return table.contiguous().to(device)
