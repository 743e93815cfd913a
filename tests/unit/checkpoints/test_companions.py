"""The files around the weights: all that a tokenizer consists of is copied, and known again when it is replaced."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from qarl_kernels import get_format
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.checkpoints.overlay import write_overlay
from qarl_nemo.checkpoints.reader import open_checkpoint
from qarl_nemo.cli import app
from support.engines import TOKENIZER
from support.files import contents
from support.whole_models import save_sparse

TEMPLATES = {"default": "{{ messages[0]['content'] }}", "tool_use": "tools: {{ messages[0]['content'] }}"}
TOOL_USE = "additional_chat_templates/tool_use.jinja"


@pytest.fixture
def source(tmp_path):
    folder = save_sparse(tmp_path / "source", TOKENIZER)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATES
    tokenizer.save_pretrained(folder)
    (folder / "tekken.json").write_text('{"words": 1}')
    return folder


def quantized(source, out, **options):
    return quantize_checkpoint(source, out, get_format("int8"), ["experts"], **options).destination


def test_all_templates_and_a_tokenizer_of_mistrals_own_are_copied(source, tmp_path):
    for overwrite in (False, True):
        out = quantized(source, tmp_path / "out", overwrite=overwrite)
        assert AutoTokenizer.from_pretrained(out).chat_template == TEMPLATES
        assert (out / "tekken.json").read_text() == '{"words": 1}'
    (out / "additional_chat_templates" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"move away additional_chat_templates/notes\.txt"):
        quantized(source, tmp_path / "out", overwrite=True)


def record_copies(out, record_of):
    record = json.loads((out / "qarl_quantization.json").read_text())
    (out / "qarl_quantization.json").write_text(json.dumps(record | {"copied": record_of(record["copied"])}))


def test_an_overwrite_keeps_files_that_only_look_like_copies(source, tmp_path):
    for path in source.glob("*token*"):
        path.unlink()
    out = quantized(source, tmp_path / "out")
    copied = json.loads((out / "qarl_quantization.json").read_text())["copied"]
    assert list(copied) == [TOOL_USE, "chat_template.jinja", "generation_config.json", "tekken.json"]
    # As `qarl quantize` advises where the source has no tokenizer.
    TOKENIZER.save_pretrained(out)
    shutil.copyfile(source / "chat_template.jinja", out / "chat_template.jinja")
    mine = ("LICENSE-mine", "additional_chat_templates/mine.jinja", "extra.jinja", "vocab_notes.txt")
    for name in mine:
        (out / name).write_text("the user's")
    before = contents(out)
    named = "LICENSE-mine, additional_chat_templates/mine.jinja, extra.jinja, tokenizer.json, tokenizer_config.json, vo"
    with pytest.raises(ValueError, match=f"move away {named}"):
        quantized(source, out, overwrite=True)
    assert contents(out) == before
    for name in (*mine, "tokenizer.json", "tokenizer_config.json"):
        (out / name).unlink()
    quantized(source, out, overwrite=True)
    # A folder of which nothing was copied is the user's.
    shutil.rmtree(source / "additional_chat_templates")
    quantized(source, out, overwrite=True)
    (out / "additional_chat_templates").mkdir()
    with pytest.raises(ValueError, match=r"move away additional_chat_templates$"):
        quantized(source, out, overwrite=True)


def test_a_record_without_the_list_of_copies_goes_by_their_names(source, tmp_path):
    out = quantized(source, tmp_path / "out")
    record_copies(out, lambda _: None)
    for name in ("notes.txt", "additional_chat_templates/notes.txt"):
        (out / name).touch()
    with pytest.raises(ValueError, match=r"move away additional_chat_templates/notes\.txt, notes\.txt$"):
        quantized(source, out, overwrite=True)
    for name in ("notes.txt", "additional_chat_templates/notes.txt"):
        (out / name).unlink()
    quantized(source, out, overwrite=True)


def test_an_overwrite_keeps_copies_that_were_edited(source, tmp_path):
    out = quantized(source, tmp_path / "out")
    for name in (TOOL_USE, "tekken.json"):
        (out / name).write_text("the user's")
    before = contents(out)
    named = rf"move away {TOOL_USE} \(edited since it was copied\), tekken\.json \(edited since it was copied\)$"
    with pytest.raises(ValueError, match=named):
        quantized(source, out, overwrite=True)
    assert contents(out) == before
    # An earlier version recorded no more than the names.
    record_copies(out, list)
    quantized(source, out, overwrite=True)
    assert (out / "tekken.json").read_text() == '{"words": 1}'
    (out / "tekken.json").unlink()
    quantized(source, out, overwrite=True)


@pytest.mark.parametrize("copied", ["tekken.json", [1], {"tekken.json": 1}])
def test_a_damaged_list_of_copies_is_named(source, tmp_path, copied):
    out = quantized(source, tmp_path / "out")
    (out / "qarl_quantization.json").write_text(json.dumps({"format": "int8", "copied": copied}))
    with pytest.raises(ValueError, match=r"qarl_quantization\.json: expected copied, an object of file names and che"):
        quantized(source, out, overwrite=True)


def test_a_conversion_that_had_copied_them_goes_on(source, tmp_path):
    quantized(source, tmp_path / "out")

    class KilledError(Exception):
        pass

    def kill(_):
        raise KilledError

    other = tmp_path / "other"
    with pytest.raises(KilledError):
        quantized(source, other, progress=kill)
    shutil.copytree(tmp_path / "out" / "additional_chat_templates", f"{other}.partial/checkpoint/{TOOL_USE[:25]}")
    assert (quantized(source, other) / TOOL_USE).read_text() == TEMPLATES["tool_use"]
    assert not (tmp_path / "other.partial").exists()


@pytest.mark.parametrize("link", [True, False])
def test_a_copy_with_other_values_has_them_too(source, tmp_path, link):
    norm = {"model.norm.weight": torch.full((256,), 2.0)}
    folder = write_overlay(open_checkpoint(source), norm, tmp_path / "copy", link=link).folder
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATES
    assert (folder / "tekken.json").is_file()


def test_a_source_whose_only_words_are_mistrals_own_has_a_tokenizer(source, tmp_path):
    (source / "tokenizer.json").unlink()
    done = CliRunner().invoke(app, ["quantize", str(source), str(tmp_path / "out"), "--format", "int8"])
    assert done.exit_code == 0, done.output
    assert "no tokenizer" not in done.output
