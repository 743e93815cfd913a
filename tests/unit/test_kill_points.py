"""The harness of kills: it sees every file-system call, and a command that meets its fault ends as it says."""

import torch
from kill_points import KILLED, QarlServer
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.whole_models import DENSE


def test_calls_are_counted_and_any_of_them_can_be_the_last(tmp_path):
    Qwen3ForCausalLM(Qwen3Config(**DENSE)).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    command = ["quantize", tmp_path / "model", tmp_path / "out", "--targets", "attention"]
    with QarlServer() as qarl:
        killed = qarl.run(command, watch=tmp_path, fault="kill", at=4)
        full = qarl.run(command, watch=tmp_path, fault="full", at=1)
        interrupted = qarl.run(command, watch=tmp_path, fault="interrupt", at=1)
        assert not (tmp_path / "out").exists()
        whole = qarl.run(command, watch=tmp_path)
        elsewhere = qarl.run(["quantize", tmp_path / "model", tmp_path / "out"], watch=tmp_path / "model")
    assert (killed.code, killed.calls) == (KILLED, ())
    assert full.code not in (0, KILLED)
    assert "No space left on device".lower() in full.output.lower()
    assert interrupted.code not in (0, KILLED)
    assert whole.code == 0, whole.output
    assert {call.split()[0] for call in whole.calls} >= {"open", "write", "fsync", "replace", "unlink", "mkdir"}
    assert elsewhere.calls == ()
