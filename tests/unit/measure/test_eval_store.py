"""The file of all answers outlives kills."""

import pytest

from qarl_nemo import files
from qarl_nemo.files import FileError
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


def test_an_evaluation_that_ended_before_its_first_answer_binds_nobody(tmp_path):
    path = tmp_path / "answers.jsonl"
    AnswerStore(path, {"limit": 2})
    assert not path.exists()
    AnswerStore(path, {"limit": 2}).rewrite()
    AnswerStore(path, {"limit": 1}).add([ROW | {"chunk": 0}])
    with pytest.raises(FileError, match="another evaluation"):
        AnswerStore(path, {"limit": 2})
    with pytest.raises(FileError, match=r"\n  top_p: there None, now 0\.9"):
        AnswerStore(path, {"limit": 1, "top_p": 0.9})


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


def test_answers_in_any_script_are_read_again_after_a_kill_inside_a_letter(tmp_path, monkeypatch):
    path, chunk = tmp_path / "answers.jsonl", [ROW | {"chunk": 0, "response": "a\u2028b\x85 \u6c34"}]
    AnswerStore(path, {}).add(chunk)
    whole = path.read_bytes()
    water = "\u6c34".encode()
    # The next chunk's row, cut inside its last letter.
    path.write_bytes(whole + whole.splitlines()[-1].replace(b'"chunk": 0', b'"chunk": 1').split(water)[0] + water[:1])
    # Of many long answers, and of NeMo-RL's dumps, there are more bytes than any text file may have.
    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 10)
    assert AnswerStore(path, {}).chunk("m", "gsm8k", 0) == chunk
