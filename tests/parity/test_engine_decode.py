"""The decode kernel beside vLLM's Marlin: the same order of weights, the same products, and when it runs.

tests/integration/test_vllm_decode_calls.py has which calls it takes.
"""

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm", reason="needs vLLM 0.25.1", exc_type=ImportError)

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
from support.vllm.decoding import assert_is_marlins, counted  # noqa: E402

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
    cached = (engine_decode.decode_int4_experts, engine_decode._has_kernel)
    with counted(monkeypatch, "moe_wna16_marlin_gemm", "qarl_kernels.decode_experts.decode_experts", *cached) as ran:
        yield ran


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
    assert_is_marlins(experts.layer, expected, experts.packed["w2"][1][0])
    assert len(decoded) == 4


def test_larger_batches_are_marlins(decoded):
    experts = Experts(200)
    expected = experts.layer()
    engine_decode.decode_int4_experts()
    assert_bitwise_equal(experts.layer(), expected)
    assert not decoded


def test_padding_is_vllms():
    experts = Experts(7)
    sorted_rows = SortedRows(*moe_align_block_size(experts.index, BLOCK_ROWS, E, None, ignore_invalid_experts=True))
    found = decode_experts(experts.x, *experts.packed["w13"], sorted_rows, TOP_K)
    on_cpu = SortedRows(*(tensor.cpu() for tensor in sorted_rows))
    words, scale = (tensor.cpu() for tensor in experts.packed["w13"])
    assert_snr(found, decode_experts(experts.x.cpu(), words, scale, on_cpu, TOP_K), 70)
