import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl_kernels.integer import pack_int32, unpack_int32
from support.asserts import assert_bitwise_equal

ALL_BITS = range(2, 9)
# Of these a word holds whole codes, and compressed-tensors 0.17.0 packs them as vLLM reads them.
WHOLE_BITS = (2, 4, 8)


def random_codes(num_bits, *shape, seed=0):
    low, high = -(2 ** (num_bits - 1)), 2 ** (num_bits - 1)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(low, high, shape, generator=generator).to(torch.int8)
    codes.view(-1)[0], codes.view(-1)[-1] = low, high - 1
    return codes


def test_a_word_by_hand():
    # Codes -8 .. -1 are stored with the offset 8 as 0 .. 7, the first in the lowest nibble: 0x76543210.
    assert_bitwise_equal(pack_int32(torch.arange(-8, 0, dtype=torch.int8)[None], 4), torch.tensor([[0x76543210]]).int())
    # Codes 0 .. 7 are stored as 8 .. 15: 0xFEDCBA98, whose sign bit is set: 0xFEDCBA98 - 2^32.
    words = pack_int32(torch.arange(8, dtype=torch.int8)[None], 4)
    assert_bitwise_equal(words, torch.tensor([[0xFEDCBA98 - 2**32]]).int())
    # Three bits: codes -4 .. 3, -4, -4, 3 are 0 .. 7, 0, 0, 7 = octal 70076543210. Of the last code two bits end the
    # first word, the upper one as its sign, and the third begins the second word.
    codes = torch.tensor([[-4, -3, -2, -1, 0, 1, 2, 3, -4, -4, 3]], dtype=torch.int8)
    assert_bitwise_equal(pack_int32(codes, 3), torch.tensor([[0o30076543210 - 2**32, 1]]).int())


@pytest.mark.parametrize("num_bits", ALL_BITS)
def test_a_row_is_one_stream_of_bits(num_bits):
    codes = random_codes(num_bits, 2, 45)
    for row, words in zip(codes.tolist(), pack_int32(codes, num_bits).tolist(), strict=True):
        stream = sum((code + 2 ** (num_bits - 1)) << (num_bits * place) for place, code in enumerate(row))
        assert sum((word % 2**32) << (32 * place) for place, word in enumerate(words)) == stream
        assert len(words) == -(-45 * num_bits // 32)


def test_the_tail_of_the_last_word_is_zero_bits():
    # One code, 7 + 8 = 15 in the lowest nibble; the seven absent codes leave zeros, not the offset.
    assert_bitwise_equal(pack_int32(torch.tensor([[7]], dtype=torch.int8), 4), torch.tensor([[15]]).int())


@pytest.mark.parametrize("num_bits", WHOLE_BITS)
@pytest.mark.parametrize("shape", [(3, 128), (5, 37), (1, 1), (2, 3, 41)])
def test_packing_is_compressed_tensors(num_bits, shape):
    codes = random_codes(num_bits, *shape)
    words = pack_int32(codes, num_bits)
    assert_bitwise_equal(words, pack_to_int32(codes, num_bits))
    assert_bitwise_equal(unpack_int32(words, num_bits, shape[-1]), codes)
    assert_bitwise_equal(unpack_from_int32(words, num_bits, torch.Size(shape)), codes)


@pytest.mark.parametrize("num_bits", WHOLE_BITS)
def test_any_word_unpacks_as_compressed_tensors_does(num_bits):
    words = torch.randint(-(2**31), 2**31, (4, 6)).int()
    shape = torch.Size((4, 6 * (32 // num_bits) - 1))
    ours = unpack_int32(words, num_bits, shape[-1])
    assert_bitwise_equal(ours, unpack_from_int32(words, num_bits, shape))
    assert_bitwise_equal(pack_int32(ours, num_bits), pack_to_int32(ours, num_bits))


def test_another_lane_order_or_offset_is_noticed():
    codes = random_codes(4, 3, 128)
    highest_first = pack_int32(codes.unflatten(-1, (-1, 8)).flip(-1).flatten(-2), 4)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(highest_first, pack_to_int32(codes, 4))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(unpack_int32(pack_to_int32(codes, 4), 4, 128) + 1, codes)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(ALL_BITS), st.integers(1, 4), st.integers(1, 70), st.integers(0, 2**16))
def test_unpacking_inverts_packing(num_bits, rows, columns, seed):
    codes = random_codes(num_bits, rows, columns, seed=seed) if rows * columns > 1 else torch.zeros(1, 1).to(torch.int8)
    words = pack_int32(codes, num_bits)
    assert words.shape == (rows, -(-columns * num_bits // 32))
    assert_bitwise_equal(unpack_int32(words, num_bits, columns), codes)
