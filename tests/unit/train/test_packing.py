"""Packed micro-batches: each sequence reads itself alone, and memory settings change no number."""

from contextlib import nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qarl_nemo.layers.router import NO_ROUTE
from qarl_nemo.train.config import SequencePackingConfig
from qarl_nemo.train.engine_forward import checkpoint_layers, follow_engine
from qarl_nemo.train.packing import Packing, split_by_tokens
from support.asserts import FP32_NATS
from support.engines import BF16, PROMPTS, W4A16_G32, make_engine, sample, tiny_model

NUM = 16


@pytest.fixture(scope="module")
def rollouts():
    # Cloned, because autograd takes no tensors that were made in inference mode.
    made = sample(make_engine(), prompts=PROMPTS * 4, tokens=8)
    tensors = {f.name: value for f in fields(made) if isinstance(value := getattr(made, f.name), torch.Tensor)}
    return replace(made, **{name: tensor.clone() for name, tensor in tensors.items()})


def plain_logprobs(model, rollouts, row):
    """One response by itself, through the model's own head and torch's own distribution."""
    ids = rollouts.input_ids[row][rollouts.attention_mask[row]][None]
    logits = model.lm_head(model.model(input_ids=ids, use_cache=False).last_hidden_state)[0, :-1]
    length = int(rollouts.response_mask[row].sum())
    return torch.distributions.Categorical(logits=logits).log_prob(ids[0, 1:])[-length:]


def test_packed_responses_are_as_each_one_alone(rollouts):
    engine = make_engine(BF16, replay_routes=False)
    logprobs, _ = engine.learner.token_logprobs(rollouts)
    assert len(set(rollouts.attention_mask.sum(-1).tolist())) > 3
    for row in range(NUM):
        found = logprobs[row][rollouts.response_mask[row]]
        assert (found - plain_logprobs(engine.model, rollouts, row)).abs().max() < FP32_NATS
    assert not logprobs[~rollouts.response_mask].any()


def test_the_bound_notices_sequences_that_see_each_other(rollouts, monkeypatch):
    engine = make_engine(BF16, replay_routes=False)
    right, _ = engine.learner.token_logprobs(rollouts)
    whole = engine.model.model.forward
    # Without its packing the row is one long sequence.
    monkeypatch.setattr(engine.model.model, "forward", lambda **options: whole(**options | {"packing": None}))
    seen, _ = engine.learner.token_logprobs(rollouts)
    assert (seen - right).abs().max() > 10 * FP32_NATS


def test_another_response_in_the_batch_changes_no_gradient(rollouts):
    engine = make_engine(W4A16_G32)
    first = rollouts.select(torch.tensor([0, 5]))
    other = replace(first, input_ids=first.input_ids.clone())
    other.input_ids[1, -3:] = other.input_ids[1, -3:] % 10 + 1
    gradients = []
    for batch in (first, other):
        logprobs, _ = engine.learner.token_logprobs(batch)
        gradients.append(torch.autograd.grad(logprobs[0].sum(), engine.model.model.embed_tokens.weight)[0])
    assert gradients[0].abs().max() > 0
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5 * gradients[0].abs().max()


@pytest.mark.parametrize("window", [None, 3, 100])
def test_packed_attention_is_that_of_each_sequence_and_its_window(window):
    generator = torch.Generator().manual_seed(0)
    lengths, heads, size = [5, 1, 9], 4, 8
    wide = [torch.randn(1, n, sum(lengths), size, generator=generator) for n in (heads, 2, 2)]
    wide = [tensor.requires_grad_() for tensor in wide]
    module, attend = SimpleNamespace(scaling=0.5), ALL_ATTENTION_FUNCTIONS["packed_torch"]
    options = {"packing": Packing.of(torch.tensor(lengths)), "sliding_window": window}
    found, _ = attend(module, *wide, None, **options)
    each = zip(*(tensor.split(lengths, 2) for tensor in wide), strict=True)
    expected = torch.cat([one_sequence(*parts, window) for parts in each], 2)
    assert (found.transpose(1, 2) - expected).abs().max() < 1e-5
    grad = torch.randn(found.shape, generator=generator)
    wanted = torch.autograd.grad(expected, wide, grad.transpose(1, 2))
    for gradient, other in zip(torch.autograd.grad(found, wide, grad), wanted, strict=True):
        assert (gradient - other).abs().max() < 1e-5
    if window == 3:
        wrong, _ = attend(module, *wide, None, **options | {"sliding_window": 4})
        assert (wrong.transpose(1, 2) - expected).abs().max() > 1e-2


