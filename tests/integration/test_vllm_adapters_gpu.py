"""Adapters in the real vLLM on one GPU: refitted in memory into captured graphs, whole or not at all."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from qarl_kernels import get_format
from qarl_nemo.config import ConfigError
from qarl_nemo.layers.install import install
from qarl_nemo.layers.lora import LoraSettings, add_adapters
from qarl_nemo.layers.norm_noise import takes_noise
from qarl_nemo.measure.compare.run import compare
from qarl_nemo.measure.compare.settings import CompareSettings
from qarl_nemo.refit.adapters import is_adapter
from qarl_nemo.refit.publish import RefitUpdate
from qarl_nemo.train.config import ModelInit
from qarl_nemo.train.model import load_checkpoint, tiny_config
from qarl_nemo.train.trained import save_trained
from qarl_nemo.train.trainer import Trainer
from support.asserts import assert_bitwise_equal
from support.engines import TOKENIZER
from support.runs import make_config, read_metrics, train
from support.vllm.gpu import BOUND, FORMATS, MARKS, MODEL, ROLLOUT
from support.vllm.runs import PROMPTS, assert_comes_back, assert_same_responses, gap, published, refit, sample

pytestmark = MARKS

ADAPTED = ("w4a16", "nvfp4", "fp8_block", "int8", "bf16")
LORA = {"rank": 8, "alpha": 16, "targets": ["attention", "experts"], "norms": True}
QUERY_B = "model.layers.0.self_attn.q_proj.lora_B.weight"
EXPERTS_A = "model.layers.1.mlp.experts.down_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random model with logits that differ, so that mistakes show."""
    folder = tmp_path_factory.mktemp("base")
    config = tiny_config(ModelInit(**MODEL), TOKENIZER)
    config.initializer_range = 0.1
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def blocks(base, name, *targets, lora=LORA, **rollout):
    policy = {"precision": "bfloat16", "model_path": str(base), "lora": lora, "warm_start": {"steps": 0}}
    policy |= {"model_init": None, "optimizer": {"lr": 1e-2}}
    qarl = {"_override_": True, "targets": list(targets or ("experts", "attention")), **FORMATS[name]}
    return {"device": "cuda", "qarl": qarl, "policy": policy, "rollout": ROLLOUT | rollout}


def draw_adapters(trainer, factor=1.0) -> None:
    """Give every B numbers with which adapters change what is sampled."""
    generator = torch.Generator(trainer.device).manual_seed(7)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                drawn = torch.randn(parameter.shape, generator=generator, device=trainer.device)
                parameter.copy_(0.2 * factor * drawn)
    trainer.learner.policy.changes.bump()


@pytest.fixture(scope="module", params=ADAPTED)
def trainer(request, base, tmp_path_factory):
    trainer = Trainer(make_config(tmp_path_factory.mktemp(request.param), **blocks(base, request.param)))
    refit(trainer)
    return trainer


def test_the_engine_serves_the_learners_adapters(trainer):
    draw_adapters(trainer, 0.0)
    refit(trainer)
    plain = gap(trainer, sample(trainer))
    draw_adapters(trainer)
    stale = gap(trainer, sample(trainer))
    factors = {name: one.detach().clone() for name, one in trainer.model.named_parameters() if ".lora." in name}
    refit(trainer)
    adapted = gap(trainer, sample(trainer))
    print(f"\nADAPTERS {trainer.format.name}: plain {plain:.5f}, adapted {adapted:.5f}, before the refit {stale:.5f}")
    assert max(plain, adapted) < BOUND
    assert stale > 20 * BOUND
    # vLLM scales B in place where it loads an adapter by itself.
    for name, factor in factors.items():
        assert_bitwise_equal(trainer.model.get_parameter(name), factor)


def test_there_and_back_again_gives_the_same_tokens_and_logprobs(trainer):
    draw_adapters(trainer)
    there = assert_comes_back(trainer, lambda: draw_adapters(trainer, -1.0))
    assert any(map(is_adapter, there.tensors))


