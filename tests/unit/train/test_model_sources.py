"""Where models come from: a random one in any precision, or a checkpoint directory of a supported type."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, Qwen3MoeForCausalLM

from qarl_nemo.config import validate
from qarl_nemo.files import FileError
from qarl_nemo.train.config import PolicyConfig
from qarl_nemo.train.model import load_checkpoint, load_model, read_config, stop_token_ids, stored_stop_ids
from qarl_nemo.train.tokenizer import character_tokenizer
from support.asserts import assert_bitwise_equal

CPU = torch.device("cpu")


def policy(**values) -> PolicyConfig:
    return validate(values, PolicyConfig, source="test")


def tiny(**values) -> PolicyConfig:
    return policy(model_init={"hidden_size": 32, "num_experts": 3, "moe_intermediate_size": 32}, **values)


@pytest.fixture
def saved(tmp_path):
    """A folder with a tiny model and its tokenizer."""
    model, tokenizer = load_model(tiny(), CPU, 0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_random_model_is_a_function_of_its_seed():
    first, tokenizer = load_model(tiny(), CPU, 1)
    torch.rand(7)
    again, _ = load_model(tiny(), CPU, 1)
    other, _ = load_model(tiny(), CPU, 2)
    assert isinstance(first, Qwen3MoeForCausalLM)
    assert first.config.vocab_size == len(tokenizer)
    for (name, weight), same, different in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert_bitwise_equal(weight.detach(), same.detach())
        assert torch.equal(weight, different) == ("norm" in name)


def test_bfloat16_is_the_dtype_of_parameters_alone():
    model, _ = load_model(tiny(precision="bfloat16"), CPU, 0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    # rounded frequencies would turn positions by up to 2^-9 of their angle, and by nothing in the sampler
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_saved_model_comes_back_with_its_tokenizer(saved):
    model, tokenizer = load_model(tiny(), CPU, 0)
    loaded, loaded_tokenizer = load_model(policy(model_path=str(saved)), CPU, 5)
    for weight, expected in zip(loaded.parameters(), model.parameters(), strict=True):
        assert_bitwise_equal(weight.detach(), expected.detach())
    assert loaded_tokenizer.get_vocab() == tokenizer.get_vocab()
    narrow, _ = load_model(policy(model_path=str(saved), precision="bfloat16"), CPU, 0)
    assert narrow.dtype == torch.bfloat16


def test_what_is_no_supported_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no Hugging Face checkpoint: .*nowhere does not exist"):
        load_checkpoint(tmp_path / "nowhere", torch.float32)
    with pytest.raises(ValueError, match=r"there is no models/a: set policy.model_path to a Hugging Face .* folder$"):
        read_config(policy(model_path="models/a"))
    with pytest.raises(ValueError, match=r"there is no org/a: .*; a model on the .* hub .*: hf download org/a"):
        read_config(policy(model_path="org/a"))
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r'model_type is "gpt2"; supported: qwen3_moe, qwen3, qwen2, llama, mistral'):
        load_checkpoint(tmp_path, torch.float32)


def test_no_missing_weight_is_made_up(saved):
    """transformers would initialize it at random and go on."""
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"is not what its config.json says:\n  - 1 tensor missing: model.norm.weight"):
        load_checkpoint(saved, torch.float32)


def test_a_tokenizer_needs_an_end_and_pads_with_it_at_need(saved):
    tokenizer = character_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(saved)
    assert load_checkpoint(saved, torch.float32)[1].pad_token_id == tokenizer.eos_token_id
    tokenizer.eos_token = None
    tokenizer.save_pretrained(saved)
    with pytest.raises(ValueError, match="has no eos_token"):
        load_checkpoint(saved, torch.float32)


@pytest.mark.parametrize(("configured", "expected"), [(None, [2]), (7, [2, 7]), ([9, 2, 5], [2, 5, 9])])
def test_stop_tokens_are_the_models_and_the_tokenizers(configured, expected):
    model, tokenizer = load_model(tiny(), CPU, 0)
    model.generation_config.eos_token_id = configured
    assert stop_token_ids(model, tokenizer) == expected


@pytest.mark.parametrize("family", ["Qwen2Tokenizer", "LlamaTokenizer"])
def test_a_tokenizer_without_its_files_is_refused(family, saved):
    (saved / "tokenizer.json").unlink()
    with pytest.raises(FileError, match=r"its tokenizer knows no words; the folder lacks tokenizer.json"):
        load_checkpoint(saved, torch.float32)
    settings = json.loads((saved / "tokenizer_config.json").read_text()) | {"tokenizer_class": family}
    (saved / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(FileError, match=r"its tokenizer knows no words; the folder lacks tokenizer.json"):
        load_checkpoint(saved, torch.float32)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_cut_short_is_named(name, saved):
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"(?s){saved}.*{name}"):
        load_checkpoint(saved, torch.float32)


def test_a_folder_in_the_place_of_a_config_is_said(saved):
    (saved / "config.json").unlink()
    (saved / "config.json").mkdir()
    with pytest.raises(FileError, match=r"/config.json: expected a model's config.json, but it is a folder"):
        load_checkpoint(saved, torch.float32)


def test_a_tokenizer_that_is_another_json_is_named(saved):
    (saved / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(
        FileError, match=r"its tokenizer \(tokenizer.json, tokenizer_config.json\) cannot be loaded: Key"
    ):
        load_checkpoint(saved, torch.float32)
    (saved / "tokenizer.json").unlink()
    (saved / "tokenizer.json").mkdir()
    with pytest.raises(FileError, match=r"tokenizer.json: expected a tokenizer's settings, but it is a folder"):
        load_checkpoint(saved, torch.float32)


def test_a_tokenizer_of_a_larger_model_is_refused(saved):
    config = json.loads((saved / "config.json").read_text()) | {"vocab_size": 7}
    (saved / "config.json").write_text(json.dumps(config))
    tensors = load_file(saved / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = tensors[name][:7].contiguous()
    save_file(tensors, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(FileError, match=r"its tokenizer has token 18, its model only 7 tokens"):
        load_checkpoint(saved, torch.float32)


def test_answers_end_alike_with_the_model_loaded_and_not(saved):
    """Without generation_config.json, transformers and vLLM take config.json's tokens."""
    file, config = saved / "generation_config.json", json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 7]}))
    for configured in ({"eos_token_id": [2, 9]}, {}, None):
        file.unlink() if configured is None else file.write_text(json.dumps(configured))
        model, tokenizer = load_model(policy(model_path=str(saved)), CPU, 0)
        assert stored_stop_ids(saved, tokenizer) == stop_token_ids(model, tokenizer), configured
    assert stored_stop_ids(saved, tokenizer) == [2, 7]
