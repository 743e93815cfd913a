import json
import math
import runpy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qarl_nemo.metrics import results
from qarl_nemo.metrics.results import append_results, read_results

TOOL = Path(__file__).parents[3] / "tools" / "render_results.py"
RENDERING = runpy.run_path(str(TOOL))
render_grid, render_table = RENDERING["render_grid"], RENDERING["render_table"]


def row(name="demo_train_s", **changes):
    return {
        "name": name,
        "value": 96.4,
        "unit": "s",
        "op": "<=",
        "goal": 180,
        "hardware": "2 CPU cores",
        "versions": {"torch": "2.13.0"},
        "command": "make demo",
        "date": "2026-11-21",
    } | changes


def test_a_row_of_the_same_name_and_hardware_takes_the_old_ones_place(tmp_path):
    path = tmp_path / "results" / "local.json"
    append_results(path, [row(), row("reward_ratio", op=">=", goal=2, unit="", value=2.5)])
    append_results(path, [row(value=90.0), row(value=20.0, hardware="1x H200")])
    assert [(item.name, item.hardware, item.value) for item in read_results(path)] == [
        ("demo_train_s", "2 CPU cores", 90.0),
        ("reward_ratio", "2 CPU cores", 2.5),
        ("demo_train_s", "1x H200", 20.0),
    ]
    assert json.loads(path.read_text())[0] == row(value=90.0, goal=180.0)


def test_rows_that_are_added_side_by_side_are_all_kept(monkeypatch, tmp_path):
    def read_slowly(path):
        found = read_results(path)
        time.sleep(0.05)
        return found

    path = tmp_path / "local.json"
    append_results(path, [row("first")])
    monkeypatch.setattr(results, "read_results", read_slowly)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: append_results(path, [row(f"figure_{number}")]), range(4)))
    assert {item.name for item in read_results(path)} == {"first", *(f"figure_{number}" for number in range(4))}
    assert [file.name for file in tmp_path.iterdir()] == ["local.json"]


def test_of_one_figure_on_several_machines_the_newest_row_comes_last(tmp_path):
    path, mean = tmp_path / "local.json", "lost_w4a16_mean"
    # Seeds that ran on one machine, on another, and on the first again.
    for value, hardware in ((0.12, "1x H100"), (0.11, "1x H200"), (0.10, "1x H100"), (0.09, "1x H100")):
        append_results(path, [row(mean, value=value, hardware=hardware), row("other", hardware=hardware)])
        assert {item.name: item.value for item in read_results(path)}[mean] == value
    assert len(read_results(path)) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"value": "96"},
        {"value": math.nan},
        {"op": "~"},
        {"date": "21.11.2026"},
        {"date": "20261121"},
        {"name": ""},
        {"versions": {"torch": 2}},
        {"note": "extra"},
    ],
    ids=str,
)
def test_an_illegal_row_is_named_and_nothing_is_written(tmp_path, changes):
    path = tmp_path / "local.json"
    with pytest.raises(ValueError, match=rf"row 1\.{next(iter(changes))}.*Fields of a row: name, value"):
        append_results(path, [row(), row("other") | changes])
    assert not path.exists()


def test_goal_is_required_but_may_be_null(tmp_path):
    incomplete = row()
    del incomplete["goal"]
    with pytest.raises(ValueError, match=r"row 0\.goal"):
        append_results(tmp_path / "a.json", [incomplete])
    (stored,) = append_results(tmp_path / "a.json", [row(goal=None)])
    assert stored.met is None


@pytest.mark.parametrize(("op", "met"), [("<=", True), (">=", True), ("==", True), ("<", False), (">", False)])
def test_met_compares_value_with_goal(tmp_path, op, met):
    (stored,) = append_results(tmp_path / "a.json", [row(op=op, value=2.0, goal=2.0)])
    assert stored.met is met


def test_tables_show_value_goal_and_whether_it_is_met_once_for_each_command(tmp_path):
    others = [row("slow", value=1234.5, command="a | b"), row("x"), row("y", goal=None, command="c")]
    assert render_table(append_results(tmp_path / "a.json", [row(), *others])).splitlines() == [
        "2 CPU cores, 2026-11-21: `make demo`",
        "",
        "| figure | value | goal | met |",
        "|---|---:|---:|---|",
        "| `demo_train_s` | 96.4 s | <= 180 | yes |",
        "| `x` | 96.4 s | <= 180 | yes |",
        "",
        "2 CPU cores, 2026-11-21: `a | b`",
        "",
        "| figure | value | goal | met |",
        "|---|---:|---:|---|",
        "| `slow` | 1,234 s | <= 180 | **no** |",
        "",
        "2 CPU cores, 2026-11-21: `c`",
        "",
        "| figure | value |",
        "|---|---:|",
        "| `y` | 96.4 s |",
    ]


