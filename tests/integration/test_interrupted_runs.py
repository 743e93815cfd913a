"""A run that was killed, or stopped and continued, writes the numbers of one that was not."""

import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qarl_nemo.config import ConfigError
from qarl_nemo.train.checkpoint import save_checkpoint
from qarl_nemo.train.run import train_run
from qarl_nemo.train.run_dir import RunToldError
from qarl_nemo.train.time_limit import TimeLimit
from qarl_nemo.train.trainer import Trainer
from support.asserts import assert_bitwise_equal
from support.days import let_a_day_pass
from support.files import write_jsonl
from support.runs import QARL, make_config, read_metrics, train, without_clocks, write_config

REPOSITORY = Path(__file__).parents[2]
LONG = 30


def assert_same_run(run_dir, expected_dir):
    found, expected = without_clocks(read_metrics(run_dir)), without_clocks(read_metrics(expected_dir))
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for record, wanted in zip(found, expected, strict=True):
        assert record == wanted
    last = f"checkpoints/step_{expected[-1]['step']:06d}/model/model.safetensors"
    weights, wanted = load_file(run_dir / last), load_file(expected_dir / last)
    for name, weight in wanted.items():
        assert_bitwise_equal(weights[name], weight)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    train(run_dir, grpo={"max_num_steps": LONG}, checkpointing={"save_period": 4})
    return run_dir


