"""The real vLLM engine on a CPU: it serves what the learner computes, takes refits whole, and trains."""

import pytest
import torch

from qarl_kernels import get_format
from qarl_nemo.refit import rank
from qarl_nemo.refit.engine_methods import chosen_methods, require_methods
from qarl_nemo.refit.manifest import Manifest
from qarl_nemo.refit.publish import RefitUpdate
from qarl_nemo.train.trainer import Trainer
from qarl_nemo.train.vllm.admission import answer_all
from qarl_nemo.train.vllm.host import vllm_problem
from support.asserts import assert_bitwise_equal
from support.runs import make_config, read_metrics, train, without_clocks
from support.vllm.runs import (
    NORM,
    PACKED,
    SCALE,
    assert_comes_back,
    assert_same_responses,
    gap,
    multiply,
    prepared,
    published,
    refit,
    sample,
)

PROBLEM = vllm_problem()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")]

ROLLOUT = {"engine": "vllm", "max_model_len": 32, "kv_cache_gib": 0.03125}
MODEL = {"num_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
QARL = {
    "w4a16 g64": {"format": "w4a16", "group_size": 64},
    "w4a16 g128": {"format": "w4a16", "group_size": 128},
    "w4a16 attention too": {"format": "w4a16", "group_size": 64, "targets": ["experts", "attention"]},
    "fp8_block": {"format": "fp8_block"},
    "bf16": {"format": "bf16", "alignment": "none"},
}
# name -> bound of the mean |gap|, nats. CPU vLLM's int4 experts quantize activations to 8 bits and its FP8 experts do
# not quantize them at all, so only bf16 is at the floor of BF16 arithmetic.
BOUNDS = {"w4a16 g64": 0.04, "w4a16 g128": 0.04, "w4a16 attention too": 0.04, "fp8_block": 0.1, "bf16": 0.02}


def blocks(**qarl):
    policy = {"precision": "bfloat16", "model_init": MODEL}
    return {"qarl": {"_override_": True, "router_replay": False, **qarl}, "policy": policy, "rollout": ROLLOUT}


def kernel_tensors(trainer):
    """Copies of all that vLLM computes with; it allocates `g_idx` and `weight_shape` and never reads them."""
    engine = trainer.sampler.engine
    tensors = engine.apply_model(lambda model: {n: p.detach().clone() for n, p in model.named_parameters()})[0]
    return {name: tensor for name, tensor in tensors.items() if "g_idx" not in name and "weight_shape" not in name}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = prepared(tmp_path_factory.mktemp("w4a16"), **blocks(**QARL["w4a16 g64"]))
    refit(trainer)
    return trainer


@pytest.mark.parametrize("name", QARL)
def test_the_engine_serves_what_the_learner_computes(name, tmp_path):
    trainer = prepared(tmp_path / "aligned", **blocks(**QARL[name]))
    refit(trainer)
    rollouts = sample(trainer)
    aligned = gap(trainer, rollouts)
    multiply(trainer, {"mlp.experts.down_proj": 0.5})
    stale = gap(trainer, rollouts)
    print(f"\nGAP {name}: {aligned:.5f}, after a step without refit {stale:.5f}")
    assert aligned < BOUNDS[name] < stale
    assert rollouts.routes is None
    assert rollouts.weight_version == trainer.sampler.version
    assert rollouts.response_mask.sum() > 500


@pytest.mark.parametrize("name", ["w4a16 g64", "w4a16 attention too"])
def test_an_unaligned_learner_is_far_from_the_engine(name, trainer, tmp_path):
    unaligned = prepared(tmp_path, **blocks(**QARL[name], alignment="rollout_only"))
    refit(unaligned)
    apart = gap(unaligned, sample(unaligned))
    print(f"\nGAP {name}: unaligned {apart:.5f}")
    assert apart > 4 * BOUNDS[name]


@pytest.mark.parametrize(
    "part", ["embed_tokens", "q_norm", "q_proj", "o_proj", "mlp.gate.", "gate_up_proj", "down_proj", "lm_head"]
)
def test_a_refit_reaches_every_kind_of_weight(part, tmp_path, trainer):
    rollouts = sample(trainer)
    multiply(trainer, {part: -1.0})
    assert gap(trainer, rollouts) > 0.1
    refit(trainer)
    assert gap(trainer, sample(trainer)) < BOUNDS["w4a16 g64"]


def test_the_first_refit_changes_no_bit_of_what_the_checkpoint_loaded(tmp_path):
    trainer = Trainer(make_config(tmp_path, **blocks(**QARL["w4a16 attention too"])))
    loaded = kernel_tensors(trainer)
    refit(trainer)
    refitted = kernel_tensors(trainer)
    assert len(loaded) > 30
    for name, tensor in loaded.items():
        assert_bitwise_equal(refitted[name], tensor)


def test_there_and_back_again_gives_the_same_tokens_and_logprobs(trainer):
    assert_comes_back(trainer, lambda: multiply(trainer, {"": 0.5}))
    multiply(trainer, {"": 2.0})


def test_a_refit_that_is_not_whole_is_refused_before_the_first_weight(trainer):
    refit(trainer)
    version, held, before = trainer.sampler.version, kernel_tensors(trainer), sample(trainer)
    multiply(trainer, {"": -1.0})
    tensors = published(trainer).tensors
    del tensors[NORM]
    tensors[PACKED] = tensors[PACKED][:3].contiguous()
    tensors[SCALE] = tensors[SCALE].float()
    tensors["model.layers.9.extra.weight"] = torch.zeros(2)
    own = Manifest.of([tensors], version=version + 1, fmt="w4a8")
    for manifest in (published(trainer).manifest, own):
        with pytest.raises(ValueError, match=f"refused, the engine keeps serving version {version}") as raised:
            trainer.sampler.load(RefitUpdate(manifest, [tensors]))
        for name in (NORM, PACKED, SCALE, "model.layers.9.extra.weight"):
            assert name in str(raised.value)
    assert "in place of CompressedTensorsW4A8Fp8MoEMethod" in str(raised.value)
    for name, tensor in kernel_tensors(trainer).items():
        assert_bitwise_equal(tensor, held[name])
    assert_same_responses(sample(trainer), before)
    multiply(trainer, {"": -1.0})


def test_an_engine_that_breaks_off_a_refit_serves_nothing(tmp_path, monkeypatch):
    trainer = prepared(tmp_path, **blocks(**QARL["w4a16 g64"]))
    whole = rank.checkpoint_tensors

    def misshapen_late(layers):
        *most, (name, last) = whole(layers)
        yield from [*most, (name, last[:-1])]

    with pytest.raises(RuntimeError, match="no refit has reached this engine"):
        sample(trainer)
    monkeypatch.setattr(rank, "checkpoint_tensors", misshapen_late)
    with pytest.raises(RuntimeError, match="broke off while version 2 replaced the weights it started with"):
        refit(trainer)
    with pytest.raises(RuntimeError, match="no single weight version to serve"):
        sample(trainer)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"keeps serving nothing .*; 1 problem.*\n.*start the engine anew"):
        refit(trainer)


