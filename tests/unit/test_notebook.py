"""The notebook: its commands can be given, its cells call what is there, and all of them run, with a tiny model."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import pytest
import torch
from test_documents import problems
from transformers import AutoModelForCausalLM, Qwen2Config

from qarl_nemo.train.tokenizer import CHARACTERS, character_tokenizer
from support.files import write_jsonl

CELLS = [
    "".join(cell["source"])
    for cell in json.loads((Path(__file__).parents[2] / "examples" / "real_model.ipynb").read_text())["cells"]
    if cell["cell_type"] == "code"
]
PYTHON = [cell for cell in CELLS if not cell.startswith("!")]
COMMANDS = [cell[1:] for cell in CELLS if cell.startswith("!")]


def fill(command, names):
    """As IPython fills in what stands in braces."""
    return re.sub(r"\{([^}]*)\}", lambda match: str(eval(match[1], names)), command)


def test_it_holds_no_outputs():
    cells = json.loads((Path(__file__).parents[2] / "examples" / "real_model.ipynb").read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


@pytest.mark.parametrize("cell", PYTHON, ids=lambda cell: cell.splitlines()[0][:40])
def test_cells_parse_and_import_what_is_there(cell):
    for node in ast.walk(ast.parse(cell)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[:2]))
def test_commands_can_be_given(command):
    # What stands in braces is one word, or options that a format may not have.
    assert problems(shlex.split(re.sub(r"\{[^}]*\}", "1", command.replace("{groups}", "")))) == []
    assert problems(shlex.split(command.replace("--", "--no-such-", 1).replace("train", "trian")))


@pytest.mark.parametrize(("group_size", "given"), [(32, ["--group-size", "32"]), (None, [])])
def test_a_format_without_groups_is_quantized_without_a_group_size(group_size, given, tmp_path):
    (tmp_path / "checkpoints" / "step_000001" / "model").mkdir(parents=True)
    qarl = SimpleNamespace(format="w4a16" if given else "fp8_channel", group_size=group_size, targets=["experts"])
    names = {"Path": Path, "RUN": tmp_path, "config": SimpleNamespace(qarl=qarl)}
    exec(next(cell for cell in PYTHON if "SERVED" in cell), names)
    words = shlex.split(fill(next(cell for cell in COMMANDS if cell.startswith("qarl quantize")), names))
    assert problems(words) == []
    assert words[words.index("--format") + 2 : words.index("--targets")] == given


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A random model that speaks in digits, and data in GSM8K's fields; names of folders have blanks."""
    monkeypatch.chdir(tmp_path)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}="
    tokenizer.save_pretrained("my model")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(**sizes, num_key_value_heads=1, vocab_size=len(tokenizer), eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained("my model")
    for name in ("train", "test"):
        lines = [{"question": CHARACTERS[n % 9] + "+1", "answer": f"one more\n#### {n % 9 + 1}"} for n in range(20)]
        write_jsonl(tmp_path / f"{name}.jsonl", lines)
    more = (
        "device=cpu rollout.engine=packed policy.precision=float32 rollout.max_new_tokens=4 grpo.max_num_steps=2 "
        "grpo.num_prompts_per_step=2 grpo.num_generations_per_prompt=2 grpo.train_global_batch_size=4"
    )
    return f'MODEL, TRAIN, TEST, RUN, MORE = "my model", "train.jsonl", "test.jsonl", "my run", {more!r}'


@pytest.mark.slow
def test_every_cell_runs(files, capsys, monkeypatch):
    mpl.use("agg")
    names: dict = {}
    exec(files, names)
    for cell in CELLS[1:]:
        if not cell.startswith("!"):
            exec(cell, names)
            continue
        words = shlex.split(fill(cell[1:], names))
        small = ["--device", "cpu", "--engine", "packed", "--max-new-tokens", "4"] if words[1] == "eval" else []
        done = subprocess.run(
            [sys.executable, "-m", "qarl_nemo", *words[1:], *small], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    assert "its answer" in capsys.readouterr().out
    assert Path("my run", "served", "config.json").is_file()
    assert json.loads(Path("my run", "eval_step_000002.json").read_text())
