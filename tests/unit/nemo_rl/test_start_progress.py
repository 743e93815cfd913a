"""What a run says while it starts, and what it notes for the next start."""

import json
import time
from pathlib import Path

import pytest

from qarl_nemo.nemo_rl.start_progress import shown_start


def start(folder: Path) -> list[str]:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"command": "python"}')
    lines: list[str] = []
    with shown_start(folder, period_s=0.01, show=lines.append):
        while not lines:
            time.sleep(0.01)
    return lines


def test_the_first_start_says_how_long_it_has_been_at_it_and_notes_its_seconds(tmp_path):
    lines = start(tmp_path / "exp_001")
    assert lines[0].startswith("qarl: starting for 0 s; engines and learner take minutes")
    written = json.loads((tmp_path / "exp_001" / "run.json").read_text())
    assert written["command"] == "python"
    assert 0 <= written["start_s"] < 60


@pytest.mark.parametrize(("last", "said"), [(1000, "about 1000 s more"), (0, "the last start took 0 s")])
def test_a_later_start_says_how_long_it_will_take(tmp_path, last, said):
    (tmp_path / "exp_001").mkdir()
    (tmp_path / "exp_001" / "run.json").write_text(json.dumps({"start_s": last}))
    (tmp_path / "exp_002").mkdir()
    (tmp_path / "exp_002" / "run.json").write_text("{cut")
    assert said in start(tmp_path / "exp_003")[0]


def test_a_start_that_fails_notes_nothing(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RuntimeError, match="no GPU"), shown_start(tmp_path, period_s=0.01, show=print):
        raise RuntimeError("no GPU")
    assert json.loads((tmp_path / "run.json").read_text()) == {}


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("{cut")])
def test_seconds_that_cannot_be_noted_cost_a_line_and_not_the_run(tmp_path, damage):
    (tmp_path / "run.json").write_text("{}")
    lines: list[str] = []
    with shown_start(tmp_path, show=lines.append):
        damage(tmp_path / "run.json")
    assert lines[-1].startswith("qarl: the start's seconds are not noted: ")
