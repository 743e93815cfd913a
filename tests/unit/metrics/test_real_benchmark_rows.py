"""Rows of the files that an evaluation read: what the checker accepts, and what it confuses."""

import json
import runpy
import sys
from pathlib import Path

from qarl_nemo.metrics.results import read_results

TOOLS = Path(__file__).parents[3] / "tools" / "record"


def test_a_files_own_answers_are_accepted_and_the_others_refused(tmp_path, monkeypatch, capsys):
    data, evaluation, output = tmp_path / "math.jsonl", tmp_path / "real.json", tmp_path / "rows.json"
    # The second and third are one number, the fourth has a dollar sign too many.
    answers = [r"\frac{1}{2}", "5", "x=5", "$3,$8$"]
    data.write_text("".join(json.dumps({"problem": f"{n}?", "answer": text}) + "\n" for n, text in enumerate(answers)))
    asked = {"settings": {"data": {"math500": str(data)}}, "results": [{"benchmark": "math500", "model": "a"}] * 2}
    evaluation.write_text(json.dumps(asked))
    monkeypatch.syspath_prepend(TOOLS)
    monkeypatch.setattr(sys, "argv", ["tool", str(evaluation), "--record", str(output)])
    runpy.run_path(str(TOOLS / "real_benchmarks.py"), run_name="__main__")
    rows = {row.name: row for row in read_results(output)}
    assert {name: row.value for name, row in rows.items()} == {
        "eval_math500_problems": 4,
        "eval_math500_seen": 0.75,
        "eval_math500_refused": 0.75,
    }
    assert "math-verify" in rows["eval_math500_seen"].versions
    told = capsys.readouterr().out
    assert "problem 3: '$3,$8$' is not accepted" in told
    assert "problem 1: 'x=5' is taken for '5'" in told
