"""The real vLLM engine on one GPU: every format, CUDA graphs on, refitted live, its routes replayed by the learner."""

from dataclasses import replace

import pytest
import torch

from qarl_nemo.layers.router import NO_ROUTE
from qarl_nemo.refit.publish import RefitUpdate
from qarl_nemo.train.trainer import Trainer
from support.asserts import assert_bitwise_equal
from support.runs import make_config, read_metrics, train
from support.vllm.gpu import BOUND, FORMATS, MARKS, MODEL, ROLLOUT
from support.vllm.runs import (
    NORM,
    PROMPTS,
    assert_comes_back,
    assert_same_responses,
    gap,
    multiply,
    own_routes,
    prepared,
    published,
    refit,
    sample,
)

pytestmark = MARKS

LEAST_AGREEMENT = 0.99


def blocks(name, *targets, **qarl):
    policy = {"precision": "bfloat16", "model_init": MODEL}
    chosen = {"_override_": True, "targets": list(targets or ("experts",)), **FORMATS[name], **qarl}
    return {"device": "cuda", "qarl": chosen, "policy": policy, "rollout": ROLLOUT}


@pytest.fixture(scope="module", params=FORMATS)
def trainer(request, tmp_path_factory):
    trainer = prepared(tmp_path_factory.mktemp(request.param), **blocks(request.param, "experts", "attention"))
    refit(trainer)
    return trainer


def test_the_engine_serves_what_the_learner_computes(trainer):
    rollouts = sample(trainer)
    aligned = gap(trainer, rollouts)
    multiply(trainer, {"mlp.experts.down_proj": -1.0})
    stale = gap(trainer, rollouts)
    refit(trainer)
    again = gap(trainer, sample(trainer))
    multiply(trainer, {"mlp.experts.down_proj": -1.0})
    refit(trainer)
    name = trainer.format.name
    print(f"\nGAP {name}: {aligned:.5f}, a step later {stale:.5f}, refitted {again:.5f}")
    assert max(aligned, again) < BOUND
    assert stale > 20 * BOUND
    assert rollouts.response_mask.sum() > 500


def test_the_routes_are_the_learners_own_and_replayed(trainer):
    rollouts = sample(trainer)
    width = rollouts.input_ids.shape[1]
    assert rollouts.routes.shape == (len(PROMPTS), width, MODEL["num_hidden_layers"], MODEL["num_experts_per_tok"])
    routed = rollouts.routes[..., 0, 0] != NO_ROUTE
    # A left-padded prompt, its response, and the last token of it, which no router has seen.
    seen = rollouts.attention_mask.clone()
    seen[torch.arange(len(seen)), width - 1 - rollouts.attention_mask.flip(-1).int().argmax(-1)] = False
    assert_bitwise_equal(routed, seen)
    same = (own_routes(trainer, rollouts) == rollouts.routes.long().sort(-1).values).all(-1)
    agreement = float(same[routed].float().mean())
    others = (rollouts.routes + 1) % MODEL["num_experts"]
    apart = gap(trainer, replace(rollouts, routes=torch.where(rollouts.routes == NO_ROUTE, NO_ROUTE, others)))
    print(f"\nROUTES {trainer.format.name}: {agreement:.4f} the learner's own, gap on others {apart:.4f}")
    assert agreement > LEAST_AGREEMENT
    assert apart > 20 * BOUND


def test_there_and_back_again_gives_the_same_tokens_and_logprobs(trainer):
    assert_comes_back(trainer, lambda: multiply(trainer, {"": 0.5}))
    multiply(trainer, {"": 2.0})


def test_a_refit_that_is_not_whole_is_refused(trainer):
    refit(trainer)
    version, before = trainer.sampler.version, sample(trainer)
    trainer.learner.policy.changes.bump()
    update = published(trainer)
    changed = update.tensors | {NORM: update.tensors[NORM] * 2}
    missing = {name: tensor for name, tensor in update.tensors.items() if name != NORM}
    for tensors, said in ((changed, f"{NORM}: its bytes differ"), (missing, f"missing: {NORM}")):
        with pytest.raises(ValueError, match=f"keeps serving version {version}") as raised:
            trainer.sampler.load(RefitUpdate(update.manifest, [tensors]))
        assert said in str(raised.value)
        assert trainer.sampler.version == version
        assert_same_responses(sample(trainer), before)


