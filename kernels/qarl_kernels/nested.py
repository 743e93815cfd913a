"""Nested grids: one set of 8-bit codes, which an engine of fewer bits rounds when they arrive.

With codes c of 8 bits and their scale s, and b bits of the grid that is wanted:

    narrowed code    clamp(rn(c / 2^(8-b)), -2^(b-1), 2^(b-1) - 1)
    narrowed scale   s * 2^(8-b)                                    exact in BF16

Rounding goes to the nearest grid point, ties to even. A right shift would round down and lose 5 dB at 4 bits: it needs
a zero point half a step off, which the engines' kernels do not have.

Source: arXiv 2604.07888, nested grids by shifts; with rounding as in MatQuant, arXiv 2502.06786.
"""

import torch
from torch import Tensor

from qarl_formats import QuantFormat

_NESTED_BITS = 8
_BYTES_PER_WORD = 4


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
    # Word by word, because codes one by one would take sixteen times the memory of a layer's packed weights.
    shift, offset = _NESTED_BITS - grid_bits, 1 << (num_bits - 1)
    sources = words.unflatten(-1, (-1, _NESTED_BITS // num_bits))
    narrowed = torch.zeros_like(sources[..., 0])
    for lane in range(32 // num_bits):
        source, byte = divmod(lane, _BYTES_PER_WORD)
        code = ((sources[..., source] >> (8 * byte)) & 0xFF) - 128
        if shift:
            # Half a step less one, and one more above odd codes: ties go to the even neighbour.
            code = (code + ((1 << (shift - 1)) - 1) + ((code >> shift) & 1)) >> shift
        code = code.clamp_(-(1 << (grid_bits - 1)), (1 << (grid_bits - 1)) - 1)
        narrowed |= (code + offset) << (num_bits * lane)
    return narrowed
