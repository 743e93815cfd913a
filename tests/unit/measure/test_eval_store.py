"""The file of all answers outlives kills."""

import pytest

from qarl_nemo.measure.eval.store import AnswerStore

ROW = {
    "model": "m",
    "benchmark": "gsm8k",
    "chunk_size": 1,
    "problem": 0,
    "sample": 0,
    "prompt": "1+1=",
    "num_tokens": 1,
    "truncated": False,
    "right": True,
}


@pytest.mark.parametrize("cut", ["at a chunk's first row", "before a row's last newline"])
def test_a_line_that_a_kill_cut_short_takes_no_answer_with_it(cut, tmp_path):
    path, chunks = tmp_path / "answers.jsonl", [[ROW | {"chunk": number}] for number in range(3)]
    store = AnswerStore(path, {})
    store.add(chunks[0])
    store.add(chunks[1])
    whole = path.read_text()
    first = whole.rindex("{")
    path.write_text(whole[: first + 20] if cut == "at a chunk's first row" else whole.removesuffix("\n"))
    AnswerStore(path, {}).add(chunks[2])
    found = [AnswerStore(path, {}).chunk("m", "gsm8k", number) for number in range(3)]
    assert found == [chunks[0], None if cut == "at a chunk's first row" else chunks[1], chunks[2]]
