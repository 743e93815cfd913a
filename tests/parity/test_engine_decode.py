"""The decode kernel beside vLLM's Marlin: the same order of weights, the same products, and when it runs."""

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm", reason="needs vLLM 0.25.1", exc_type=ImportError)

import vllm._custom_ops as ops  # noqa: E402
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe  # noqa: E402
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size  # noqa: E402
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_scales  # noqa: E402
from vllm.scalar_type import scalar_types  # noqa: E402

from qarl_kernels.decode_experts import BLOCK_ROWS, SortedRows, decode_experts  # noqa: E402
from qarl_kernels.integer import pack_int32, quantize_integer  # noqa: E402
from qarl_nemo.refit import engine_decode  # noqa: E402
from qarl_nemo.refit.convert_int4 import repack_experts  # noqa: E402
from support.asserts import assert_bitwise_equal, assert_snr  # noqa: E402
from support.marlin import pack_marlin  # noqa: E402

E, H, INNER, TOP_K, GROUP = 16, 512, 256, 4, 64


class Experts:
    """Both weights of a layer, as vLLM holds them, and tokens."""

    def __init__(self, tokens):
        torch.manual_seed(0)
        sizes = {"w13": (2 * INNER, H), "w2": (H, INNER)}
        codes = {
            name: quantize_integer(torch.randn(E, *size) / 16, 4, GROUP, "clipped_range")
            for name, size in sizes.items()
        }
        self.codes = codes
        self.packed = {name: [part.cuda() for part in pack_marlin(*pair)] for name, pair in codes.items()}
        self.x = torch.randn(tokens, H, device="cuda").bfloat16()
        scores = torch.rand(tokens, E, device="cuda").softmax(-1)
        self.weight, index = scores.topk(TOP_K, dim=-1)
        self.index = index.int()

    def layer(self):
        (w13, s13), (w2, s2) = self.packed.values()
        return fused_marlin_moe(self.x, w13, w2, None, None, s13, s2, self.weight, self.index, scalar_types.uint4b8.id)


@pytest.fixture
def decoded(monkeypatch):
    """Lets vLLM's experts decode by the kernel during a test; counts how often it ran."""
    ran = []
    monkeypatch.setattr(ops, "moe_wna16_marlin_gemm", ops.moe_wna16_marlin_gemm)
    monkeypatch.setattr("qarl_kernels.decode_experts.decode_experts", _counting(decode_experts, ran))
    engine_decode.decode_int4_experts.cache_clear()
    yield ran
    engine_decode.decode_int4_experts.cache_clear()
    engine_decode._has_kernel.cache_clear()


def _counting(function, ran):
    def count(*arguments):
        ran.append(arguments)
        return function(*arguments)

    return count


def test_weights_are_in_marlins_order():
    experts = Experts(1)
    for name, (codes, scale) in experts.codes.items():
        packed = pack_int32(codes, 4).mT.contiguous().cuda()
        words, scales = experts.packed[name]
        assert_bitwise_equal(repack_experts(packed), words)
        n, k = codes.shape[1:]
        permuted = marlin_permute_scales(scale.mT.reshape(-1, n).contiguous().cuda(), k, n, GROUP)
        assert_bitwise_equal(permuted.view_as(scales), scales)


@pytest.mark.parametrize("tokens", [1, 7, 20])
def test_a_layer_decodes_as_marlin_does(decoded, tokens):
    experts = Experts(tokens)
    expected = experts.layer()
    engine_decode.decode_int4_experts()
    found = experts.layer()
    assert len(decoded) == 2
    # Sums in another order change a last bit here and there.
    assert_snr(found, expected, 60)
    assert float((found == expected).float().mean()) > 0.98
    experts.packed["w2"][1][0] *= 1.01
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(experts.layer(), expected, 60)


def test_larger_batches_are_marlins(decoded):
    experts = Experts(200)
    expected = experts.layer()
    engine_decode.decode_int4_experts()
    assert_bitwise_equal(experts.layer(), expected)
    assert not decoded


def test_the_switch_leaves_all_to_marlin(decoded, monkeypatch):
    monkeypatch.setenv(engine_decode.SWITCH, "0")
    experts = Experts(7)
    engine_decode.decode_int4_experts()
    experts.layer()
    assert not decoded


def test_a_kernel_that_cannot_be_compiled_leaves_all_to_marlin_and_says_so(decoded, monkeypatch):
    def fail(*_):
        raise RuntimeError("no NVRTC")

    monkeypatch.setattr("qarl_kernels.ops.decode_experts.decode_kernel", fail)
    engine_decode._has_kernel.cache_clear()
    engine_decode.decode_int4_experts()
    with pytest.warns(
        UserWarning, match="int4 experts decode by Marlin, since the kernel could not be compiled: no NVRTC"
    ):
        Experts(7).layer()
    assert not decoded
    engine_decode._has_kernel.cache_clear()


def test_padding_is_vllms():
    experts = Experts(7)
    sorted_rows = SortedRows(*moe_align_block_size(experts.index, BLOCK_ROWS, E, None, ignore_invalid_experts=True))
    found = decode_experts(experts.x, *experts.packed["w13"], sorted_rows, TOP_K)
    on_cpu = SortedRows(*(tensor.cpu() for tensor in sorted_rows))
    words, scale = (tensor.cpu() for tensor in experts.packed["w13"])
    assert_snr(found, decode_experts(experts.x.cpu(), words, scale, on_cpu, TOP_K), 70)