def test_grid_places_figures_by_the_two_words_of_their_name(tmp_path):
    names = {"a_ratio_e1": 0.5, "a_ratio_e2": 2.0, "b_ratio_e2": 1.5}
    rows = append_results(
        tmp_path / "a.json", [row(name, value=value, unit="", goal=1.0) for name, value in names.items()]
    )
    lines = render_grid(rows, ["a", "b"], ["e1", "e2"], "{row}_ratio_{column}").splitlines()
    assert lines == ["| | e1 | e2 |", "|---|---:|---:|", "| `a` | 0.5 | **2** |", "| `b` |  | **1.5** |"]
    speeds = append_results(tmp_path / "b.json", [row("a_speed_e1", value=20543.2, unit="tokens/s", goal=None)])
    assert render_grid(speeds, ["a"], ["e1"], "{row}_speed_{column}").endswith("| `a` | 20,543 |")
    with pytest.raises(ValueError, match="no figure is called like a_time_e1"):
        render_grid(rows, ["a"], ["e1"], "{row}_time_{column}")


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (("s", "s", "s", "s"), ("| s | e1 | e2 |", "| `a` | 1 | 1 |", "| `b` | 1 | 1 |")),
        (("s", "s", "GiB", "GiB"), ("| | e1 | e2 |", "| `a`, s | 1 | 1 |", "| `b`, GiB | 1 | 1 |")),
        (("s", "GiB", "s", "GiB"), ("| | e1, s | e2, GiB |", "| `a` | 1 | 1 |", "| `b` | 1 | 1 |")),
        (("s", "GiB", "", "fraction"), ("| | e1 | e2 |", "| `a` | 1 s | 1 GiB |", "| `b` | 1 | 1 |")),
    ],
)
def test_a_grid_says_a_unit_as_seldom_as_it_can(tmp_path, units, expected):
    names = ("a_e1", "a_e2", "b_e1", "b_e2")
    figures = [row(name, value=1.0, unit=unit, goal=None) for name, unit in zip(names, units, strict=True)]
    rows = append_results(tmp_path / "a.json", figures)
    head, _, *lines = render_grid(rows, ["a", "b"], ["e1", "e2"], "{row}_{column}").splitlines()
    assert (head, *lines) == expected


@pytest.fixture
def docs(tmp_path):
    append_results(tmp_path / "results" / "local.json", [row()])
    (tmp_path / "guide.md").write_text("before\n<!-- results:local -->\nold\n<!-- /results -->\nafter\n")
    return tmp_path


def render(docs, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["render_results.py", "--docs", str(docs), *flags])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(TOOL), run_name="__main__")
    return exit_info.value.code


def test_check_fails_until_the_document_is_rendered(docs, monkeypatch, capsys):
    before = (docs / "guide.md").read_text()
    assert render(docs, monkeypatch, "--check") == 1
    assert "out of date: guide.md" in capsys.readouterr().out
    assert (docs / "guide.md").read_text() == before
    assert render(docs, monkeypatch) == 0
    table = render_table(read_results(docs / "results" / "local.json"))
    expected = f"before\n<!-- results:local -->\n{table}\n<!-- /results -->\nafter\n"
    assert (docs / "guide.md").read_text() == expected
    assert render(docs, monkeypatch, "--check") == 0
    append_results(docs / "results" / "local.json", [row(value=1.0)])
    assert render(docs, monkeypatch, "--check") == 1


def test_blocks_without_results_or_end_are_errors(docs, monkeypatch, capsys):
    (docs / "a.md").write_text("<!-- results:gpu -->\n<!-- /results -->\n")
    (docs / "b.md").write_text("<!-- results:local -->\n")
    assert render(docs, monkeypatch) == 2
    errors = capsys.readouterr().err
    assert "a.md: no results for ['gpu']" in errors
    assert "b.md: 1 opening and 0 closing markers" in errors
    assert render_table(read_results(docs / "results" / "local.json")) in (docs / "guide.md").read_text()


def test_a_block_may_choose_rows_or_be_a_grid(docs, monkeypatch, capsys):
    append_results(docs / "results" / "local.json", [row("w4a16_s_e1", value=2.0), row("w4a16_s_e2", value=3.0)])
    (docs / "guide.md").write_text(
        "<!-- results:local only=*_e1 -->\n<!-- /results -->\n"
        "<!-- results:local rows=w4a16 columns=e1,e2 cell={row}_s_{column} -->\n<!-- /results -->\n"
    )
    assert render(docs, monkeypatch) == 0
    text = (docs / "guide.md").read_text()
    assert text.count("w4a16_s_e1") == 1
    assert "demo_train_s" not in text
    assert "| s | e1 | e2 |" in text
    assert "| `w4a16` | 2 | 3 |" in text
    assert render(docs, monkeypatch, "--check") == 0
    (docs / "guide.md").write_text("<!-- results:local rows=w4a16 -->\n<!-- /results -->\n")
    assert render(docs, monkeypatch) == 2
    assert "legal: rows, columns and cell, or only; hardware" in capsys.readouterr().err


@pytest.mark.parametrize("options", ["", "rows=demo columns=train cell={row}_{column}_s "])
@pytest.mark.parametrize(("machine", "value", "other"), [("CPU", "96.4", "2"), ("H200", "2", "96.4")])
def test_a_block_may_keep_to_one_machine(docs, monkeypatch, options, machine, value, other):
    append_results(docs / "results" / "local.json", [row(value=2.0, hardware="1x NVIDIA H200")])
    (docs / "guide.md").write_text(f"<!-- results:local {options}hardware={machine} -->\n<!-- /results -->\n")
    assert render(docs, monkeypatch) == 0
    text = (docs / "guide.md").read_text()
    assert f"| {value} " in text
    assert f"| {other} " not in text