def test_the_engine_does_not_pass_for_another_format(trainer):
    chosen = trainer.sampler.engine.apply_model(chosen_methods)[0]
    with pytest.raises(ValueError, match="CompressedTensorsWNA16MoEMethod") as raised:
        require_methods(chosen, get_format("bf16"), ["experts"])
    assert "WNA16MoEBackend.CPU" in str(raised.value)
    assert "in place of UnquantizedFusedMoEMethod" in str(raised.value)
    with pytest.raises(ValueError, match="qkv_proj"):
        require_methods(chosen, trainer.format, ["experts", "attention"])


def test_a_seed_decides_the_responses_whatever_else_was_drawn(trainer):
    refit(trainer)
    first, other = sample(trainer, seed=1), sample(trainer, seed=2)
    torch.manual_seed(5)
    assert_same_responses(sample(trainer, seed=1), first)
    assert not torch.equal(other.input_ids, first.input_ids)


def test_responses_end_at_their_stop_token_or_at_the_budget(trainer):
    rollouts = sample(trainer)
    responses = rollouts.input_ids[:, rollouts.num_prompt_columns :]
    lengths = rollouts.response_mask.sum(-1)
    last = responses.gather(-1, lengths[:, None] - 1).squeeze(-1)
    stops = torch.isin(last, torch.tensor(trainer.sampler.stop_ids))
    assert_bitwise_equal(rollouts.truncated, ~stops)
    assert 0 < int(stops.sum()) < len(stops)
    assert bool((lengths[rollouts.truncated] == 6).all())
    assert rollouts.generation_logprobs[~rollouts.response_mask].abs().max() == 0
    assert bool((responses[~rollouts.response_mask] == trainer.sampler.pad_id).all())


@pytest.mark.parametrize("ahead", [False, True], ids=["", "scheduled ahead"])
def test_a_run_trains_and_resumes_to_the_same_numbers(ahead, tmp_path):
    run = blocks(**QARL["w4a16 g64"])
    run["rollout"] = {**ROLLOUT, "async_scheduling": ahead}
    whole = train(tmp_path / "whole", **run)
    records = read_metrics(tmp_path / "whole")
    # two minibatches, so two versions, a step
    assert [record["weight_version"] for record in records] == [2, 4, 6, 8]
    assert whole.sampler.version == 8
    assert max(record["mismatch/abs_gap_mean"] for record in records) < 0.01
    assert any(record["optim/grad_norm"] > 0 for record in records)
    train(tmp_path / "halves", **run, grpo={"max_num_steps": 2})
    train(tmp_path / "halves", **run)
    assert without_clocks(read_metrics(tmp_path / "halves")) == without_clocks(records)


def test_more_prompts_than_places_are_answered_in_groups_and_in_their_order(trainer, monkeypatch):
    from vllm import SamplingParams

    engine, groups, lengths = trainer.sampler.engine, [], [1 + 7 * index % 11 for index in range(11)]
    enqueue = engine.enqueue

    def counted(prompts, *arguments, **named):
        groups.append((len(prompts), engine.llm_engine.get_num_unfinished_requests()))
        return enqueue(prompts, *arguments, **named)

    monkeypatch.setattr(engine, "enqueue", counted)
    monkeypatch.setattr(engine.llm_engine.vllm_config.scheduler_config, "max_num_seqs", 4)
    prompts = [{"prompt_token_ids": [1, 2, 3 + length]} for length in lengths]
    sampling = [SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths]
    answers = answer_all(engine, prompts, sampling, num_groups=2)
    assert [len(answer.token_ids) for answer in answers] == lengths
    assert all(running <= 2 for _, running in groups)
    assert all(added + running == 4 for added, running in groups[:-1])
    assert sum(added for added, _ in groups) == len(lengths)
    # Without graphs, as here, a free place is given away at once.
    groups.clear()
    answer_all(engine, prompts, sampling)
    assert any(running == 3 for _, running in groups)
