"""Logprobs in chunks: the values and gradients of one softmax over everything, without its memory."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from qarl_kernels import token_logprobs_reference
from qarl_nemo.layers.logprobs import head_logprobs, score_in_chunks
from support.asserts import FP32_NATS, assert_snr

TOKENS, HIDDEN, VOCABULARY = 23, 16, 50
TEMPERATURE = 0.7


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, HIDDEN, generator=generator) for rows in (TOKENS, VOCABULARY))
    tokens = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    grad = torch.randn(TOKENS, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), tokens, grad


def reference(hidden, weight, tokens):
    """By torch's own distribution, all positions at once."""
    distribution = torch.distributions.Categorical(logits=nn.functional.linear(hidden, weight).double() / TEMPERATURE)
    return distribution.log_prob(tokens), distribution.entropy()


def from_head(hidden, weight, tokens, chunk_size, temperature=TEMPERATURE):
    return head_logprobs(hidden, weight, tokens, temperature, chunk_size=chunk_size)


def from_logits(hidden, weight, tokens, chunk_size):
    return score_in_chunks(nn.functional.linear(hidden, weight), tokens, TEMPERATURE, chunk_size=chunk_size)


@pytest.mark.parametrize("in_chunks", [from_head, from_logits])
@pytest.mark.parametrize("chunk_size", [1, 7, TOKENS, 1000])
def test_chunks_change_neither_values_nor_gradients(inputs, in_chunks, chunk_size):
    hidden, weight, tokens, grad = inputs
    expected, entropy = reference(hidden, weight, tokens)
    found, found_entropy = in_chunks(hidden, weight, tokens, chunk_size)
    assert (found - expected).abs().max() < FP32_NATS
    assert (found_entropy - entropy).abs().max() < FP32_NATS
    assert not found_entropy.requires_grad
    wanted = torch.autograd.grad(expected, (hidden, weight), grad.double())
    for gradient, other in zip(torch.autograd.grad(found, (hidden, weight), grad), wanted, strict=True):
        assert (gradient - other).abs().max() < 1e-5 * other.abs().max()


def test_the_tolerances_notice_another_temperature_and_a_neighbours_gradient(inputs):
    hidden, weight, tokens, grad = inputs
    expected, entropy = reference(hidden, weight, tokens)
    found, found_entropy = from_head(hidden, weight, tokens, 7, temperature=0.71)
    assert (found - expected).abs().max() > 10 * FP32_NATS
    assert (found_entropy - entropy).abs().max() > 10 * FP32_NATS
    found, _ = from_head(hidden, weight, tokens, 7)
    right = torch.autograd.grad(found, (hidden, weight), grad, retain_graph=True)
    wrong = torch.autograd.grad(found, (hidden, weight), grad.roll(1))
    assert all((one - other).abs().max() > 1e-2 * one.abs().max() for one, other in zip(right, wrong, strict=True))


def test_embeddings_that_are_the_head_too_get_both_gradients(inputs):
    _, weight, tokens, grad = inputs
    found, _ = from_head(nn.functional.embedding(tokens, weight), weight, tokens.roll(1), 5)
    expected, _ = reference(nn.functional.embedding(tokens, weight), weight, tokens.roll(1))
    (gradient,) = torch.autograd.grad(found, weight, grad)
    (other,) = torch.autograd.grad(expected, weight, grad.double())
    assert (gradient - other).abs().max() < 1e-5 * other.abs().max()
    # One of the two alone is far off.
    alone, _ = from_head(nn.functional.embedding(tokens, weight.detach()), weight, tokens.roll(1), 5)
    (half,) = torch.autograd.grad(alone, weight, grad)
    assert (half - other).abs().max() > 0.1 * other.abs().max()


def test_many_chunks_of_bf16_add_up_in_fp32():
    # Each row adds 2^-9 of its token's gradient to one entry that already holds 1: BF16 would drop every one.
    rows = 1 + 2**8
    hidden = torch.full((rows, 1), 2.0**-9, dtype=torch.bfloat16)
    hidden[0] = 1
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    found, _ = head_logprobs(hidden, weight, torch.zeros(rows, dtype=torch.int64), 1.0, chunk_size=1)
    found.sum().backward()
    # Two equal logits: each row gives half of its hidden value, (1 + 2^8 / 2^9) / 2 together.
    assert weight.grad.flatten().tolist() == [0.75, -0.75]


def test_a_frozen_head_is_allowed(inputs):
    hidden, weight, tokens, grad = inputs
    found, _ = from_head(hidden, weight.detach(), tokens, 5)
    (gradient,) = torch.autograd.grad(found, hidden, grad)
    (other,) = torch.autograd.grad(reference(hidden, weight, tokens)[0], hidden, grad.double())
    assert (gradient - other).abs().max() < 1e-5 * other.abs().max()


