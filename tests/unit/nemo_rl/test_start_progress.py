"""What a run says while it starts, and what it notes for the next start."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_nemo_rl_config import config

from qarl_nemo.files import FileError, exclusive
from qarl_nemo.nemo_rl import start_progress
from qarl_nemo.nemo_rl.config import apply_qarl
from qarl_nemo.nemo_rl.start_progress import StartProgress, start_key


class Start:
    """A start on a clock that stands still unless it is moved."""

    def __init__(self, logs: Path, key: str = "a", period_s: float = 1000) -> None:
        self.now, self.lines = 100.0, []
        self.logs, self.folder = logs, logs / f"exp_{len(list(logs.glob('*'))):03d}"
        self.progress = StartProgress(period_s=period_s, clock=lambda: self.now, show=self.lines.append)
        self.progress.begin(key, logs, "Ray")
        self.folder.mkdir(parents=True)
        (self.folder / "run.json").write_text('{"command": "python"}')
        self.synchronizer = SimpleNamespace(sync_weights=self.refit)
        self.fails = False

    def refit(self, timer=None):
        if self.fails:
            raise RuntimeError("no GPU")
        return {"version": timer}

    def after(self, seconds: float, stage: str) -> str:
        """Enter a stage so many seconds after the start began, and return what is said."""
        self.now = 100.0 + seconds
        self.progress.enter(stage)
        return self.lines[-1]

    def end(self, seconds: float) -> None:
        self.now = 100.0 + seconds
        self.progress.end_with_refit(self.synchronizer, self.folder)
        assert self.synchronizer.sync_weights(timer=3) == {"version": 3}


@pytest.fixture(autouse=True)
def starts(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "qarl_nemo" / "starts.json"


def test_the_first_start_says_that_it_is_and_notes_its_seconds(tmp_path, starts):
    start = Start(tmp_path / "logs")
    assert start.after(20, "engines").startswith("qarl: start: engines  20 s; first start of this model, format and")
    start.end(122.04)
    assert start.lines[-1] == "qarl: start: done after 122 s"
    assert json.loads(starts.read_text()) == {"a": 122.0}
    assert json.loads((start.folder / "run.json").read_text()) == {"command": "python", "start_s": 122.0}


def test_a_later_start_counts_down_and_never_below_zero(tmp_path):
    Start(tmp_path / "logs").end(122)
    start = Start(tmp_path / "other_logs")
    took = "(the last start of this model, format and layout took 122 s)"
    assert start.lines == [f"qarl: start: Ray  0 s, ETA 122 s {took}"]
    assert start.after(62, "learner") == f"qarl: start: learner  62 s, ETA 60 s {took}"
    assert start.after(122, "first refit") == f"qarl: start: first refit  122 s, longer than the last time {took}"


def test_the_newest_start_of_the_same_key_counts(tmp_path):
    for seconds, key in ((300, "a"), (122, "a"), (10, "b")):
        Start(tmp_path / "logs", key).end(seconds)
    assert "ETA 122 s" in Start(tmp_path / "logs", "a").lines[0]


def test_a_start_without_its_like_takes_the_log_folders_newest_and_says_so(tmp_path):
    Start(tmp_path / "logs", "b").end(50)
    (tmp_path / "logs" / "exp_001").mkdir()
    (tmp_path / "logs" / "exp_001" / "run.json").write_text("{cut")
    assert Start(tmp_path / "logs").lines == [
        "qarl: start: Ray  0 s, ETA 50 s (the last start in this log folder took 50 s)"
    ]
    assert "first start" in Start(tmp_path / "elsewhere").lines[0]


def test_lines_come_now_and_then_within_a_stage_and_stop_at_the_end(tmp_path):
    start = Start(tmp_path / "logs", period_s=0.01)
    while len(start.lines) < 3:
        time.sleep(0.01)
    start.end(5)
    time.sleep(0.1)
    said = len(start.lines)
    time.sleep(0.1)
    assert len(start.lines) == said


def test_only_the_first_refit_ends_a_start_and_a_failed_one_notes_nothing(tmp_path, starts):
    start = Start(tmp_path / "logs")
    start.fails = True
    with pytest.raises(RuntimeError, match="no GPU"):
        start.end(10)
    start.progress.close()
    assert not starts.exists()
    assert "start_s" not in (start.folder / "run.json").read_text()
    start.fails = False
    assert start.synchronizer.sync_weights(timer=1) == {"version": 1}
    start.now += 1000
    assert start.synchronizer.sync_weights(timer=2) == {"version": 2}
    assert json.loads(starts.read_text()) == {"a": 10.0}


@pytest.mark.parametrize(
    "damaged", ["{cut", "[1]", '{"a": "122"}', '{"a": NaN}', '{"a": 1e999}', '{"a": true}', '{"a": -1}', '{"a": 1e7}']
)
def test_a_damaged_cache_is_ignored_and_written_anew(tmp_path, starts, damaged):
    starts.parent.mkdir(parents=True)
    starts.write_text(damaged)
    start = Start(tmp_path / "logs")
    assert "first start" in start.lines[0]
    start.end(30)
    assert json.loads(starts.read_text()) == {"a": 30.0}


def test_what_a_damaged_cache_still_says_is_used(tmp_path, starts):
    starts.parent.mkdir(parents=True)
    starts.write_text('{"a": 122, "b": null}')
    assert "ETA 122 s" in Start(tmp_path / "logs").lines[0]


def homeless():
    raise RuntimeError("Could not determine home directory.")


def test_a_cache_that_cannot_be_written_costs_a_line_and_not_the_run(tmp_path, starts, monkeypatch):
    starts.parent.parent.write_text("a file in the folder's place")
    start = Start(tmp_path / "logs")
    start.end(30)
    assert start.lines[-1].startswith(f"qarl: the start's seconds are not noted: {starts.parent} cannot be made")
    # The log folder has them all the same.
    assert "ETA 30 s (the last start in this log folder" in Start(tmp_path / "logs").lines[0]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    start = Start(tmp_path / "logs")
    start.end(31)
    assert start.lines[-1] == "qarl: the start's seconds are not noted: Could not determine home directory."


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("{cut")])
def test_a_damaged_run_json_costs_a_line_and_not_the_run(tmp_path, damage):
    start = Start(tmp_path / "logs")
    damage(start.folder / "run.json")
    start.end(30)
    assert start.lines[-1].startswith(f"qarl: the start's seconds are not noted: {start.folder / 'run.json'}")


def test_the_cache_keeps_the_newest_fifty(starts):
    for number in range(60):
        start_progress._remember(f"key {number}", number)
    start_progress._remember("key 10", 1)
    assert list(json.loads(starts.read_text())) == [*(f"key {number}" for number in range(11, 60)), "key 10"]


def test_of_two_writers_at_once_neither_loses_its_seconds(starts):
    both = threading.Barrier(2)

    def write(name):
        both.wait()
        for number in range(20):
            for _ in range(500):
                try:
                    start_progress._remember(f"{name} {number}", number)
                    break
                except FileError:
                    # A start does not wait for another one's lock.
                    time.sleep(0.01)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, ("one", "two")))
    assert len(json.loads(starts.read_text())) == 40
    assert [file.name for file in starts.parent.iterdir()] == ["starts.json"]


def test_a_start_does_not_wait_for_a_lock(tmp_path, starts):
    start = Start(tmp_path / "logs")
    starts.parent.mkdir(parents=True)
    with exclusive(starts.with_suffix(".lock"), "the seconds of starts"):
        start.end(30)
    assert "the start's seconds are not noted" in start.lines[-1]
    assert not starts.exists()


LEARNER_EP = "policy.megatron_cfg.expert_model_parallel_size"
GPUS = {"cluster": {"num_nodes": 1, "gpus_per_node": 8}}
ENGINE = "policy.generation.vllm_cfg"


def key(qarl=None, **changes) -> str:
    values = config(qarl, **GPUS | {"policy.megatron_cfg.sequence_parallel": True} | changes)
    return start_key(values, apply_qarl(config(qarl)))


@pytest.mark.parametrize(
    ("qarl", "changes"),
    [
        ({"format": "w4a16", "targets": ["experts", "attention"]}, {}),
        (None, {"policy.hf_config_overrides": {"num_hidden_layers": 24}}),
        (None, {"policy.model_name": "nobody/nothing-of-this-name"}),
        (None, {"cluster": {"num_nodes": 2, "gpus_per_node": 8}}),
        (None, {LEARNER_EP: 4}),
        (None, {f"{ENGINE}.tensor_parallel_size": 2}),
        (None, {f"{ENGINE}.tensor_parallel_size": 2, f"{ENGINE}.expert_parallel_size": 2}),
        (None, {"policy.generation.colocated": {"enabled": False, "resources": {"gpus_per_node": 2}}}),
    ],
)
def test_the_key_tells_starts_of_unlike_length_apart(qarl, changes):
    assert key(qarl, **changes) != key()


def test_the_key_does_not_tell_starts_of_like_length_apart():
    assert key(**{"grpo.num_prompts_per_step": 32}) == key()
    assert "model_type=qwen3_moe hidden_size=2048" in key()
    assert "format=w4a16 targets=experts alignment=aligned nodes=1 gpus_per_node=8 colocated=True" in key()


def test_the_key_is_the_same_in_every_process():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_start_progress as test; "
        "print(test.key({'format': 'w4a16', 'targets': ['attention', 'experts']}))"
    )
    said = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
                       check=True, capture_output=True, text=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert said == {key({"format": "w4a16", "targets": ["experts", "attention"]}) + "\n"}
