"""What a step of a run samples, verifies and hands to the learner."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch

from qarl_nemo.metrics.recorded import read_lines
from qarl_nemo.metrics.validations import validation_files
from qarl_nemo.train.trainer import Trainer
from support.runs import column, make_config, read_metrics


def watch(owner, name, seen):
    """Keep the arguments and the result of every call of a method."""
    call = getattr(owner, name)

    def watched(*arguments, **options):
        result = call(*arguments, **options)
        seen.append((*arguments, result))
        return result

    setattr(owner, name, watched)


def test_a_step_trains_on_every_response_once_with_advantages_among_those_to_one_prompt(tmp_path):
    trainer, updates, rewards = Trainer(make_config(tmp_path, grpo={"max_num_steps": 2})), [], []
    watch(trainer.learner, "update", updates)
    watch(trainer, "rewards", rewards)
    trainer.train()
    for rollouts, _, advantages, minibatches, _ in updates:
        # 8 prompts of 4 responses, two minibatches of 16.
        prompts = rollouts.input_ids[:, : rollouts.num_prompt_columns].unflatten(0, (8, 4))
        assert bool((prompts == prompts[:, :1]).all())
        assert len(prompts[:, 0].unique(dim=0)) > 4
        assert advantages.unflatten(0, (8, 4)).sum(-1).abs().max() < 1e-5
        assert [len(rows) for rows in minibatches] == [16, 16]
        assert torch.cat(minibatches).sort().values.tolist() == list(range(32))
    assert max(float(advantages.abs().max()) for _, _, advantages, *_ in updates) > 0.1
    orders = [torch.cat(minibatches).tolist() for *_, minibatches, _ in updates]
    assert orders[0] != orders[1]
    assert column(read_metrics(tmp_path), "reward/mean") == pytest.approx([float(one.mean()) for *_, one in rewards])


def test_steps_draw_anew_and_validations_alike_with_settings_of_their_own(tmp_path):
    grpo = {"max_num_steps": 2, "val_period": 1, "val_temperature": 0.5, "val_top_p": 0.9}
    trainer, calls = Trainer(make_config(tmp_path, grpo=grpo)), []
    watch(trainer, "generate", calls)
    trainer.train()
    drawn = [(len(tasks), one.temperature, one.top_p, draws.initial_seed()) for tasks, one, draws, _ in calls]
    assert [one[:3] for one in drawn] == [(32, 1.0, 1.0), (16, 0.5, 0.9)] * 2
    assert drawn[1] == drawn[3]
    assert len({seed for *_, seed in drawn}) == 3
    assert calls[1][0] == calls[3][0]
    answers = read_lines(validation_files(tmp_path)[2])
    assert not all(answer["truncated"] for answer in answers)
    assert not any(trainer.tokenizer.eos_token in answer["response"] for answer in answers)


def test_no_more_responses_are_sampled_at_a_time_than_was_said_and_a_refits_size_is_its_updates(tmp_path):
    trainer, calls = Trainer(make_config(tmp_path, grpo={"max_num_steps": 1}, rollout={"batch_size": 12})), []
    watch(trainer.sampler, "generate", calls)
    trainer.train()
    assert [len(prompts) for prompts, *_ in calls] == [12, 12, 8, 12, 4]
    (size,) = column(read_metrics(tmp_path), "refit/bytes")
    assert size == trainer.learner.publish(trainer.format).num_bytes > 0


def test_a_run_is_saved_at_its_end_and_goes_on_counting_its_seconds_from_there(tmp_path, monkeypatch):
    # A second from each look at the clock to the next, which are one before and one after a step.
    ticks = count()
    monkeypatch.setattr("qarl_nemo.train.trainer.time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    # Between two checkpoints of every second step.
    Trainer(make_config(tmp_path, grpo={"max_num_steps": 3})).train()
    resumed = Trainer(make_config(tmp_path))
    assert resumed.step == 3
    first, *_, last = column(read_metrics(tmp_path), "time_s")
    assert resumed.elapsed_s == last
    resumed.train()
    # The first counts what went before it, too.
    assert column(read_metrics(tmp_path), "time_s") == pytest.approx([first + step for step in range(4)])


def test_a_run_that_is_told_to_end_when_its_time_is_up_does_not_validate(tmp_path, monkeypatch):
    for told in (False, True):
        folder = tmp_path / str(told)
        trainer = Trainer(make_config(folder, grpo={"max_num_steps": 4, "val_period": 9}))
        # The first step validates in any case.
        monkeypatch.setattr(trainer.limit, "is_up", lambda trainer=trainer: trainer.step == 2)
        trainer.train(lambda trainer=trainer, told=told: told and trainer.step == 2)
        first, second = read_metrics(folder)
        assert "validation/reward" in first
        assert ("validation/reward" in second) == (not told)
