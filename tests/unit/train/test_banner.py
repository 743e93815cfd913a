"""The start banner, and which phases are told where there is no terminal."""

import re
import time
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from qarl_nemo.config import validate
from qarl_nemo.train.banner import banner_lines
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.noise import NoiseConfig
from qarl_nemo.train.preflight import prepare
from qarl_nemo.train.progress import LiveProgress, working


def config(**blocks) -> LocalConfig:
    base = {
        "run_dir": "runs/a",
        "device": "cpu",
        "policy": {"model_init": {}},
        "loss_fn": {"objective": "tbpo"},
        "checkpointing": {"save_period": 5, "keep_last": 3},
    }
    return validate(base | blocks, LocalConfig, source="test")


def test_it_says_what_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = config(qarl={"targets": ["experts", "attention"]}, run={"name": "demo"})
    lines = banner_lines(made, prepare(made), 5)
    assert lines["run"] == f"demo, resumed from step 5, to step 200; seed 0, in {Path('runs/a')}"
    # 2 layers: stacked experts, and 4 linears of attention, each; beside them 4 + 1 norms' and a router's modules
    assert lines["rollouts"].startswith("w4a16 in groups of 128, 10 of ")
    assert "(experts, attention), engine packed" in lines["rollouts"]
    assert "0.89" not in lines["model"]
    assert "885,000" not in lines["model"]
    assert lines["model"].startswith("random weights (policy.model_init), 892,")
    assert lines["model"].endswith(" parameters, float32 on cpu")
    # float32: a parameter and AdamW's two moments, 12 bytes each
    assert lines["checkpoints"] == "10.7 MB each, every 5 steps, the newest 3 stay"
    assert not Path("runs").exists()


def test_update_aware_steps_are_said(tmp_path):
    made = config(
        run_dir=str(tmp_path), policy={"model_init": {}, "optimizer": {"name": "adamw", "update_aware_scale": 1.5}}
    )
    assert banner_lines(made, prepare(made), None)["learner"].endswith(" responses a step, update-aware steps of 1.5")


def test_it_says_what_differs(tmp_path):
    bf16 = {"alignment": "none", "format": "bf16"}
    noise = {"noise": {"relative": True}}
    made = config(run_dir=str(tmp_path), qarl=bf16, checkpointing={"enabled": False}, rollout=noise)
    lines = banner_lines(made, prepare(made), None)
    assert lines["rollouts"].endswith(", noise of 0.01 to 0.0001 of |w| on norms in 10 stages, replayed")
    assert lines["run"].startswith(f"{tmp_path.name}, new, to step 200")
    assert lines["rollouts"].startswith("bf16, 0 of ")
    assert lines["learner"].startswith("executes BF16, tbpo, 64 prompts x 8 responses")
    assert lines["checkpoints"] == "off: a run that is stopped cannot go on"


def test_it_says_how_many_responses_the_kv_cache_holds(tmp_path):
    blocks = {
        "run_dir": str(tmp_path),
        "checkpointing": {"enabled": False},
        "qarl": {"router_replay": False},
        "policy": {"model_init": {}, "precision": "bfloat16"},
    }
    prepared = prepare(config(**blocks))
    # 2 layers, keys and values, 2 heads of 32 in BF16
    assert prepared.kv_bytes == 2 * 2 * 2 * 32 * 2
    assert "KV cache" not in banner_lines(config(**blocks), prepared, None)
    vllm = {"engine": "vllm", "max_new_tokens": 2048, "kv_cache_gib": 0.25}
    # 1 MiB a response: the 512 of a step need twice the memory
    line = banner_lines(config(**blocks, rollout=vllm), prepared, None)["KV cache"]
    held = "0.25 GiB, 256 responses of 2048 tokens"
    assert line == f"{held}; 512 run at once and would wait for each other: set rollout.kv_cache_gib=1"
    assert banner_lines(config(**blocks, rollout=vllm | {"batch_size": 256}), prepared, None)["KV cache"] == held


@pytest.mark.parametrize(("silent_s", "told"), [(0.0, False), (61.0, True)])
def test_a_phase_is_told_when_a_step_takes_minutes(silent_s, told, capsys):
    with LiveProgress("demo", 10, 3) as progress:
        progress.printed = time.perf_counter() - silent_s
        progress.phase("update")
        progress.phase("refit")
    printed = capsys.readouterr().out
    assert ("demo step 4/10: update" in printed) == told
    assert "refit" not in printed


@pytest.mark.parametrize("terminal", [False, True])
def test_a_name_with_brackets_is_shown_as_it_is(terminal, monkeypatch, capsys):
    name = "QaRL [w4a16][/mlp]"
    monkeypatch.setattr("qarl_nemo.train.progress.Console", partial(Console, force_terminal=terminal))
    with LiveProgress(name, 2) as progress:
        progress.phase("update")
        progress.update(2, reward=0.5)
    assert name in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)


@pytest.mark.parametrize(("seconds", "told"), [(1.0, "aligning the layers"), (48.0, "aligning the layers took 48 s")])
def test_work_that_took_long_says_how_long(seconds, told, monkeypatch, capsys):
    clock = iter([100.0, 100.0 + seconds])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with working("aligning the layers"):
        pass
    assert capsys.readouterr().out.splitlines()[-1] == told


@pytest.mark.parametrize(("steps", "told"), [(7, ["demo ends at 7/10: enough"]), (10, [])])
def test_an_end_before_the_last_step_is_told_with_its_reason(steps, told, capsys):
    with LiveProgress("demo", 10) as progress:
        progress.update(steps)
    progress.ended("enough")
    assert [line for line in capsys.readouterr().out.splitlines() if "ends" in line] == told


def test_a_stage_that_the_run_does_not_reach_is_pointed_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schedule = [{"from_step": 200, "bits": 4}, {"from_step": 201, "bits": 3}]
    made = config(qarl={"format": "w8a16", "group_size": 32, "schedule": schedule})
    said = banner_lines(made, prepare(made), None)["rollouts"]
    assert "4 bits from step 200, 3 bits from step 201, which this run does not reach, " in said


@pytest.mark.parametrize(
    ("steps", "said"), [(10, "10 stages, "), (9, "10 stages (only 9 of them in a run of 9 steps), ")]
)
def test_stages_of_noise_that_a_short_run_leaves_out_are_pointed_out(steps, said, tmp_path):
    made = config(run_dir=str(tmp_path), rollout={"noise": {}}, grpo={"max_num_steps": steps})
    assert len({NoiseConfig().stage(step, steps) for step in range(1, steps + 1)}) == steps
    assert f"on norms in {said}replayed" in banner_lines(made, prepare(made), None)["rollouts"]
