import json
import math
import sys

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qarl_nemo.files import FileError
from qarl_nemo.metrics.diagnostics import DiagnosticsCollector, diagnostic_steps
from qarl_nemo.metrics.events import METRICS_FILE, EventWriter, recorded_steps
from qarl_nemo.metrics.recorded import StepRecord, read_lines
from qarl_nemo.metrics.validations import validation_files, write_validation


def metrics_of(step):
    return {"reward/mean": 0.1 * step, "weight_version": step, "loss/total": 1 / 3 * step}


def write_steps(run_dir, steps, **settings):
    with EventWriter(run_dir, **settings) as writer:
        for step in steps:
            writer.write(step, metrics_of(step))
    return run_dir / "metrics.jsonl"


def test_each_step_is_one_flat_record_on_disk_at_once(tmp_path):
    writer = EventWriter(tmp_path)
    writer.write(1, {"reward/mean": torch.tensor(0.5), "weight_version": 3, "optim/lr": np.float32(0.25)})
    text = (tmp_path / "metrics.jsonl").read_text()
    writer.close()
    assert text == '{"step": 1, "reward/mean": 0.5, "weight_version": 3, "optim/lr": 0.25}\n'


def test_values_json_does_not_have_become_null(tmp_path):
    with EventWriter(tmp_path) as writer:
        writer.write(1, {"a": math.nan, "b": math.inf, "c": -1e40, "d": 1.0, "e": True})
    line = (tmp_path / "metrics.jsonl").read_text()
    expected = {"step": 1, "a": None, "b": None, "c": None, "d": 1.0, "e": 1}
    assert json.loads(line, parse_constant=pytest.fail) == expected
    assert read_lines(tmp_path / "metrics.jsonl", StepRecord) == [expected]


@pytest.mark.parametrize("tail", ["", '{"step": 7, "rew'], ids=["whole", "cut short"])
def test_a_killed_and_resumed_run_writes_the_bytes_of_an_uninterrupted_one(tmp_path, tail):
    whole = write_steps(tmp_path / "whole", range(1, 9))
    killed = write_steps(tmp_path / "killed", range(1, 7))
    with killed.open("a") as file:
        file.write(tail)
    write_steps(tmp_path / "killed", range(5, 9), resume_step=4)
    assert killed.read_bytes() == whole.read_bytes()
    write_steps(tmp_path / "killed", range(6, 9), resume_step=4)
    assert killed.read_bytes() != whole.read_bytes()


def test_a_last_line_that_was_cut_within_a_character_is_left_out(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes('{"step": 1}\n{"text": "é'.encode()[:-1])
    assert list(read_lines(path)) == [{"step": 1}]


def test_resuming_drops_the_diagnostics_and_validations_of_later_steps(tmp_path):
    write_steps(tmp_path, range(1, 7))
    for step in (2, 4, 6):
        DiagnosticsCollector(step).write(tmp_path)
        write_validation(tmp_path, step, [])
    write_steps(tmp_path, [], resume_step=4)
    assert diagnostic_steps(tmp_path) == [2, 4]
    assert {path.stem for path in (tmp_path / "diagnostics").iterdir()} == {"step_000002", "step_000004"}
    assert list(validation_files(tmp_path)) == [2, 4]


def test_resuming_before_the_first_checkpoint_starts_over(tmp_path):
    write_steps(tmp_path, range(1, 4))
    path = write_steps(tmp_path, [1], resume_step=0)
    assert [record["step"] for record in read_lines(path)] == [1]


def test_a_broken_line_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: expected a JSON object, but it is not JSON"):
        read_lines(path)
    path.write_bytes(b'{"step": 1}\n{"a": "\xff"}\n')
    with pytest.raises(FileError, match=r"metrics.jsonl, line 2: expected one JSON object a line, but it is not UTF-8"):
        read_lines(path)
    path.write_text("[1]\n")
    with pytest.raises(
        ValueError, match=r"metrics.jsonl, line 1: expected a JSON object, an object, but it holds \[1\]"
    ):
        read_lines(path)


def test_tensorboard_shows_the_resumed_steps_once(tmp_path):
    write_steps(tmp_path, range(1, 7))
    with EventWriter(tmp_path, resume_step=4) as writer:
        writer.write(5, {"reward/mean": 50.0, "loss/total": math.nan})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(event.step, round(event.value, 6)) for event in events.Scalars("reward/mean")]
    assert points == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 50.0)]
    assert [event.step for event in events.Scalars("loss/total")] == [1, 2, 3, 4]


def test_wandb_asked_for_and_missing_names_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install -e '.\[wandb\]'"):
        EventWriter(tmp_path, wandb_project="qarl")
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_no_report_reads_is_refused_before_a_run_goes_on(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1, "reward/mean": true}\n')
    with pytest.raises(FileError, match=r"metrics.jsonl, line 1 is damaged.*reward/mean"):
        recorded_steps(path)
