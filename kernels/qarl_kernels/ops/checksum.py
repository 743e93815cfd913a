"""The checksum of a refit's tensors in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.ops.checks import refuse, tensor_problems

_BLOCK = 4096
_PROGRAMS_PER_SM = 8


@triton.jit
def _checksum_kernel(words_ptr, total_ptr, num_words, blocks_per_program, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * blocks_per_program
    total = tl.zeros((BLOCK,), tl.int64)
    for block in range(blocks_per_program):
        index = (first + block) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        words = tl.load(words_ptr + index, mask=index < num_words, other=0).to(tl.int64)
        total += words * (2 * index + 1)
    # Sums wrap modulo 2^64, so the order of the atomic additions does not matter.
    tl.atomic_add(total_ptr, tl.sum(total, 0))


def weighted_word_sum(words: Tensor) -> Tensor:
    """Return sum_i (2 i + 1) * word_i modulo 2^64.

    Args:
        words: [n] int32, contiguous, on a GPU.

    Returns:
        int64 scalar on the GPU.

    Raises:
        ValueError: words of another dtype or layout.
    """
    refuse("weighted_word_sum", tensor_problems("words", words, (torch.int32,), num_dims=1))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    num_blocks = triton.cdiv(words.numel(), _BLOCK)
    if num_blocks:
        programs = _PROGRAMS_PER_SM * torch.cuda.get_device_properties(words.device).multi_processor_count
        programs = min(programs, num_blocks)
        with torch.cuda.device(words.device):
            _checksum_kernel[(programs,)](words, total, words.numel(), triton.cdiv(num_blocks, programs), BLOCK=_BLOCK)
    return total