# BF16 is what an unaligned learner executes, and 8-bit codes are nearly as good.
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("bf16", "w8a16")])
def test_an_unaligned_learner_is_farther_from_the_engine(name, tmp_path):
    trainer = prepared(tmp_path, **blocks(name, "experts", "attention", alignment="rollout_only"))
    refit(trainer)
    apart = gap(trainer, sample(trainer))
    print(f"\nGAP {name}: unaligned {apart:.5f}")
    # INT8 is several times nearer to BF16 than the others.
    assert apart > (5 if name == "int8" else 20) * BOUND


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_trains(name, tmp_path):
    trainer = train(tmp_path, **blocks(name))
    records = read_metrics(tmp_path)
    assert [record["weight_version"] for record in records] == [2, 4, 6, 8]
    assert trainer.sampler.version == 8
    print(f"\nRUN {name}: gaps", [round(record["mismatch/abs_gap_mean"], 5) for record in records])
    assert max(record["mismatch/abs_gap_mean"] for record in records) < BOUND
    assert any(record["optim/grad_norm"] > 0 for record in records)


@pytest.mark.parametrize("alignment", ["aligned", "rollout_only"])
@pytest.mark.parametrize(
    ("name", "bits", "nested_in"),
    [("w4a16", (4, 3, 2), None), ("w8a16", (8, 4, 2), None), ("w8a16", (8, 4, 2), "w8a16")],
)
def test_a_run_gets_narrower_grids_from_the_same_engine(name, bits, nested_in, alignment, tmp_path):
    stages = [{"from_step": 2, "bits": bits[1]}, {"from_step": 3, "bits": bits[2], "reset_moments": True}]
    trainer = train(tmp_path, **blocks(name, alignment=alignment, schedule=stages, nested_in=nested_in))
    records = read_metrics(tmp_path)
    assert [record["refit/grid_bits"] for record in records] == [*bits, bits[-1]]
    assert [record["weight_version"] for record in records] == [2, 5, 8, 10]
    assert trainer.sampler.version == 10
    gaps = [record["mismatch/abs_gap_mean"] for record in records]
    print(f"\nSTAGES {name} {alignment}, nested in {nested_in}: gaps", [round(gap, 5) for gap in gaps])
    if alignment == "aligned":
        assert max(gaps) < BOUND
    else:
        assert gaps[0] < gaps[1] < gaps[2]


@pytest.mark.parametrize("attention", ["torch", "engine"])
def test_budgets_and_checkpointing_train_what_rows_do(attention, tmp_path):
    lean = {
        "attention": attention,
        "activation_checkpointing": True,
        "logprob_chunk_size": 64,
        "sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 128},
    }
    settings = blocks("w4a16")
    train(tmp_path / "rows", **settings)
    train(tmp_path / "lean", **settings | {"policy": settings["policy"] | lean})
    rows, packed = (read_metrics(tmp_path / name) for name in ("rows", "lean"))
    assert max(record["mismatch/abs_gap_mean"] for record in packed) < BOUND
    # The first batch is the same, and so is its gradient but for roundings to BF16.
    assert packed[0]["reward/mean"] == rows[0]["reward/mean"]
    assert packed[0]["optim/grad_norm"] == pytest.approx(rows[0]["optim/grad_norm"], rel=0.1)


def test_a_run_resumes_to_the_same_numbers(tmp_path):
    train(tmp_path / "whole", **blocks("w4a16"))
    train(tmp_path / "halves", **blocks("w4a16"), grpo={"max_num_steps": 2})
    train(tmp_path / "halves", **blocks("w4a16"))
    whole, halves = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "halves")
    for one, other in zip(whole, halves, strict=True):
        for key in ("reward/mean", "weight_version", "loss/loss", "optim/grad_norm", "mismatch/abs_gap_mean"):
            assert one.get(key) == other.get(key), key


def test_sizes_that_vllm_refuses_are_all_named_before_anything_is_trained(tmp_path):
    refused = blocks("w4a8", "experts", "attention")
    refused["policy"]["model_init"] = MODEL | {
        "hidden_size": 128,
        "moe_intermediate_size": 384,
        "head_dim": 16,
    }
    with pytest.raises(ValueError, match=r"rollout\.engine=vllm does not run here") as raised:
        Trainer(make_config(tmp_path, **refused))
    for text in (
        "hidden_size=128 is not a multiple of 256",
        "moe_intermediate_size=384",
        "num_attention_heads * head_dim=64",
    ):
        assert text in str(raised.value)
    assert not (tmp_path / "config.yaml").exists()