def start_and_signal(config: Path, run_dir: Path, step: int, number: int) -> tuple[int, int, str]:
    """Run in a process of its own until `step` is on disk, then signal it.

    Returns:
        Its exit code, the steps that were written, and what it printed as its error.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")])}
    command = [sys.executable, "-m", "qarl_nemo.cli", "train", str(config)]
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    try:
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < step:
            assert process.poll() is None, f"the run ended with code {process.returncode} before step {step}"
            assert time.monotonic() < deadline, f"step {step} was not reached in two minutes"
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.05))
        process.send_signal(number)
        printed = process.communicate(timeout=120)[1]
    finally:
        process.kill()
        process.wait()
    return process.returncode, metrics.read_bytes().count(b"\n"), printed


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_metrics(uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    blocks = {"grpo": {"max_num_steps": LONG}, "checkpointing": {"save_period": 4}}
    config = write_config(tmp_path / "run.yaml", run_dir, **blocks)
    step = random.SystemRandom().randrange(1, LONG // 2)
    code, written, _ = start_and_signal(config, run_dir, step, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert written < LONG, f"killed after step {step}, but the run had already ended"
    trainer = Trainer(make_config(run_dir, **blocks))
    assert trainer.step is not None
    assert written - 4 <= trainer.step <= written, f"killed after step {step}"
    trainer.train()
    assert_same_run(run_dir, uninterrupted)


@pytest.mark.slow
def test_a_run_that_is_told_to_end_saves_and_goes_on_to_the_same_metrics(uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    blocks = {"grpo": {"max_num_steps": LONG}, "checkpointing": {"save_period": 100}}
    config = write_config(tmp_path / "run.yaml", run_dir, **blocks)
    code, written, printed = start_and_signal(config, run_dir, 2, signal.SIGTERM)
    assert code == 143, printed
    assert written < LONG
    told = f"qarl: stopped at step {written}, checkpoint {written}; the same command goes on\n"
    assert printed.endswith(told), printed
    assert "told to end (SIGTERM)" in printed
    train(run_dir, **blocks)
    assert_same_run(run_dir, uninterrupted)


def test_the_step_in_which_a_run_is_told_to_end_is_its_last(uninterrupted, tmp_path, monkeypatch):
    def tell(trainer, *arguments):
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return rewards(trainer, *arguments)

    rewards = Trainer.rewards
    monkeypatch.setattr(Trainer, "rewards", tell)
    blocks = {"grpo": {"max_num_steps": LONG}, "checkpointing": {"save_period": 100}}
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunToldError, match="stopped at step 5, checkpoint 5; the same command goes on"):
        train_run(make_config(tmp_path, **blocks))
    assert signal.getsignal(signal.SIGTERM) == before
    # A cluster gives little time.
    assert "validation/reward" not in read_metrics(tmp_path)[-1]
    monkeypatch.undo()
    train(tmp_path, **blocks)
    assert_same_run(tmp_path, uninterrupted)


def test_a_run_that_is_told_to_end_in_its_last_step_is_complete(tmp_path, monkeypatch):
    def tell(trainer, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return rewards(trainer, *arguments)

    rewards = Trainer.rewards
    monkeypatch.setattr(Trainer, "rewards", tell)
    config = make_config(tmp_path, grpo={"max_num_steps": 1, "val_period": 2, "val_at_end": True})
    assert train_run(config) is not None
    assert train_run(config) is None
    assert "validation/reward" in read_metrics(tmp_path)[-1]


def test_another_seed_gives_other_metrics(uninterrupted, tmp_path):
    train(tmp_path, seed=4)
    records, expected = (without_clocks(read_metrics(folder)) for folder in (tmp_path, uninterrupted))
    assert records[0] != expected[0]


CONTINUED = {
    "muon": {"policy": {"optimizer": {"_override_": True, "name": "muon", "lr": 1e-3, "warmup_steps": 3}}},
    "bfloat16": {"policy": {"precision": "bfloat16"}},
    "fp8_block": {"qarl": QARL["fp8_block"]},
    "rollout_only": {"qarl": {"alignment": "rollout_only"}},
}


@pytest.mark.parametrize("blocks", CONTINUED.values(), ids=CONTINUED)
def test_a_run_continued_with_more_steps_equals_one_run(blocks, tmp_path):
    train(tmp_path / "whole", **blocks)
    train(tmp_path / "parts", grpo={"max_num_steps": 2}, **blocks)
    assert len(read_metrics(tmp_path / "parts")) == 2
    train(tmp_path / "parts", **blocks)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_run_that_goes_on_elsewhere_says_all_that_it_ran_on(tmp_path):
    train(tmp_path, grpo={"max_num_steps": 1})
    file = tmp_path / "run.json"
    here = json.loads(file.read_text())
    file.write_text(json.dumps(here | {"hardware": "1 cores of another"}))
    train(tmp_path, grpo={"max_num_steps": 2})
    assert json.loads(file.read_text()) == here | {"hardware": f"1 cores of another, then {here['hardware']}"}


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
    Trainer(make_config(tmp_path / "run"))  # config.yaml and quantized.json are there, no checkpoint is
    train(tmp_path / "run")
    train(tmp_path / "whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    train(tmp_path / "whole")
    train(tmp_path / "parts", grpo={"max_num_steps": 2})
    partial = tmp_path / "parts" / "checkpoints" / "step_000004.partial" / "model"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    train(tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_finished_run_stays_as_it_is(tmp_path):
    train(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    train(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_run_goes_on_under_another_name(tmp_path):
    train(tmp_path, grpo={"max_num_steps": 1}, run={"name": "before"})
    train(tmp_path, grpo={"max_num_steps": 2})
    assert len(read_metrics(tmp_path)) == 2


def test_another_config_is_refused_naming_the_keys(tmp_path):
    train(tmp_path, grpo={"max_num_steps": 1})
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError) as raised:
        train(tmp_path, qarl={"group_size": 64}, loss_fn={"mismatch_cap": 3.0}, seed=5)
    for line in (
        "qarl.group_size: there 32, now 64",
        "loss_fn.mismatch_cap: there 2.0, now 3.0",
        "seed: there 3, now 5",
    ):
        assert line in str(raised.value)
    assert (tmp_path / "metrics.jsonl").read_text() == before


class NotFinite:
    """The run's own objective times NaN."""

    def __init__(self, loss_fn):
        self.loss_fn = loss_fn

    def __call__(self, logprobs, data):
        return self.loss_fn(logprobs * float("nan"), data)


