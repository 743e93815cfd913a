"""The start banner, and which phases are told where there is no terminal."""

import time
from pathlib import Path

import pytest

from qarl_nemo.config import validate
from qarl_nemo.train.banner import banner_lines
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.preflight import prepare
from qarl_nemo.train.progress import LiveProgress


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


def test_it_says_what_differs(tmp_path):
    bf16 = {"alignment": "none", "format": "bf16"}
    made = config(run_dir=str(tmp_path), qarl=bf16, checkpointing={"enabled": False})
    lines = banner_lines(made, prepare(made), None)
    assert "run, new, to step 200" in lines["run"]
    assert lines["rollouts"].startswith("bf16, 0 of ")
    assert lines["learner"].startswith("executes BF16, tbpo, 64 prompts x 8 responses")
    assert lines["checkpoints"] == "off: a run that is stopped cannot go on"


@pytest.mark.parametrize(("silent_s", "told"), [(0.0, False), (61.0, True)])
def test_a_phase_is_told_when_a_step_takes_minutes(silent_s, told, capsys):
    with LiveProgress("demo", 10, 3) as progress:
        progress.printed = time.perf_counter() - silent_s
        progress.phase("update")
        progress.phase("refit")
    printed = capsys.readouterr().out
    assert ("demo step 4/10: update" in printed) == told
    assert "refit" not in printed
