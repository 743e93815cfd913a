"""Each token is turned by the cosine and sine of its place in its own sequence, whichever rank and row it is in."""

from types import SimpleNamespace

import pytest
import torch

from support.asserts import assert_bitwise_equal

pytest.importorskip("megatron", reason="needs megatron-core: pip install megatron-core==0.16.1")

# isort: split
from qarl_nemo.megatron.engine_rounding import Rotating

WIDTH = 16


class Ranks:
    """What Megatron asks of a context parallel group."""

    def __init__(self, size, rank):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def angles(length):
    halves = torch.arange(length)[:, None] * (10.0 ** -torch.linspace(0, 2, WIDTH // 2))
    return torch.cat([halves, halves], -1)


def places_of(lengths, size, rank):
    """A rank's tokens of each sequence: its part from the front, and the one as far from the end."""
    places = []
    for length in lengths:
        parts = torch.arange(length).chunk(2 * size)
        places += [parts[rank], parts[2 * size - 1 - rank]] if size > 1 else [*parts]
    return torch.cat(places)


def tables(num_tokens, size, rank, packed):
    attention = object.__new__(Rotating)
    attention.pg_collection = SimpleNamespace(cp=Ranks(size, rank))
    attention._angles, attention._packed = angles(64)[:, None, None], packed
    return attention._cos_and_sin(torch.zeros(num_tokens, 1, 2, WIDTH, dtype=torch.bfloat16))


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("lengths", [(64,), (16, 32, 8), (8, 8)])
def test_packed_sequences_begin_anew(lengths, size, rank):
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_q_padded=None, max_seqlen_q=max(lengths))
    places = places_of(lengths, size, rank)
    cos, sin = tables(len(places), size, rank, packed)
    expected = angles(64)[places][:, None]
    assert_bitwise_equal(cos, expected.cos().bfloat16())
    assert_bitwise_equal(sin, expected.sin().bfloat16())
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(sin, expected.roll(1, 0).sin().bfloat16())


def test_an_unpacked_row_counts_through():
    cos, sin = tables(64, 1, 0, None)
    assert_bitwise_equal(cos, angles(64)[:, None].cos().bfloat16())
    assert_bitwise_equal(sin, angles(64)[:, None].sin().bfloat16())
