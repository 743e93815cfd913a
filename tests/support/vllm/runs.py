"""Runs with the real vLLM engine, small, and made so that mistakes show."""

from collections.abc import Callable
from dataclasses import replace

import torch

from qarl_nemo.refit.publish import RefitUpdate
from qarl_nemo.train.rollouts import Rollouts
from qarl_nemo.train.sampling import SamplingParams
from qarl_nemo.train.trainer import Trainer
from support.asserts import assert_bitwise_equal
from support.engines import chosen_routes
from support.runs import make_config

# 1 to 4 tokens: left padding of every width
PROMPTS = [[4 + (3 * row + 5 * column) % 12 for column in range(1 + row % 4)] for row in range(128)]
NORM = "model.norm.weight"
PACKED = "model.layers.0.mlp.experts.gate_up_proj.weight_packed"
SCALE = "model.layers.1.mlp.experts.down_proj.weight_scale"


def prepared(run_dir, **blocks) -> Trainer:
    """A random model whose experts matter, with clear router choices and logits that differ."""
    policy = blocks["policy"] | {"warm_start": {"steps": 0}}
    trainer = Trainer(make_config(run_dir, **blocks | {"policy": policy}))
    multiply(trainer, {"mlp.experts": 4.0, "mlp.gate.weight": 8.0, "lm_head": 4.0})
    return trainer


def multiply(trainer, factors) -> None:
    """Change the parameters whose names hold a key, by powers of two, as an optimizer step would."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            for part, factor in factors.items():
                if part in name:
                    parameter.mul_(factor)
    trainer.learner.policy.report.changes.bump()


def refit(trainer) -> None:
    """Make the engine serve the learner's weights."""
    load(trainer, published(trainer))


def published(trainer) -> RefitUpdate:
    """The learner's weights as the engine will serve them."""
    return trainer.learner.publish(trainer.format)


def load(trainer, update) -> None:
    """Let the engine serve these tensors as the learner's next version, also where it had them before."""
    changes = trainer.learner.policy.changes
    changes.bump()
    trainer.sampler.load(RefitUpdate(replace(update.manifest, version=changes.count), update.layers))


def sample(trainer, *, temperature=1.0, seed=0) -> Rollouts:
    generator = torch.Generator(trainer.device).manual_seed(seed)
    return trainer.sampler.generate(PROMPTS, SamplingParams(6, temperature), generator)


def gap(trainer, rollouts) -> float:
    gaps = (trainer.learner.prev_logprobs(rollouts) - rollouts.generation_logprobs).abs()
    return float(gaps[rollouts.response_mask].mean())


def own_routes(trainer, rollouts) -> torch.Tensor:
    """[B, S, L, k] experts that the learner chooses itself, in ascending order."""
    return chosen_routes(trainer.learner, replace(rollouts, routes=None)).sort(-1).values


def assert_comes_back(trainer, change: Callable[[], None]) -> RefitUpdate:
    """Refit to changed weights and back: the engine gives each time what it gave before; return what came back."""
    there = published(trainer)
    # The learner's own tensors change with its next step.
    there = RefitUpdate(there.manifest, [{name: tensor.clone() for name, tensor in there.tensors.items()}])
    load(trainer, there)
    greedy, drawn = sample(trainer, temperature=0.0), sample(trainer)
    change()
    away = published(trainer)
    for _ in range(3):
        load(trainer, away)
        assert not torch.equal(sample(trainer, temperature=0.0).generation_logprobs, greedy.generation_logprobs)
        load(trainer, there)
        assert_same_responses(sample(trainer, temperature=0.0), greedy)
        assert_same_responses(sample(trainer), drawn)
    return there


def assert_same_responses(actual, expected) -> None:
    assert_bitwise_equal(actual.input_ids, expected.input_ids)
    assert_bitwise_equal(actual.generation_logprobs, expected.generation_logprobs)
