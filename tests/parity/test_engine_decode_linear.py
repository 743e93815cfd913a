"""The dense decode kernel beside vLLM's Marlin: the same products, and when it runs."""

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm", reason="needs vLLM 0.25.1", exc_type=ImportError)

import vllm._custom_ops as ops  # noqa: E402
from vllm.model_executor.layers.quantization.utils.marlin_utils import (  # noqa: E402
    apply_gptq_marlin_linear,
    marlin_make_empty_g_idx,
    marlin_make_workspace_new,
)
from vllm.scalar_type import scalar_types  # noqa: E402

from qarl_kernels.decode_linear import decode_linear  # noqa: E402
from qarl_kernels.integer import quantize_integer  # noqa: E402
from qarl_nemo.refit import engine_decode_linear  # noqa: E402
from support.asserts import assert_bitwise_equal, assert_snr  # noqa: E402
from support.marlin import pack_marlin  # noqa: E402

K, N, GROUP = 1024, 512, 128


class Layer:
    """A dense layer as vLLM holds it for Marlin, and rows."""

    def __init__(self, rows):
        torch.manual_seed(0)
        codes, scale = quantize_integer(torch.randn(1, N, K) / 32, 4, GROUP, "clipped_range")
        self.words, self.scale = (part[0].cuda() for part in pack_marlin(codes, scale))
        self.x = torch.randn(rows, K, device="cuda").bfloat16()
        device = self.x.device
        self.empty, self.workspace = marlin_make_empty_g_idx(device), marlin_make_workspace_new(device)

    def run(self, bias=None):
        return apply_gptq_marlin_linear(
            self.x, self.words, self.scale, self.empty, self.empty, self.empty, self.workspace, scalar_types.uint4b8,
            N, K, is_k_full=True, bias=bias,
        )  # fmt: skip


@pytest.fixture
def decoded(monkeypatch):
    """Lets vLLM's dense layers decode by the kernel during a test; counts how often it ran."""
    ran = []

    def count(*arguments):
        ran.append(arguments)
        return decode_linear(*arguments)

    monkeypatch.setattr(ops, "marlin_gemm", ops.marlin_gemm)
    monkeypatch.setattr("qarl_kernels.decode_linear.decode_linear", count)
    engine_decode_linear.decode_int4_linear.cache_clear()
    yield ran
    engine_decode_linear.decode_int4_linear.cache_clear()
    engine_decode_linear._has_kernels.cache_clear()


@pytest.mark.parametrize("rows", [1, 13, 32])
def test_a_layer_decodes_as_marlin_does(decoded, rows):
    layer = Layer(rows)
    expected = layer.run()
    engine_decode_linear.decode_int4_linear()
    found = layer.run()
    assert len(decoded) == 1
    # Sums in another order change a last bit here and there.
    assert_snr(found, expected, 60)
    assert float((found == expected).float().mean()) > 0.98
    layer.scale[0] *= 1.01
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(layer.run(), expected, 60)


@pytest.mark.parametrize(("rows", "biased", "strided"), [(33, False, False), (7, True, False), (7, False, True)])
def test_larger_batches_biases_and_rows_apart_are_marlins(decoded, rows, biased, strided):
    layer = Layer(rows)
    if strided:
        layer.x = torch.randn(rows, 2 * K, device="cuda").bfloat16()[:, :K]
    bias = torch.ones(N, device="cuda", dtype=torch.bfloat16) if biased else None
    expected = layer.run(bias)
    engine_decode_linear.decode_int4_linear()
    assert_bitwise_equal(layer.run(bias), expected)
    assert not decoded


def test_all_are_marlins_where_someone_says_so(decoded, monkeypatch):
    monkeypatch.setenv(engine_decode_linear.SWITCH, "0")
    layer = Layer(7)
    engine_decode_linear.decode_int4_linear()
    layer.run()
    assert not decoded


def test_a_kernel_that_cannot_be_compiled_leaves_all_to_marlin_and_says_so(decoded, monkeypatch):
    def fail(*_):
        raise RuntimeError("no NVRTC")

    monkeypatch.setattr("qarl_kernels.ops.decode_linear.linear_kernel", fail)
    engine_decode_linear._has_kernels.cache_clear()
    engine_decode_linear.decode_int4_linear()
    with pytest.warns(
        UserWarning, match="int4 layers decode by Marlin, since a kernel could not be compiled: no NVRTC"
    ):
        Layer(7).run()
    assert not decoded
