"""Batched decoding with a KV cache against a plain loop; stop tokens; what the sampler holds."""

import pytest
import torch
from torch import nn

from qarl_nemo.layers.router import NO_ROUTE
from qarl_nemo.train.sampling import SamplingParams
from support.asserts import assert_bitwise_equal
from support.engines import BF16, EOS, PAD, PROMPTS, W4A16_G32, make_engine, make_sampler, responses, sample
from support.formats import FORMATS


@torch.no_grad()
def plain_greedy(model, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """One prompt, no padding, no cache: the whole sequence again for each token."""
    ids, logprobs = list(prompt), []
    while len(ids) < len(prompt) + num_tokens:
        distribution = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float().log_softmax(-1)
        ids.append(int(distribution.argmax()))
        logprobs.append(float(distribution.max()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :], logprobs


def equal_responses(engine, rollouts) -> int:
    """How many prompts got the tokens and logprobs of the plain loop."""
    expected = [plain_greedy(engine.model, prompt, 8) for prompt in PROMPTS]
    found = zip(responses(rollouts), rollouts.generation_logprobs.tolist(), strict=True)
    return sum(
        tokens == wanted and logprobs[: len(tokens)] == pytest.approx(wanted_logprobs, abs=1e-4)
        for (tokens, logprobs), (wanted, wanted_logprobs) in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("targets", [("experts",), ("experts", "attention")])
def test_greedy_decoding_equals_a_plain_loop_over_the_learner(fmt, targets):
    engine = make_engine(fmt, targets)
    rollouts = sample(engine, temperature=0.0, tokens=8)
    equal = equal_responses(engine, rollouts)
    # An activation on a rounding boundary of FP8 may fall to either side, and moves every token after it.
    assert equal == len(PROMPTS) if fmt.activation_kind == "none" else equal >= len(PROMPTS) // 2


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bf16"])
def test_the_comparison_notices_an_unquantized_model(name):
    engine = make_engine(FORMATS[name], executed=BF16)
    assert equal_responses(engine, sample(engine, temperature=0.0, tokens=8)) == 0


def test_prompts_lie_left_padded_before_the_responses():
    engine = make_engine()
    rollouts = sample(engine)
    width = max(map(len, PROMPTS))
    assert rollouts.num_prompt_columns == width
    for row, prompt in enumerate(PROMPTS):
        assert rollouts.input_ids[row, :width].tolist() == [PAD] * (width - len(prompt)) + prompt
        assert rollouts.attention_mask[row, :width].tolist() == [False] * (width - len(prompt)) + [True] * len(prompt)
    assert_bitwise_equal(rollouts.attention_mask[:, width:], rollouts.response_mask)
    generator = torch.Generator().manual_seed(0)
    wider = engine.sampler.generate(PROMPTS, SamplingParams(6), generator, num_prompt_columns=12)
    assert wider.num_prompt_columns == 12
    assert responses(wider) == responses(rollouts)


def test_padding_and_batch_mates_change_nothing():
    engine = make_engine()
    together = sample(engine, temperature=0.0)
    for row, prompt in enumerate(PROMPTS):
        alone = sample(engine, prompts=[prompt], temperature=0.0)
        assert responses(alone) == [responses(together)[row]]


def test_a_seed_decides_the_tokens():
    engine = make_engine()
    assert responses(sample(engine, seed=1)) == responses(sample(engine, seed=1))
    assert responses(sample(engine, seed=1)) != responses(sample(engine, seed=2))


def with_stops(engine, stop_ids):
    sampler = make_sampler(engine.model, engine.sampler.format, stop_ids=stop_ids)
    sampler.load(engine.publish())
    return sampler.generate(PROMPTS, SamplingParams(8, 0.0), torch.Generator())


def test_responses_end_at_any_stop_token_and_the_others_are_truncated():
    engine = make_engine()
    endless = [row.tolist() for row in with_stops(engine, []).input_ids[:, 7:]]
    assert all(len(row) == 8 for row in endless)
    # two stop tokens: the second token of response 0 and the fourth of response 1, wherever they come first
    stops = {endless[0][1], endless[1][3]}
    ends = [next((i + 1 for i, token in enumerate(row) if token in stops), None) for row in endless]
    rollouts = with_stops(engine, sorted(stops))
    assert responses(rollouts) == [row[:end] for row, end in zip(endless, ends, strict=True)]
    assert rollouts.truncated.tolist() == [end is None for end in ends]
    assert len(set(ends)) > 1
    outside = ~rollouts.response_mask
    assert bool((rollouts.generation_logprobs[outside] == 0).all())
    assert bool((rollouts.input_ids[:, 7:][outside] == PAD).all())


def test_decoding_stops_when_every_response_has_ended():
    rollouts = with_stops(make_engine(), list(range(19)))
    assert rollouts.response_mask.tolist() == [[True]] * 4
    assert rollouts.truncated.tolist() == [False] * 4


def test_a_budget_of_one_token_truncates():
    rollouts = sample(make_engine(), tokens=1)
    assert rollouts.response_mask.shape == (4, 1)
    assert rollouts.truncated.tolist() == [row != [EOS] for row in responses(rollouts)]


def test_routes_cover_every_column_but_the_last():
    rollouts = sample(make_engine())
    layers, chosen = 2, 2
    assert rollouts.routes.shape == (*rollouts.input_ids.shape, layers, chosen)
    assert bool((rollouts.routes[:, :-1] >= 0).all())
    assert bool((rollouts.routes[:, -1] == NO_ROUTE).all())
    # two different experts for each token
    assert bool((rollouts.routes[:, :-1, :, 0] != rollouts.routes[:, :-1, :, 1]).all())


@pytest.mark.parametrize("keep_operand", [True, False])
def test_only_packed_tensors_are_held(keep_operand):
    engine = make_engine(keep_operand=keep_operand)
    sampler, learner = engine.sampler, engine.model
    names = dict(sampler.model.named_parameters())
    assert not [name for name in names if ".experts." in name]
    assert all(parameter.ndim < 3 for parameter in names.values())
    assert sorted(sampler.slots) == sorted(engine.report.weights)
    # 2 layers x 4 experts x (256 x 128 + 128 x 128) weights at 4 bits and a BF16 scale for each 32 of them
    packed_bytes = 2 * 4 * (256 * 128 + 128 * 128) * (4 / 8 + 2 / 32)
    plain_bytes = sum(p.nbytes for name, p in learner.named_parameters() if ".experts." not in name)
    assert sampler.num_bytes == packed_bytes + plain_bytes
    kept = [slot._operand for slot in sampler.slots.values() if slot._operand is not None]
    assert len(kept) == (4 if keep_operand else 0)


def test_dropping_operands_changes_no_number(fmt):
    kept, dropped = (sample(make_engine(fmt, keep_operand=keep), top_p=0.9) for keep in (True, False))
    assert_bitwise_equal(kept.input_ids, dropped.input_ids)
    assert_bitwise_equal(kept.generation_logprobs, dropped.generation_logprobs)


def test_an_engine_without_weights_refuses_to_generate():
    sampler = make_sampler(make_engine().model, W4A16_G32)
    with pytest.raises(AssertionError, match="no refit"):
        sampler.generate(PROMPTS, SamplingParams(1), torch.Generator())


def test_the_sampler_shares_no_memory_with_the_learner():
    engine = make_engine()
    for name, slot in engine.sampler.slots.items():
        published = engine.report.weights[name].quantized().tensors
        assert all(tensor.data_ptr() != published[key].data_ptr() for key, tensor in slot.weight.tensors.items())
    before = sample(engine)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            nn.init.zeros_(parameter)
    after = sample(engine)
    assert_bitwise_equal(after.input_ids, before.input_ids)
    assert_bitwise_equal(after.generation_logprobs, before.generation_logprobs)


def test_weights_that_give_no_finite_logits_are_reported_with_their_version():
    engine = make_engine()
    with torch.no_grad():
        # Finite, because others are not published.
        engine.model.model.norm.weight.fill_(3e38)
    engine.report.changes.bump()
    engine.refit()
    with pytest.raises(RuntimeError, match="weight version 1 gives NaN or infinite logits for 4 of 4 prompts"):
        sample(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_policy_that_diverges_within_a_response_is_an_error(temperature, monkeypatch):
    engine = make_engine()
    step, steps = engine.sampler._step, []

    def break_third(*arguments):
        logits = step(*arguments)
        steps.append(logits)
        return logits if len(steps) < 3 else torch.full_like(logits, torch.nan)

    monkeypatch.setattr(engine.sampler, "_step", break_third)
    with pytest.raises(RuntimeError, match="gives NaN or infinite logits for 4 of 4 prompts: the policy has diverged"):
        sample(engine, temperature=temperature)
