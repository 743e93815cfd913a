"""Rows of the files that an evaluation read: what the checker accepts, and what it confuses."""

import json


def test_a_files_own_answers_are_accepted_and_the_others_refused(record, tmp_path, capsys):
    data, evaluation = tmp_path / "math.jsonl", tmp_path / "real.json"
    # The second and third are one number, the fourth has a dollar sign too many.
    answers = [r"\frac{1}{2}", "5", "x=5", "$3,$8$"]
    data.write_text("".join(json.dumps({"problem": f"{n}?", "answer": text}) + "\n" for n, text in enumerate(answers)))
    asked = {"settings": {"data": {"math500": str(data)}}, "results": [{"benchmark": "math500", "model": "a"}] * 2}
    evaluation.write_text(json.dumps(asked))
    rows = record("real_benchmarks", evaluation)
    assert {name: row.value for name, row in rows.items()} == {
        "eval_math500_problems": 4,
        "eval_math500_seen": 0.75,
        "eval_math500_refused": 0.75,
    }
    assert "math-verify" in rows["eval_math500_seen"].versions
    told = capsys.readouterr().out
    assert "problem 3: '$3,$8$' is not accepted" in told
    assert "problem 1: 'x=5' is taken for '5'" in told
