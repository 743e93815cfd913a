"""The harness of kills: it sees every file-system call, and a command that meets its fault ends as it says."""

import pytest
import torch
from kill_points import KILLED, QarlServer
from transformers import Qwen3Config, Qwen3ForCausalLM


@pytest.fixture
def command(tmp_path):
    """A conversion of a small model to `tmp_path / "out"`."""
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=64,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return ["quantize", tmp_path / "model", tmp_path / "out", "--targets", "attention"]


def test_calls_are_counted_and_any_of_them_can_be_the_last(command, tmp_path):
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