def test_a_skipped_step_names_the_response_and_the_run_goes_on(tmp_path, capsys):
    trainer = Trainer(make_config(tmp_path, grpo={"max_num_steps": 2}))
    prev_logprobs = trainer.learner.prev_logprobs

    def with_one_broken(rollouts):
        prev = prev_logprobs(rollouts)
        prev[5, 0] = float("-inf") if trainer.step == 0 else 0.0
        return prev

    trainer.learner.prev_logprobs = with_one_broken
    trainer.train()
    assert [record["optim/skipped_steps"] for record in read_metrics(tmp_path)] == [1, 0]
    printed = " ".join(capsys.readouterr().out.split())
    assert "step 1: optimizer step skipped: response 5, response token 0: prev_logprobs is -inf" in printed


def test_repeated_non_finite_steps_stop_the_run_with_a_checkpoint(tmp_path):
    train(tmp_path, grpo={"max_num_steps": 1})
    trainer = Trainer(make_config(tmp_path, grpo={"max_num_steps": 9}, checkpointing={"save_period": 9}))
    trainer.learner.loss_fn = NotFinite(trainer.learner.loss_fn)
    good = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    # two minibatches a step, three skipped steps allowed: the second step is the last
    with pytest.raises(RuntimeError, match="4 optimizer steps in a row had a non-finite loss"):
        trainer.train()
    assert [record["optim/skipped_steps"] for record in read_metrics(tmp_path)] == [0, 2, 2]
    assert [record["weight_version"] for record in read_metrics(tmp_path)] == [2, 2, 2]
    resumed = Trainer(make_config(tmp_path, grpo={"max_num_steps": 4}))
    assert resumed.step == 3
    for name, parameter in resumed.model.named_parameters():
        assert_bitwise_equal(parameter.detach(), good[name])
    resumed.train()
    assert read_metrics(tmp_path)[-1]["optim/skipped_steps"] == 0
    assert all(torch.isfinite(parameter).all() for parameter in resumed.model.parameters())


def test_as_many_skipped_steps_as_are_allowed_are_too_many(tmp_path):
    blocks = {"policy": {"max_skipped_steps": 2}, "checkpointing": {"enabled": False}}
    trainer = Trainer(make_config(tmp_path, **blocks))
    trainer.learner.loss_fn = NotFinite(trainer.learner.loss_fn)
    with pytest.raises(
        RuntimeError, match=r"^2 optimizer steps .*\(step 1\); in the last one \w.*last finite step, not saved"
    ):
        trainer.train()
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_whose_problems_have_changed_does_not_go_on(tmp_path):
    problems = [{"problem": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    template = tmp_path / "template.jinja"

    def go_on(answers, steps, text="{{ messages[0].content }}"):
        template.write_text(text)
        write_jsonl(tmp_path / "problems.jsonl", answers)
        data = {"_override_": True, "source": "datasets", "train": {"data_path": str(tmp_path / "problems.jsonl")}}
        tokenizer = {"chat_template": str(template)}
        grpo = {"max_num_steps": steps, "num_prompts_per_step": 4, "train_global_batch_size": 16}
        return train(tmp_path / "run", data=data, grpo=grpo, policy={"tokenizer": tokenizer})

    go_on(problems, 1)
    with pytest.raises(ConfigError, match=r"run: data\.train or the chat template hold other prompts"):
        go_on([*problems[:-1], {"problem": "7+1=", "answer": "9"}], 2)
    with pytest.raises(ConfigError, match="the chat template"):
        go_on(problems, 2, "{{ messages[0].content }} ")
    go_on(problems, 2)
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2]


def test_a_run_whose_template_writes_the_day_goes_on_the_day_after(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "problems.jsonl", [{"problem": f"{n}+1=", "answer": str(n + 1)} for n in range(8)])
    data = {"_override_": True, "source": "datasets", "train": {"data_path": str(tmp_path / "problems.jsonl")}}
    policy = {"tokenizer": {"chat_template": "{{ strftime_now('%d%m') }} {{ messages[0].content }}"}}
    train(tmp_path / "run", data=data, policy=policy, grpo={"max_num_steps": 1})
    let_a_day_pass(monkeypatch)
    train(tmp_path / "run", data=data, policy=policy, grpo={"max_num_steps": 2})
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2]


