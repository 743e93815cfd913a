"""How `qarl eval` writes prompts for models with and without a chat template."""

import shutil
from pathlib import Path

import pytest

from qarl_nemo.measure.eval.evaluation import ModelEvaluation
from qarl_nemo.measure.eval.output import notes
from qarl_nemo.measure.eval.run import plan, run
from qarl_nemo.measure.eval.settings import EvalSettings, prepare
from qarl_nemo.measure.eval.store import AnswerStore
from qarl_nemo.train.config import TokenizerConfig
from support.engines import TOKENIZER
from support.files import write_jsonl
from support.whole_models import save_sparse

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if is_calm is defined %}={% endif %}"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A model without a chat template, and a copy with one."""
    folder = tmp_path_factory.mktemp("prompts")
    bare = save_sparse(folder / "bare", TOKENIZER, num_hidden_layers=1, num_experts=4, max_position_embeddings=256)
    (shutil.copytree(bare, folder / "chat") / "chat_template.jinja").write_text(TEMPLATE)
    return {"bare": bare, "chat": folder / "chat"}


def planned(tmp_path, *models, question="1+1=", **options) -> list[ModelEvaluation]:
    data = Path(write_jsonl(tmp_path / "gsm8k.jsonl", [{"question": question, "answer": "#### 2"}]))
    sizes = {"max_new_tokens": 6, "device": "cpu", "precision": "float32"}
    asked = EvalSettings(models, ("gsm8k",), tmp_path / "r.json", {"gsm8k": data}, **sizes | options)
    return plan(prepare(asked), AnswerStore(tmp_path / "answers.jsonl", {}))


def test_an_option_counts_if_one_of_the_models_reads_it(models, tmp_path):
    calm = TokenizerConfig(chat_template_kwargs={"is_calm": True})
    bare, chat = planned(tmp_path, *models.values(), prompts=calm)
    assert chat.asked[0].texts[0] == bare.asked[0].texts[0] + "="
    with pytest.raises(ValueError, match=r"\n  chat_template_kwargs.is_calm: there is no chat template to read it"):
        planned(tmp_path, models["bare"], prompts=calm)
    misspelt = TokenizerConfig(chat_template_kwargs={"is_clam": True})
    with pytest.raises(ValueError, match=r"\n  chat_template_kwargs.is_clam: .*; did you mean 'is_calm'\? legal here"):
        planned(tmp_path, *models.values(), prompts=misspelt)


@pytest.mark.parametrize("template", [None, "default"])
def test_a_system_prompt_stands_before_the_question_alike_where_no_template_is_used(template, models, tmp_path):
    written = TokenizerConfig(chat_template=template)
    used = models.values() if template is None else [models["bare"]]
    texts = [one.asked[0].texts[0] for one in planned(tmp_path, *used, prompts=written, system_prompt="1-1")]
    between = "" if template is None else "\n\n"
    assert {text.partition("1+1=")[0] for text in texts} == {f"1-1{between}"}


def test_a_long_prompt_shortens_answers_and_the_notes_say_so(models, tmp_path):
    (tmp_path / "bare.txt").write_text("{}")
    words = {"prompt_file": tmp_path / "bare.txt", "max_new_tokens": 30}
    (evaluation,) = planned(tmp_path, models["bare"], question="1+" * 124, **words)
    (row,) = run([evaluation], lambda *_: None, lambda _: None)
    assert "answers had at most 8 tokens instead of 30, because the longest prompt" in " ".join(
        notes([row | {"model": "m"}])
    )
    (tmp_path / "answers.jsonl").unlink()
    with pytest.raises(
        ValueError, match="the shortest has 256 tokens, and at most 255 leave room for an answer in this model"
    ):
        planned(tmp_path, models["bare"], question="1+" * 128, **words)
    assert not (tmp_path / "answers.jsonl").exists()


def test_a_byte_order_mark_before_a_prompt_file_is_none_of_the_prompt(models, tmp_path):
    (tmp_path / "words.txt").write_text("\ufeff1*{}")
    (asked,) = planned(tmp_path, models["bare"], prompt_file=tmp_path / "words.txt")[0].asked
    assert asked.texts[0] == "1*1+1="


def test_a_template_that_fails_names_the_model_and_the_option_that_sets_another(models, tmp_path):
    for template, said in (("{{ messages + 1 }}", "refuses"), ("{{ messages[0].content }}", "leaves out")):
        failing = TokenizerConfig(chat_template=template)
        with pytest.raises(ValueError, match=rf"{models['bare']}: the chat template {said} .*; --chat-template sets"):
            planned(tmp_path, models["bare"], prompts=failing, system_prompt="1-1")
