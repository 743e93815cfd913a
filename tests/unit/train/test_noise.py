"""Noise on norms: its schedule is QeRL's, both sides compute it alike, and no master ever holds it."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from qarl_nemo.layers.norm_noise import NormNoise, add_noise
from qarl_nemo.losses.config import GRPOTISConfig
from qarl_nemo.train.noise import NoiseConfig
from qarl_nemo.train.run_dir import ConfigError, open_run_dir
from support.asserts import FP32_NATS, assert_bitwise_equal
from support.engines import PROMPTS, gaps, make_engine, sample, tiny_model, weights_of
from support.runs import make_config

NOISE = NormNoise(sigma=0.05, relative=False, seed=3, step=7)
NORMS = {f"model.layers.{layer}.{name}_layernorm.weight" for layer in (0, 1) for name in ("input", "post_attention")}
PREFIX = "model.layers.0."


def sigmas(config: NoiseConfig, num_steps: int) -> list[float]:
    return [config.sigma(config.stage(step, num_steps)) for step in range(1, num_steps + 1)]


def test_the_schedule_is_that_of_the_released_code():
    # floor(updates so far / (20 / 10)): two steps a stage. 1e-2 * (1e-2) ** ((j - 1) / 8) = 10 ** -(2 + (j - 1) / 4).
    table = [0, 1e-2, 5.6234e-3, 3.1623e-3, 1.7783e-3, 1e-3, 5.6234e-4, 3.1623e-4, 1.7783e-4, 1e-4]
    assert sigmas(NoiseConfig(), 20) == pytest.approx([sigma for sigma in table for _ in range(2)], rel=1e-4)
    # The paper's equation 8 divides by K - 1: its ninth noisy stage would be at 1.7e-4.
    assert sigmas(NoiseConfig(stages=11), 22)[18] == pytest.approx(1.668e-4, rel=1e-3)


def test_stages_that_do_not_divide_the_run_begin_at_the_next_step():
    # 2.5 steps a stage: updates 0 to 2, 3 and 4, 5 to 7, 8 and 9, ...
    stages = [NoiseConfig().stage(step, 25) for step in range(1, 26)]
    assert stages[:11] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4]
    assert stages[-1] == 9


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [({"start": 1e-3, "end": 1e-2}, "noise anneals"), ({"stages": 2}, "greater than or equal to 3"), ({"end": 0}, "0")],
)
def test_a_schedule_without_meaning_is_refused(wrong, reason):
    with pytest.raises(ValidationError, match=reason):
        NoiseConfig(**wrong)


def test_draws_repeat_and_differ_between_norms_steps_and_seeds():
    weight = torch.ones(4096)
    draw = NOISE.draw("a.weight", weight)
    assert_bitwise_equal(draw, NormNoise(0.05, False, 3, 7).draw("a.weight", weight))
    others = [NOISE.draw("b.weight", weight), *(replace(NOISE, **change).draw("a.weight", weight)
                                                for change in ({"step": 8}, {"seed": 4}))]  # fmt: skip
    # Correlation of 4096 independent pairs: standard deviation 1/64, so 0.1 is six of them.
    assert max(abs(torch.corrcoef(torch.stack([draw, other]))[0, 1].item()) for other in others) < 0.1
    # The standard deviation of 4096 draws is within 1 / sqrt(2 * 4096) = 1.1 % of sigma; five of them.
    assert draw.std().item() == pytest.approx(0.05, rel=0.055)


def test_relative_noise_is_in_units_of_each_weight():
    weight = torch.tensor([0.0, -2.0, 0.5])
    plain = NOISE.draw("a.weight", weight)
    assert torch.allclose(replace(NOISE, relative=True).draw("a.weight", weight), plain * torch.tensor([0.0, 2.0, 0.5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_noisy_weight_is_the_clean_ones(dtype):
    weight = torch.ones(8, dtype=dtype, requires_grad=True)
    gradient = torch.randn(8).to(dtype)
    add_noise(weight, NOISE.draw("a.weight", weight)).backward(gradient)
    assert_bitwise_equal(weight.grad, gradient)
    assert add_noise(weight, None) is weight


def test_noise_is_added_in_fp32_and_the_sum_rounded_once():
    # BF16 has steps of 2^-7 above 1: just over half of one rounds up, but noise in BF16 is 2^-8, a tie to even.
    weight, noise = torch.ones(1).bfloat16(), torch.tensor([2.0**-8 + 2.0**-17])
    assert add_noise(weight, noise).item() == 1 + 2.0**-7
    assert (weight + noise.bfloat16()).item() == 1.0


def served(noise, *, replay, dtype=torch.float32, **options):
    engine = make_engine(model=tiny_model(dtype=dtype), loss=GRPOTISConfig(), **options)
    engine.learner.replay_noise = replay
    engine.learner.change_noise()
    engine.sampler.load(engine.learner.publish(engine.sampler.format, noise))
    return engine, replace(sample(engine, prompts=PROMPTS * 4), noise=noise)


def test_input_and_post_attention_norms_alone_are_published_with_noise():
    engine, _ = served(NOISE, replay=True)
    clean = engine.learner.publish(engine.sampler.format).tensors
    noisy = engine.learner.publish(engine.sampler.format, NOISE).tensors
    assert {name for name, tensor in noisy.items() if not torch.equal(tensor, clean[name])} == NORMS
    for name in NORMS:
        assert_bitwise_equal(engine.sampler.model.get_parameter(name), noisy[name])
    assert set(engine.learner.policy.noisy_norms()) == NORMS


def test_the_replayed_gap_is_that_of_a_run_without_noise():
    plain, replayed, clean = served(None, replay=True), served(NOISE, replay=True), served(NOISE, replay=False)
    assert gaps(*plain).max() < FP32_NATS
    assert gaps(*replayed).max() < FP32_NATS
    # Without the batch's noise the learner evaluates another policy.
    assert gaps(*clean).mean() > 100 * FP32_NATS
    engine, rollouts = replayed
    assert gaps(engine, replace(rollouts, noise=replace(NOISE, step=8))).mean() > 100 * FP32_NATS


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_a_replayed_update_begins_at_ratio_one_and_leaves_no_noise(activation_checkpointing):
    engine, rollouts = served(NOISE, replay=True, activation_checkpointing=activation_checkpointing)
    prev = engine.learner.prev_logprobs(rollouts)
    result = engine.learner.update(rollouts, prev, torch.linspace(-1, 1, len(prev)), [torch.arange(len(prev))])
    assert (result.curr_logprobs - prev).abs().max() < FP32_NATS
    assert result.metrics["optim/grad_norm"] > 0
    assert all(norm.noise is None for norm in engine.learner.policy.noisy_norms().values())


@pytest.mark.parametrize("replay", [False, True])
def test_masters_are_unchanged_bit_for_bit_after_many_noisy_steps(replay):
    engine, rollouts = served(NOISE, replay=replay, dtype=torch.bfloat16)
    before = weights_of(engine.model) | {
        f"master {name}": one.clone() for name, one in engine.optimizer.masters.items()
    }
    for step in range(3):
        noise = replace(NOISE, step=step)
        engine.learner.change_noise()
        engine.sampler.load(engine.learner.publish(engine.sampler.format, noise))
        rollouts = replace(rollouts, noise=noise)
        prev = engine.learner.prev_logprobs(rollouts)
        # Without advantages there is no gradient, and without decay nothing but noise could change a master.
        engine.learner.update(rollouts, prev, torch.zeros(len(prev)), [torch.arange(len(prev))])
    after = weights_of(engine.model) | {f"master {name}": one for name, one in engine.optimizer.masters.items()}
    for name, weight in before.items():
        assert_bitwise_equal(after[name], weight)
    assert (
        engine.sampler.model.get_parameter(PREFIX + "input_layernorm.weight")
        .ne(engine.model.get_parameter(PREFIX + "input_layernorm.weight"))
        .any()
    )


def test_what_is_served_of_a_noise_is_measured_after_rounding():
    engine, _ = served(None, replay=True, dtype=torch.bfloat16)
    # Norms of a new model are 1, where BF16's steps are 2^-8 below and 2^-7 above.
    assert engine.learner.noise_rms(replace(NOISE, sigma=0.05)) == pytest.approx(0.05, rel=0.2)
    assert engine.learner.noise_rms(replace(NOISE, sigma=1e-4)) == 0
    exact, _ = served(None, replay=True)
    assert exact.learner.noise_rms(replace(NOISE, sigma=1e-4)) == pytest.approx(1e-4, rel=0.2)


def test_another_number_of_steps_would_be_another_schedule(tmp_path):
    noise = {"noise": {"stages": 4}}
    open_run_dir(make_config(tmp_path, rollout=noise))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"grpo\.max_num_steps: there 4, now 8"):
        open_run_dir(make_config(tmp_path, rollout=noise, grpo={"max_num_steps": 8}))


def test_sigmas_are_finite_at_the_bounds():
    assert all(math.isfinite(sigma) for sigma in sigmas(NoiseConfig(start=1.0, end=1e-30, stages=1000), 5))
