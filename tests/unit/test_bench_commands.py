"""The commands that rows of benches say: they measure again what the rows hold."""

import sys

import pytest

from qarl_nemo.metrics.results import Figure, read_results


@pytest.fixture(autouse=True)
def benches(tools):
    tools("bench")


class HereAndNow:
    """Stands in for a pool of processes."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, work, *arguments):
        work(*arguments)
        return self

    def result(self):
        return None


def test_a_refits_command_has_all_that_was_set(monkeypatch):
    import refit

    options = ["--formats", "w4a16", "--layers", "4", "--repeats", "2"]
    ran = []
    monkeypatch.setattr(refit, "ProcessPoolExecutor", HereAndNow)
    monkeypatch.setattr(refit, "bench", lambda name, options: ran.append((name, options.command)))
    monkeypatch.setattr(sys, "argv", ["refit.py", *options, "--record", "vllm.json"])
    refit.main()
    assert ran == [("w4a16", f"python tools/bench/refit.py {' '.join(options)}")]


def test_a_splittings_command_has_all_but_folders(monkeypatch, tmp_path):
    import channel_splitting

    monkeypatch.setattr(channel_splitting, "measure", lambda _: [Figure("tokens", 16.0, "tokens", ">=")])
    given = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "test.jsonl"), "--num-prompts", "16"]
    monkeypatch.setattr(sys, "argv", ["channel_splitting.py", *given, "--record", str(tmp_path / "rows.json")])
    channel_splitting.main()
    (row,) = read_results(tmp_path / "rows.json")
    assert row.command == (
        "python tools/bench/channel_splitting.py --model model --data gsm8k/test.jsonl --num-prompts 16"
    )