def test_a_run_that_remembers_what_its_template_wrote_goes_on(tmp_path):
    problems = [{"problem": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    write_jsonl(tmp_path / "problems.jsonl", problems)
    data = {"_override_": True, "source": "datasets", "train": {"data_path": str(tmp_path / "problems.jsonl")}}
    train(tmp_path / "run", data=data, grpo={"max_num_steps": 1})
    written = "".join(json.dumps([problem["problem"], problem["answer"]]) for problem in problems)
    held = {"train": hashlib.sha256(written.encode()).hexdigest()}
    (tmp_path / "run" / "data.json").write_text(json.dumps(held))
    train(tmp_path / "run", data=data, grpo={"max_num_steps": 2})
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2]


def test_a_run_whose_time_is_short_validates_saves_and_goes_on_to_the_same_metrics(
    uninterrupted, tmp_path, monkeypatch, capsys
):
    run_dir, ticks = tmp_path / "run", itertools.count()
    # This clock goes on by a second whenever it is read, on every machine.
    monkeypatch.setattr("qarl_nemo.train.trainer.TimeLimit", partial(TimeLimit, clock=lambda: next(ticks)))
    blocks = {"grpo": {"max_num_steps": LONG}, "checkpointing": {"save_period": 4}}
    limited = blocks | {"checkpointing": {"save_period": 4, "checkpoint_must_save_by": "00:00:00:25"}}
    train_run(make_config(run_dir, **limited))
    records = read_metrics(run_dir)
    last = records[-1]["step"]
    assert last < LONG
    assert last % 2 == 1, "the last step should be one without a validation of its own"
    assert 0 <= records[-1]["validation/reward"] <= 1
    told = f"checkpoint_must_save_by=00:00:00:25 is near, stopped at step {last}, checkpoint {last}; the same command"
    assert told in " ".join(capsys.readouterr().out.split())
    train(run_dir, **blocks)
    metrics = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    del lines[last - 1]["validation/reward"]
    write_jsonl(metrics, lines)
    assert_same_run(run_dir, uninterrupted)


def test_a_run_may_end_with_a_validation_and_still_go_on_to_the_same_metrics(uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    train(run_dir, grpo={"max_num_steps": 3, "val_at_end": True})
    metrics = run_dir / "metrics.jsonl"
    assert 0 <= read_metrics(run_dir)[-1]["validation/reward"] <= 1
    train(run_dir, grpo={"max_num_steps": LONG})
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert lines[2].pop("validation/reward") is not None
    write_jsonl(metrics, lines)
    assert_same_run(run_dir, uninterrupted)


def test_a_run_that_went_on_leaves_time_for_the_validation_and_the_checkpoint_that_it_has_not_done_yet(
    tmp_path, monkeypatch
):
    now, saved = [0.0], []

    class SlowTrainer(Trainer):
        """Takes 50 s for a step, 100 s for a validation and 20 s for a checkpoint."""

        def rewards(self, *arguments):
            now[0] += 50
            return super().rewards(*arguments)

        def validate(self, step):
            now[0] += 100
            return super().validate(step)

        def _save(self, version):
            super()._save(version)
            saved.append((self.step, now[0]))

    def slow_save(*arguments, **options):
        now[0] += 20
        return save_checkpoint(*arguments, **options)

    monkeypatch.setattr("qarl_nemo.train.trainer.TimeLimit", partial(TimeLimit, clock=lambda: now[0]))
    monkeypatch.setattr("qarl_nemo.train.trainer.save_checkpoint", slow_save)
    blocks = {"grpo": {"max_num_steps": 2, "val_period": 100}, "checkpointing": {"save_period": 100}}
    SlowTrainer(make_config(tmp_path, **blocks)).train()
    now[0] = 0.0
    blocks = {"grpo": {"max_num_steps": LONG, "val_period": 100}}
    limit = {"save_period": 100, "checkpoint_must_save_by": "00:00:05:00"}
    SlowTrainer(make_config(tmp_path, **blocks, checkpointing=limit)).train()
    assert read_metrics(tmp_path)[-1]["validation/reward"] is not None
    # Three steps, the validation and the checkpoint; another step with a validation would have been too long.
    assert saved[-1] == (5, 270.0)