def one_sequence(query, key, value, window):
    """Attention written out: scores, causal window, softmax."""
    key, value = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    visible = (distance >= 0) & (distance < (window or 1000))
    scores = (0.5 * query @ key.mT).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("budget", [12, 40])
def test_token_budgets_change_nothing(rollouts, budget):
    advantages = torch.linspace(-1.5, 1.5, NUM)
    whole, split = make_engine(), make_engine()
    split.learner.packing = SequencePackingConfig(enabled=True, train_mb_tokens=budget, logprob_mb_tokens=budget)
    prev = whole.learner.prev_logprobs(rollouts)
    assert (split.learner.prev_logprobs(rollouts) - prev).abs().max() < FP32_NATS
    expected, found = (
        engine.learner.update(rollouts, prev, advantages, [torch.arange(NUM)]) for engine in (whole, split)
    )
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    assert torch.allclose(found.sequences["advantage"], expected.sequences["advantage"], atol=1e-6)
    assert (found.curr_logprobs - expected.curr_logprobs).abs().max() < FP32_NATS


def test_micro_batches_hold_what_fits_and_the_longest_come_first():
    rows, lengths = torch.tensor([7, 3, 9, 4, 1]), torch.tensor([2, 5, 5, 9, 1])
    # 9 is above the budget and stays alone; 5 + 2 fits, 5 + 5 does not.
    parts = split_by_tokens(rows, lengths, 8)
    assert [part.tolist() for part in parts] == [[4], [3], [9, 7, 1]]
    assert [part.tolist() for part in split_by_tokens(rows, lengths, 7)] == [[4], [3], [9, 7], [1]]
    assert [part.tolist() for part in split_by_tokens(rows, lengths, 1000)] == [[4, 3, 9, 7, 1]]


def test_a_rectangle_and_back():
    packing = Packing.of(torch.tensor([2, 1, 3]))
    packed = torch.arange(1, 7)[:, None]
    assert packing.pad(packed)[..., 0].tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert packing.pack(packing.pad(packed)).tolist() == packed.tolist()
    assert packing.positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert packing.bounds.tolist() == [0, 2, 3, 6]


def tied_model():
    """A dense model whose embeddings are its head."""
    config = Qwen2Config(
        vocab_size=tiny_model().config.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    config.initializer_range = 0.1
    torch.manual_seed(0)
    return follow_engine(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def gradients(engine, rollouts) -> torch.Tensor:
    engine.learner.token_logprobs(rollouts)[0][rollouts.response_mask].sum().backward()
    return torch.cat(
        [parameter.grad.flatten() for parameter in engine.model.parameters() if parameter.grad is not None]
    )


def test_chunks_reach_embeddings_that_are_the_head(rollouts):
    targets = ("mlp", "attention")
    engine = make_engine(BF16, targets, model=tied_model(), replay_routes=False, logprob_chunk_size=3)
    found = gradients(engine, rollouts)
    engine.model.zero_grad()
    for row in range(NUM):
        plain_logprobs(engine.model, rollouts, row).sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in engine.model.parameters()])
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (found.roll(1) - expected).abs().max() > 0.1 * expected.abs().max()


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd keeps for the backward, parameters left out."""

    def __init__(self):
        self.total = 0
        super().__init__(self.count, lambda tensor: tensor)

    def count(self, tensor):
        self.total += 0 if tensor.is_leaf else tensor.nbytes
        return tensor


@pytest.mark.parametrize("replay_routes", [True, False])
def test_activation_checkpointing_changes_no_gradient_and_keeps_less(rollouts, replay_routes):
    # Experts that no router of this model would choose, which the recomputation must be given, too.
    forced = replace(rollouts, routes=torch.where(rollouts.routes == NO_ROUTE, NO_ROUTE, (rollouts.routes + 1) % 4))
    kept, found = {}, {}
    for checkpointing in (False, True):
        engine = make_engine(replay_routes=replay_routes, activation_checkpointing=checkpointing)
        saved = SavedBytes()
        with saved:
            logprobs, _ = engine.learner.token_logprobs(forced)
        kept[checkpointing] = saved.total
        found[checkpointing] = gradients(engine, forced)
        assert torch.equal(engine.learner.prev_logprobs(forced), logprobs)
    assert kept[True] < kept[False] / 3
    assert (found[True] - found[False]).abs().max() < 1e-5 * found[False].abs().max()
    if replay_routes:
        own = make_engine()
        checkpoint_layers(own.model, lambda: (nullcontext(), nullcontext()))
        assert (gradients(own, forced) - found[False]).abs().max() > 1e-2 * found[False].abs().max()