class LargestOfVocabulary(TorchDispatchMode):
    """Records the most rows of any tensor made that has an entry for each token of the vocabulary in every row."""

    rows = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return made


def test_only_one_chunk_of_logits_exists_at_a_time(inputs):
    hidden, weight, tokens, grad = inputs
    with LargestOfVocabulary() as chunked:
        found, _ = from_head(hidden, weight, tokens, 4)
        found.backward(grad)
    # The head itself, transposed, has a row for each hidden size.
    assert chunked.rows == max(4, HIDDEN) < TOKENS
    with LargestOfVocabulary() as whole:
        token_logprobs_reference(nn.functional.linear(hidden, weight), tokens, TEMPERATURE)[0].backward(grad)
    assert whole.rows == TOKENS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_real_vocabulary_takes_the_memory_of_one_chunk_on_a_gpu():
    num_tokens, hidden_size, vocabulary, chunk_size = 8192, 896, 151_936, 512
    hidden = torch.randn(num_tokens, hidden_size, device="cuda").bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, hidden_size, device="cuda")).bfloat16().requires_grad_()
    tokens = torch.randint(vocabulary, (num_tokens,), device="cuda")

    def peak_bytes(logprobs_of):
        hidden.grad = weight.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        logprobs = logprobs_of()
        logprobs.sum().backward()
        return torch.cuda.max_memory_allocated() - before, logprobs.detach(), weight.grad.clone()

    lean, found, gradient = peak_bytes(lambda: head_logprobs(hidden, weight, tokens, 1.0, chunk_size=chunk_size)[0])
    full, expected, other = peak_bytes(
        lambda: token_logprobs_reference(nn.functional.linear(hidden, weight), tokens, 1.0)[0]
    )
    chunk, head = 4 * chunk_size * vocabulary, 4 * weight.numel()
    # Five tensors of a chunk at most, the head's gradient in FP32 and a chunk's in BF16, and the result.
    bound = 5 * chunk + 3 * head
    assert lean < bound
    # All logits at once: at least two FP32 tensors of them.
    assert full > 8 * num_tokens * vocabulary > 3 * bound
    # BF16 logits of this model are within 2^-8 of a few nats, and kernels may differ by such a rounding.
    assert (found - expected).abs().max() < 0.1
    assert_snr(gradient.float(), other.float(), 30)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(gradient.float().roll(1, 0), other.float(), 30)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kernels_path_has_the_gradients_of_float64_on_a_gpu(temperature):
    num_tokens, hidden_size, vocabulary = 1500, 64, 151_936
    hidden = torch.randn(num_tokens, hidden_size, device="cuda").bfloat16().requires_grad_()
    weight = (0.5 * torch.randn(vocabulary, hidden_size, device="cuda")).bfloat16().requires_grad_()
    tokens = torch.randint(vocabulary, (num_tokens,), device="cuda")
    grad = torch.randn(num_tokens, device="cuda")
    found, entropy = from_head(hidden, weight, tokens, 1024, temperature)
    # The chunks' own logits, since products of other shapes may round otherwise.
    logits = torch.cat([nn.functional.linear(rows, weight) for rows in hidden.split(1024)])
    logits = logits.detach().double().requires_grad_()
    distribution = (logits / temperature).log_softmax(-1)
    expected = distribution.gather(-1, tokens[:, None]).squeeze(-1)
    assert (found - expected).abs().max() < FP32_NATS
    assert (entropy + (distribution.exp() * distribution).sum(-1)).abs().max() < FP32_NATS
    (grad_logits,) = torch.autograd.grad(expected, logits, grad.double())
    wanted = grad_logits @ weight.double(), grad_logits.mT @ hidden.double()
    gradients = torch.autograd.grad(found, (hidden, weight), grad, retain_graph=True)
    wrong = torch.autograd.grad(found, (hidden, weight), grad.roll(1))
    for mine, exact, other in zip(gradients, wanted, wrong, strict=True):
        assert mine.dtype == torch.bfloat16
        assert_snr(mine, exact, 40)
        with pytest.raises(AssertionError, match="SNR"):
            assert_snr(other, exact, 40)


@pytest.mark.gpu
def test_many_chunks_of_bf16_add_up_in_fp32_on_a_gpu():
    rows = 1 + 2**8
    hidden = torch.full((rows, 8), 2.0**-9, dtype=torch.bfloat16, device="cuda")
    hidden[0] = 1
    weight = torch.zeros(8, 8, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    found, _ = head_logprobs(hidden, weight, torch.zeros(rows, dtype=torch.int64, device="cuda"), 1.0, chunk_size=1)
    found.sum().backward()
    # Eight equal logits: each row gives seven eighths of its hidden value to its token, 1 + 2^8 / 2^9 in all.
    torch.testing.assert_close(weight.grad[0].float(), torch.full((8,), 1.3125, device="cuda"), rtol=2**-8, atol=0)
