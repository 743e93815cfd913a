"""The dense decode kernel beside vLLM's Marlin: the same products, and when it runs.

tests/integration/test_vllm_decode_calls.py has which calls it takes.
"""

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

from qarl_kernels.integer import quantize_integer  # noqa: E402
from qarl_nemo.refit import engine_decode_linear  # noqa: E402
from support.asserts import assert_bitwise_equal  # noqa: E402
from support.marlin import pack_marlin  # noqa: E402
from support.vllm.decoding import assert_is_marlins, counted  # noqa: E402

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
    cached = (engine_decode_linear.decode_int4_linear, engine_decode_linear._has_kernels)
    with counted(monkeypatch, "marlin_gemm", "qarl_kernels.decode_linear.decode_linear", *cached) as ran:
        yield ran


@pytest.mark.parametrize("rows", [1, 13, 32])
def test_a_layer_decodes_as_marlin_does(decoded, rows):
    layer = Layer(rows)
    expected = layer.run()
    engine_decode_linear.decode_int4_linear()
    assert_is_marlins(layer.run, expected, layer.scale[0])
    assert len(decoded) == 2


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


def test_operands_that_a_layer_names_are_marlins(decoded):
    """As vLLM's dense NVFP4 layers name theirs."""
    layer = Layer(7)
    expected = layer.run()
    engine_decode_linear.decode_int4_linear()
    found = ops.marlin_gemm(
        a=layer.x, c=None, b_q_weight=layer.words, b_bias=None, b_scales=layer.scale, a_scales=None, global_scale=None,
        b_zeros=layer.empty, g_idx=layer.empty, perm=layer.empty, workspace=layer.workspace,
        b_q_type=scalar_types.uint4b8, size_m=7, size_n=N, size_k=K, use_fp32_reduce=True,
    )  # fmt: skip
    assert_bitwise_equal(found, expected)
    assert not decoded
