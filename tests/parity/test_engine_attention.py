"""vLLM's FlashAttention 3 in the learner: the engine's bits forward, torch's gradient backward."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qarl_nemo.train.engine_attention import engine_attention_problem
from qarl_nemo.train.packing import Packing
from support.asserts import assert_bitwise_equal, assert_snr

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(engine_attention_problem() is not None, reason=str(engine_attention_problem())),
]

MODULE = SimpleNamespace(scaling=128**-0.5)
LENGTH = 300


def attend(query, key, value, *, kernel="packed_engine", **options):
    """Each [B, heads, S, D] -> [B, S, heads, D]."""
    return ALL_ATTENTION_FUNCTIONS[kernel](MODULE, query, key, value, None, **options)[0]


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    shapes = (2, 8, LENGTH, 128), (2, 2, LENGTH, 128), (2, 2, LENGTH, 128)
    return [torch.randn(shape, device="cuda").to(torch.bfloat16).requires_grad_() for shape in shapes]


def exact(inputs, *, causal=True):
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wide[1:] = [tensor.repeat_interleave(4, 1) for tensor in wide[1:]]
    out = nn.functional.scaled_dot_product_attention(*wide, is_causal=causal, scale=MODULE.scaling)
    return wide, out.transpose(1, 2)


def test_it_attends_causally(inputs):
    out = attend(*inputs)
    assert_snr(out, exact(inputs)[1], 45)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(out, exact(inputs, causal=False)[1], 45)


def test_the_kernel_is_the_one_vllm_calls(inputs):
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    bounds = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32, device="cuda")
    laid_out = [tensor.detach().transpose(1, 2).flatten(0, 1).contiguous() for tensor in inputs]
    options = {"max_seqlen_q": LENGTH, "max_seqlen_k": LENGTH, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    expected = flash_attn_varlen_func(*laid_out, **options, softmax_scale=MODULE.scaling, causal=True, fa_version=3)
    assert_bitwise_equal(attend(*inputs).flatten(0, 1), expected)
    heads_first = [tensor.detach() for tensor in inputs]
    torchs = nn.functional.scaled_dot_product_attention(
        *heads_first, is_causal=True, scale=MODULE.scaling, enable_gqa=True
    )
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(torchs.transpose(1, 2).flatten(0, 1), expected)


def test_gradients_are_those_of_the_exact_attention(inputs):
    grad_out = torch.randn(2, LENGTH, 8, 128, device="cuda")
    wide, expected = exact(inputs)
    expected_grads = torch.autograd.grad(expected, wide, grad_out.double())
    grads = torch.autograd.grad(attend(*inputs), inputs, grad_out.to(torch.bfloat16))
    for grad, reference in zip(grads, expected_grads, strict=True):
        heads = reference.unflatten(1, (grad.shape[1], -1)).sum(2)
        assert_snr(grad, heads, 35)
        with pytest.raises(AssertionError, match="SNR"):
            assert_snr(grad, heads.roll(1, 2), 35)


LENGTHS = [70, 1, 229]


@pytest.mark.parametrize("kernel", ["packed_engine", "packed_torch"])
def test_packed_sequences_read_themselves_alone(inputs, kernel):
    row = [tensor[:1] for tensor in inputs]
    packing = Packing.of(torch.tensor(LENGTHS, device="cuda"))
    packed = attend(*row, kernel=kernel, packing=packing)
    alone = [attend(*parts, kernel=kernel) for parts in zip(*(tensor.split(LENGTHS, 2) for tensor in row), strict=True)]
    if kernel == "packed_engine":
        assert_bitwise_equal(packed, torch.cat(alone, 1))
    assert_snr(packed, torch.cat(alone, 1), 45)
    grad_out = torch.randn_like(packed)
    expected = torch.autograd.grad(torch.cat(alone, 1), inputs, grad_out)
    for grad, reference in zip(torch.autograd.grad(packed, inputs, grad_out), expected, strict=True):
        assert_snr(grad[:1], reference[:1], 45)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(attend(*row, kernel=kernel), torch.cat(alone, 1), 45)
