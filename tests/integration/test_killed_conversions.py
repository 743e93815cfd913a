"""`qarl quantize` and `qarl convert`, ended at every file-system call they make: run again, they give the same bytes.

An end is a kill, a disk that is full from then on, or Ctrl-C.
"""

import json
import shutil

import pytest
import torch
from kill_points import KILLED, QarlServer
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.files import contents
from support.megatron.files import Layout, write_megatron

CONFIG = Qwen3Config(
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    vocab_size=64,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
# Two shards.
OPTIONS = ["--targets", "attention", "--max-shard-bytes", "100000"]


@pytest.fixture(scope="module")
def qarl():
    with QarlServer() as server:
        yield server


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model and what Megatron-core would save of it."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    Qwen3ForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(folder / "hf")
    (folder / "hf" / "tokenizer_config.json").write_text("{}")
    config = json.loads((folder / "hf" / "config.json").read_text())
    write_megatron(folder / "megatron", load_file(folder / "hf" / "model.safetensors"), config, Layout(tp=2))
    return folder


def command(name, models, destination, *options):
    if name == "quantize":
        return ["quantize", models / "hf", destination, *OPTIONS, *options]
    return ["convert", models / "megatron", destination, "--hf-model", models / "hf", *OPTIONS, *options]


@pytest.fixture(scope="module", params=["quantize", "convert"])
def whole(request, qarl, models, tmp_path_factory):
    """A command, its output when nothing happens, the output that it replaces, and the calls it makes."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = command(request.param, models, folder / "out", "--overwrite")
    assert qarl.run([*arguments, "--format", "fp8_channel"], watch=folder).code == 0
    replaced = contents(folder)
    ended = qarl.run(arguments, watch=folder)
    assert ended.code == 0, ended.output
    assert sum(name.endswith(".safetensors") for name in contents(folder)) == 2
    return request.param, contents(folder), replaced, ended.calls


def rerun(qarl, arguments, folder, expected):
    """Run to the end; a destination that was complete when its command was killed may be refused instead."""
    complete = contents(folder / "out") == {name.removeprefix("out/"): content for name, content in expected.items()}
    ended = qarl.run(arguments, watch=folder)
    if complete and ended.code == 2:
        assert "exists" in ended.output, ended.output
    else:
        assert ended.code == 0, ended.output
    assert contents(folder) == expected
    assert [path.name for path in folder.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "full", "interrupt"])
def test_what_is_ended_at_any_call_is_finished_by_the_same_command(fault, whole, qarl, models, tmp_path):
    name, expected, _, _ = whole
    calls = qarl.run(command(name, models, tmp_path / "out"), watch=tmp_path).calls
    shutil.rmtree(tmp_path / "out")
    # Errors pass through the same few places; a kill may not find any call unprepared.
    for at in range(1, len(calls) + 1, 1 if fault == "kill" else 3):
        folder = tmp_path / f"at{at}"
        folder.mkdir()
        arguments = command(name, models, folder / "out")
        ended = qarl.run(arguments, watch=folder, fault=fault, at=at)
        assert (ended.code == KILLED) == (fault == "kill"), (calls[at - 1], ended.output)
        assert "Traceback" not in ended.output, (calls[at - 1], ended.output)
        if (folder / "out").exists():
            assert contents(folder / "out") == {n.removeprefix("out/"): c for n, c in expected.items()}, calls[at - 1]
        rerun(qarl, arguments, folder, expected)
        shutil.rmtree(folder)


@pytest.mark.slow
def test_an_overwrite_that_is_killed_at_any_call_leaves_the_old_or_the_new(whole, qarl, models, tmp_path):
    name, expected, replaced, calls = whole
    # What is renamed and removed is the same code in both commands.
    for at in range(1, len(calls) + 1, 1 if name == "quantize" else 5):
        folder = tmp_path / f"at{at}"
        folder.mkdir()
        for file, content in replaced.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(content)
        arguments = command(name, models, folder / "out", "--overwrite")
        ended = qarl.run(arguments, watch=folder, fault="kill", at=at)
        assert ended.code == KILLED, (calls[at - 1], ended.output)
        if (folder / "out").exists():
            there = {f"out/{file}": content for file, content in contents(folder / "out").items()}
            assert there in (expected, replaced), calls[at - 1]
        # A second kill, in the middle of taking up what the first one left.
        qarl.run(arguments, watch=folder, fault="kill", at=1 + at % 7)
        rerun(qarl, arguments, folder, expected)
        shutil.rmtree(folder)
