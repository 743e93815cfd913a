import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qarl_nemo.refit.manifest as manifest_module
from qarl_kernels import get_format, quantize_weight
from qarl_nemo.refit.incoming import IncomingUpdate
from qarl_nemo.refit.manifest import Manifest, TensorRecord, checksums
from support.asserts import assert_bitwise_equal

DTYPES = [
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
]


def checksum(tensor):
    """One tensor's checksum."""
    return checksums([tensor])[0]


def as_int64(value):
    """A Python integer modulo 2^64, as torch's signed 64-bit integers hold it."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def test_checksums_by_hand():
    # sum (2 i + 1) word_i, plus the number of bytes: 12 + 1 * 5 + 3 * (-7) + 5 * 11 = 51.
    assert checksum(torch.tensor([5, -7, 11], dtype=torch.int32)) == 12 + 5 - 21 + 55
    # Five bytes are two words, the second padded with zeros: 0x04030201 and 0x00000005.
    assert checksum(torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)) == 5 + 0x04030201 + 3 * 5
    # BF16 1.0 is 0x3F80: two of them are the word 0x3F803F80.
    assert checksum(torch.ones(2).bfloat16()) == 4 + 0x3F803F80
    assert checksum(torch.tensor(True)) == 1 + 1


def test_checksums_wrap_at_64_bits():
    # A word is at most 2^31 in size: sums pass 2^63 only from some 10^6 words on; the formula in Python integers.
    words = torch.full((1 << 20,), 2**31 - 1, dtype=torch.int32)
    words = torch.cat([words, words, words])
    # sum (2 i + 1) over n words is n^2.
    assert checksum(words) == as_int64(4 * len(words) + (2**31 - 1) * len(words) ** 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (2, 3, 4)])
def test_one_flipped_bit_changes_the_checksum(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    flat = tensor.view(-1).view(torch.uint8)
    for byte in range(flat.numel()):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            assert checksum(tensor) != before
            flat[byte] ^= 1 << bit
    assert checksum(tensor) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_tensors_have_a_checksum(dtype):
    assert checksum(torch.empty(0, dtype=dtype)) == 0
    assert checksum(torch.empty(3, 0, dtype=dtype)) == 0


def test_two_different_words_that_change_places_change_the_checksum():
    words = torch.randint(-(2**31), 2**31, (64,)).int()
    for left in range(64):
        swapped = words.clone()
        right = (left + 17) % 64
        swapped[left], swapped[right] = words[right], words[left]
        assert checksum(swapped) != checksum(words)
        # The plain sum, which knows no position, would not notice.
        assert int(swapped.long().sum()) == int(words.long().sum())


def test_bytes_that_change_places_inside_a_word_change_the_checksum():
    assert checksum(torch.tensor([1, 2, 3, 4]).byte()) != checksum(torch.tensor([2, 1, 3, 4]).byte())


def test_trailing_zeros_count():
    assert len({checksum(torch.zeros(size, dtype=torch.uint8)) for size in range(9)}) == 9


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 16), st.integers(0, 2**16))
def test_chunks_do_not_change_the_checksum(num_words, chunk_words, seed):
    words = torch.randint(-(2**31), 2**31, (num_words,), generator=torch.Generator().manual_seed(seed)).int()
    expected = as_int64(4 * num_words + sum((2 * i + 1) * word for i, word in enumerate(words.tolist())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_module, "_CHUNK_WORDS", chunk_words)
        assert checksum(words) == expected


def test_strides_do_not_change_the_checksum():
    grid = torch.randn(6, 10)
    assert checksum(grid.mT) == checksum(grid.mT.contiguous())
    assert checksum(grid[1:5, 3:8]) == checksum(grid[1:5, 3:8].clone())
    # One element counts as contiguous whatever its stride, and so may an odd offset.
    halves = torch.randn(9).bfloat16()
    assert checksum(halves[1::8]) == checksum(torch.tensor([halves[1].item()]).bfloat16())
    assert checksum(halves[1:]) == checksum(halves[1:].clone())
    assert checksum(grid.clone().requires_grad_()) == checksum(grid)


@pytest.fixture
def tensors():
    return {
        "q_proj.weight_packed": torch.randint(-(2**31), 2**31, (4, 8)).int(),
        "q_proj.weight_scale": torch.rand(4, 2).bfloat16(),
        "k_proj.weight": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "norm.weight": torch.ones(8),
        "empty": torch.zeros(0, 3),
    }


def problems_of(manifest, arrived):
    """What a rank finds wrong with tensors that arrived."""
    update = IncomingUpdate(manifest, layer_of=str, part=lambda _, whole: whole)
    update.add(arrived)
    return update.problems()


def test_a_manifest_records_every_tensor(tensors):
    manifest = Manifest.of([tensors], version=7, fmt="w4a16")
    assert (manifest.version, manifest.format, list(manifest.records)) == (7, "w4a16", list(tensors))
    scale = tensors["q_proj.weight_scale"]
    assert manifest.records["q_proj.weight_scale"] == TensorRecord((4, 2), "bfloat16", checksum(scale))
    assert manifest.records["k_proj.weight"].dtype == "float8_e4m3fn"
    assert problems_of(manifest, tensors) == []
    assert problems_of(manifest, {name: tensor.clone() for name, tensor in reversed(tensors.items())}) == []


def test_every_problem_is_listed_at_once(tensors):
    layers = [tensors, {"o_proj.weight": torch.ones(2), "bias": torch.ones(2)}]
    manifest = Manifest.of(layers, version=1, fmt="w4a16")
    arrived = {name: tensor.clone() for name, tensor in tensors.items() if name != "empty"}
    arrived["extra.weight"] = torch.zeros(1)
    arrived["q_proj.weight_packed"] = arrived["q_proj.weight_packed"].view(8, 4)
    arrived["q_proj.weight_scale"] = arrived["q_proj.weight_scale"].view(torch.float16)
    arrived["k_proj.weight"].view(torch.uint8)[3, 1] ^= 1
    arrived["o_proj.weight"] = torch.ones(2)
    assert sorted(problems_of(manifest, arrived)) == [
        "k_proj.weight: its bytes differ from the manifest's checksum",
        "missing: bias",
        "missing: empty",
        "not in the manifest: extra.weight",
        "q_proj.weight_packed: got int32 [8, 4], the manifest says int32 [4, 8]",
        "q_proj.weight_scale: got float16 [4, 2], the manifest says bfloat16 [4, 2]",
    ]


def test_two_tensors_that_change_places_are_found():
    tensors = {"a": torch.ones(4), "b": torch.zeros(4)}
    manifest = Manifest.of([tensors], version=1, fmt="bf16")
    assert len(problems_of(manifest, {"a": tensors["b"], "b": tensors["a"]})) == 2


def test_the_engines_layout_is_compared_whole(tensors):
    expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    manifest = Manifest.of([tensors], version=1, fmt="bf16")
    assert manifest.layout_problems(expected) == []
    expected["o_proj.weight"] = ((2,), torch.float32)
    expected["norm.weight"] = ((8,), torch.bfloat16)
    expected["q_proj.weight_scale"] = ((4, 1), torch.bfloat16)
    del expected["empty"]
    assert sorted(manifest.layout_problems(expected)) == [
        "norm.weight is float32 [8], this engine holds bfloat16 [8]",
        "q_proj.weight_scale is bfloat16 [4, 2], this engine holds bfloat16 [4, 1]",
        "the update lacks o_proj.weight, which this engine needs",
        "this engine has no place for empty",
    ]


NESTED = get_format("w4a16", group_size=32, nested_in="w8a16")


def nested_update(weight, grid_bits=4):
    stored = quantize_weight(weight, NESTED)
    tensors = {f"q_proj.{suffix}": tensor for suffix, tensor in stored.tensors.items()} | {"norm.weight": torch.ones(8)}
    return tensors, Manifest.of([tensors], version=1, fmt="w4a16", published="w8a16", grid_bits=grid_bits)


@pytest.mark.parametrize("grid_bits", [4, 2])
def test_codes_that_come_nested_are_rounded_on_arrival(grid_bits):
    tensors, manifest = nested_update(torch.randn(8, 64), grid_bits)
    manifest = Manifest.from_message(manifest.to_message())
    fmt = dataclasses.replace(NESTED, grid_bits=grid_bits)
    assert manifest.nested == dataclasses.replace(fmt, group_size=128)
    # The engine's own shapes, eight codes a word, stand for the update's, with four.
    layout = {"q_proj.weight_packed": ((8, 8), torch.int32), "q_proj.weight_scale": ((8, 2), torch.bfloat16)}
    layout |= {"norm.weight": ((8,), torch.float32)}
    assert manifest.layout_problems(layout) == []
    plain = Manifest.of([tensors], version=1, fmt="w4a16").layout_problems(layout)
    assert plain == ["q_proj.weight_packed is int32 [8, 16], this engine holds int32 [8, 8]"]
    layout["q_proj.weight_packed"] = ((8, 4), torch.int32)
    assert manifest.layout_problems(layout) == [
        "q_proj.weight_packed is int32 [8, 16], this engine takes from w8a16 int32 [8, 8]"
    ]
    update = IncomingUpdate(manifest, layer_of=lambda name: name.rpartition(".")[0], part=lambda _, whole: whole)
    update.add(tensors)
    assert update.problems() == []
    served = quantize_weight(torch.zeros(8, 64), fmt)
    served.tensors.update({name.rpartition(".")[2]: one for name, one in tensors.items() if "q_proj" in name})
    for suffix, tensor in served.narrowed().tensors.items():
        assert_bitwise_equal(update.layers["q_proj"][f"q_proj.{suffix}"], tensor)
    assert update.layers["norm"]["norm.weight"] is tensors["norm.weight"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"published": "w6a16"}, "nested_in='w6a16'"),
        ({"format": "fp8_block"}, "takes no nested_in"),
        ({"grid_bits": 8}, "grid_bits=8: codes of w4a16 have 2 to 4 bits"),
        ({"grid_bits": 1}, "grid_bits=1: codes of w4a16 have 2 to 4 bits"),
    ],
)
def test_a_nesting_that_cannot_be_is_no_manifest(change, problem):
    _, manifest = nested_update(torch.randn(8, 64))
    with pytest.raises(ValueError, match=problem):
        Manifest.from_message(manifest.to_message() | change)
