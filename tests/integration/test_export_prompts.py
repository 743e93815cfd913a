"""An exported model formats a conversation as the run that trained it did."""

import pytest
import torch
from test_export import export, trained_on_int8
from transformers import AutoTokenizer

from support.engines import TOKENIZER, tiny_model
from support.runs import train

TEMPLATE = "{{ messages[0]['content'] }}"


@pytest.mark.parametrize("packed", [True, False])
def test_an_exported_model_writes_prompts_as_its_run_did(tmp_path, packed):
    trained_on_int8(tmp_path, lora={"rank": 8}, tokenizer={"chat_template": TEMPLATE})
    # An older tool's file, which the run's tokenizer does not have.
    (tmp_path / "int8" / "added_tokens.json").write_text('{"?": 5}')
    (tmp_path / "int8" / "LICENSE").write_text("free")
    (tmp_path / "int8" / "additional_chat_templates").mkdir()
    (tmp_path / "int8" / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    done = export(tmp_path / "run", tmp_path / "out", "--packed" if packed else "--dequantize")
    assert done.exit_code == 0, done.output
    assert AutoTokenizer.from_pretrained(tmp_path / "int8").chat_template == {"tool_use": "tools"}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert not names & {"added_tokens.json", "additional_chat_templates"}
    assert names > {"generation_config.json", "LICENSE", "tokenizer.json"}


def test_a_quantized_export_writes_prompts_as_its_run_did(tmp_path):
    source, policy = tmp_path / "source", {"lora": {"rank": 8}, "tokenizer": {"chat_template": TEMPLATE}}
    tiny_model(dtype=torch.bfloat16, moe_intermediate_size=256, hidden_size=256).save_pretrained(source)
    TOKENIZER.save_pretrained(source)
    policy |= {"_override_": True, "model_path": str(source)}
    train(tmp_path / "run", policy=policy, qarl={"_override_": True, "format": "int8"}, grpo={"max_num_steps": 2})
    done = export(tmp_path / "run", tmp_path / "out", "--packed")
    assert done.exit_code == 0, done.output
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE
