"""Where `qarl report` writes its page."""

import os

import pytest

from qarl_nemo.cli.report import report as report_command
from qarl_nemo.metrics.report import write_report


def test_several_runs_get_a_page_of_their_own(make_run, tmp_path, monkeypatch, capsys):
    # Before their first step, so that there is nothing to draw.
    runs = [make_run(name, num_steps=0, diagnostics=False) for name in ("a", "b")]
    (runs[0] / "report.html").write_text("its own")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # A second comparison takes the place of the first.
        with pytest.raises(SystemExit) as ended:
            report_command(runs)
        assert ended.value.code == 0
    assert (runs[0] / "report.html").read_text() == "its own"
    assert "2 runs" in (tmp_path / "comparison.html").read_text()
    assert "report: comparison.html" in capsys.readouterr().out


def test_a_comparison_named_by_its_folder_gets_its_page_there(make_run, tmp_path, qarl):
    for name in ("both/ours-seed1", "both/ours-seed2"):
        make_run(name, num_steps=0, diagnostics=False)
        (tmp_path / name / "arm.yaml").touch()
    code, printed = qarl("report", tmp_path / "both")
    assert code == 0, printed
    assert "2 runs" in (tmp_path / "both" / "report.html").read_text()


def test_a_report_replaces_reports_only(make_run, tmp_path):
    notes = tmp_path / "notes.html"
    notes.write_text("mine")
    with pytest.raises(ValueError, match=r"notes.html exists and is no report, so it stays as it is"):
        write_report([make_run("a", num_steps=1, diagnostics=False)], notes)
    assert notes.read_text() == "mine"
    with pytest.raises(ValueError, match=r"report.html cannot be made: .*notes.html is a file; choose another place"):
        write_report([make_run("b", num_steps=1, diagnostics=False)], notes / "report.html")


def test_a_page_goes_into_a_file_that_says_so(tmp_path, qarl):
    code, said = qarl("report", tmp_path, "--output", tmp_path / "page.png")
    assert (code, "name a file that ends in .html" in said) == (2, True)


def test_a_file_in_a_run_is_named_as_no_run(make_run, qarl):
    code, said = qarl("report", make_run("run", num_steps=1, diagnostics=False) / "metrics.jsonl")
    assert (code, "metrics.jsonl: is a file; name the folder of its run" in said) == (2, True)


def test_a_report_on_somebody_elses_run_goes_where_one_may_write(qarl, tmp_path, make_run, monkeypatch):
    run = make_run("theirs", num_steps=1, diagnostics=False)
    may = os.access
    # Tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and may(path, mode))
    code, printed = qarl("report", run)
    assert code == 2
    assert "permission denied; --output FILE.html writes it elsewhere" in printed
    code, printed = qarl("report", run, "--output", tmp_path / "mine.html")
    assert code == 0, printed
    assert (tmp_path / "mine.html").stat().st_size > 10_000