def test_the_saved_adapter_read_by_vllm_itself_gives_the_same_logprobs(trainer, tmp_path):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    draw_adapters(trainer)
    refit(trainer)
    expected = sample(trainer, temperature=0.0)
    trainer.learner.policy.save(tmp_path)
    requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    options = {"max_tokens": 6, "temperature": 0.0, "logprobs": 0, "detokenize": False}
    params = SamplingParams(**options, stop_token_ids=trainer.sampler.stop_ids)
    saved = LoRARequest("saved", 2, str(tmp_path / "model"))
    answers = trainer.sampler.engine.generate(requests, params, use_tqdm=False, lora_request=saved)
    found = [list(answer.outputs[0].token_ids) for answer in answers]
    tokens = expected.input_ids[:, expected.num_prompt_columns :]
    assert found == [row[mask].tolist() for row, mask in zip(tokens, expected.response_mask, strict=True)]
    chosen = []
    for answer in answers:
        (output,) = answer.outputs
        chosen += [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    assert chosen == expected.generation_logprobs[expected.response_mask].tolist()
    # It has taken the one place for adapters; a refit takes it back.
    refit(trainer)
    assert_same_responses(sample(trainer, temperature=0.0), expected)


def test_a_refit_that_is_not_whole_is_refused(trainer):
    draw_adapters(trainer)
    refit(trainer)
    version, before = trainer.sampler.version, sample(trainer)
    trainer.learner.policy.changes.bump()
    update = published(trainer)
    norm = "model.layers.0.input_layernorm.weight"
    packed = {"model.layers.0.self_attn.o_proj.weight_packed": torch.zeros(256, 32).int().cuda()}
    for tensors, said in (
        ({name: one for name, one in update.tensors.items() if name != EXPERTS_A}, f"the update lacks {EXPERTS_A}"),
        ({name: one for name, one in update.tensors.items() if name != norm}, f"the update lacks {norm}"),
        (update.tensors | {QUERY_B: update.tensors[QUERY_B][:1]}, f"{QUERY_B} is bfloat16 [1, 8]"),
        (update.tensors | {"model.layers.9.lora_A.weight": update.tensors[EXPERTS_A]}, "no place for model.layers.9"),
        (update.tensors | packed, "no place for model.layers.0.self_attn.o_proj.weight_packed"),
    ):
        wrong = RefitUpdate.of([tensors], trainer.format, version=update.manifest.version)
        with pytest.raises(ValueError, match=f"keeps serving version {version}") as raised:
            trainer.sampler.load(wrong)
        assert said in str(raised.value)
        assert trainer.sampler.version == version
        assert_same_responses(sample(trainer), before)


def test_a_larger_rank_than_the_engines_is_refused(trainer):
    wide = {name: torch.cat([one] * 2, dim=-2 if "lora_A" in name else -1) if is_adapter(name) else one
            for name, one in published(trainer).tensors.items()}  # fmt: skip
    trainer.learner.policy.changes.bump()
    update = RefitUpdate.of([wide], trainer.format, version=trainer.learner.weight_version)
    with pytest.raises(ValueError, match="rank 16, this engine was started with max_lora_rank=8"):
        trainer.sampler.load(update)


@pytest.mark.parametrize("name", ADAPTED)
def test_a_run_learns_and_goes_on_after_a_stop(name, base, odd_rewards, tmp_path):
    trainer = train(tmp_path / "whole", **blocks(base, name))
    records = read_metrics(tmp_path / "whole")
    gaps = [record["mismatch/abs_gap_mean"] for record in records]
    print(f"\nLORA RUN {name}: gaps", [round(gap, 5) for gap in gaps], "bytes", records[0]["refit/bytes"])
    assert max(gaps) < BOUND
    assert trainer.sampler.version == 8
    assert all(record["optim/grad_norm"] > 0 for record in records)
    train(tmp_path / "halves", **blocks(base, name), grpo={"max_num_steps": 2})
    train(tmp_path / "halves", **blocks(base, name))
    for one, other in zip(records, read_metrics(tmp_path / "halves"), strict=True):
        for key in ("reward/mean", "weight_version", "loss/loss", "optim/grad_norm", "mismatch/abs_gap_mean"):
            assert one.get(key) == other.get(key), key


@pytest.mark.parametrize("lora", [None, LORA | {"norms": False}], ids=["masters", "adapters"])
@pytest.mark.parametrize("mode", ["clean", "replayed"])
def test_noise_is_served_and_replayed(lora, mode, base, tmp_path):
    noise = {"start": 0.2, "end": 0.1, "stages": 4, "mode": mode}
    trainer = train(tmp_path, **blocks(base, "w4a16", lora=lora, noise=noise))
    gaps = [record["mismatch/abs_gap_mean"] for record in read_metrics(tmp_path)]
    print(f"\nNOISE {mode}, {'adapters' if lora else 'masters'}: gaps", [round(gap, 5) for gap in gaps])
    assert gaps[0] < BOUND
    assert max(gaps) < BOUND if mode == "replayed" else min(gaps[1:]) > 2 * BOUND
    assert trainer.noise is None


def test_adapters_on_attention_alone_leave_the_experts_as_they_are(base, tmp_path):
    trainer = Trainer(make_config(tmp_path, **blocks(base, "w4a16", lora=LORA | {"targets": ["attention"]})))
    draw_adapters(trainer)
    refit(trainer)
    assert gap(trainer, sample(trainer)) < BOUND
    names = [name for name in published(trainer).tensors if is_adapter(name)]
    assert not [name for name in names if ".experts." in name]
    assert len(names) == 2 * 2 * 4


def test_routes_are_replayed_beside_adapters(trainer):
    draw_adapters(trainer)
    refit(trainer)
    rollouts = sample(trainer)
    others = torch.where(rollouts.routes < 0, rollouts.routes, (rollouts.routes + 1) % MODEL["num_experts"])
    assert gap(trainer, rollouts) < BOUND < gap(trainer, replace(rollouts, routes=others))


@pytest.mark.parametrize("name", ["w4a16", "fp8_block"])
def test_compare_reports_the_gap_of_an_adapter_that_vllm_reads_itself(name, base, tmp_path):
    lora = LoraSettings(8, 16.0, ("experts", "attention"))
    model, _ = load_checkpoint(base, torch.bfloat16)
    install(model, ("experts", "attention"), get_format("bf16"))
    model.requires_grad_(False)
    add_adapters(model, lora, seed=1)
    generator = torch.Generator().manual_seed(7)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        elif takes_noise(parameter_name):
            # Trained beside the adapters: vLLM finds it in a copy of the base.
            parameter.requires_grad_(True).data.mul_(1.25)
    save_trained(model, tmp_path / "adapter", lora, str(base))
    sizes = {"num_prompts": 32, "prompt_tokens": 8, "num_responses": 2, "max_new_tokens": 16}
    sizes["gpu_memory_utilization"] = 0.3
    targets = ("experts", "attention")
    plain = CompareSettings(base, (name,), targets=targets, engine="vllm", device="cuda", **sizes)
    gaps = []
    for settings in (plain, replace(plain, adapter=tmp_path / "adapter")):
        rows = compare(settings).rows
        gaps.append({row["arm"]: row["gap_mean"] for row in rows if row["decoding"] == "sampled"})
    print(f"\nCOMPARE {name}: plain {gaps[0]}, with an adapter {gaps[1]}")
    assert gaps[1]["aligned"] < BOUND
    assert gaps[1]["rollout_only"] > 2 * BOUND


def test_experts_kernels_without_adapters_are_refused_before_anything_starts(base, tmp_path):
    refused = blocks(base, "w4a16")
    refused["qarl"] = {"_override_": True, "targets": ["experts"], "format": "w4a8"}
    with pytest.raises(ConfigError, match=r"kernels for w4a8 experts do not run where policy\.lora has"):
        make_config(tmp_path, **refused)
