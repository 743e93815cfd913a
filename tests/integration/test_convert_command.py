"""`qarl convert`, and `python -m qarl_nemo` for containers, as a user starts them."""

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.megatron.files import Layout, write_megatron
from support.whole_models import save_sparse

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def hf_model(tmp_path):
    """A tiny Qwen3-MoE, saved by transformers."""
    return save_sparse(tmp_path / "hf", vocab_size=64, num_experts=4)


@pytest.fixture
def megatron(hf_model, tmp_path):
    """The same model as two tensor-parallel ranks of Megatron-core save it."""
    config = json.loads((hf_model / "config.json").read_text())
    return write_megatron(tmp_path / "megatron", load_file(hf_model / "model.safetensors"), config, Layout(tp=2))


def test_convert_writes_what_quantize_writes_and_says_how_far_it_is(qarl, hf_model, megatron, tmp_path):
    code, printed = qarl("convert", megatron, tmp_path / "a", "--hf-model", hf_model, "--targets", "experts,attention")
    assert code == 0, printed
    assert all(word in printed for word in ("shard 1/1", "ETA", "quantized to w4a16"))
    code, printed = qarl("quantize", hf_model, tmp_path / "b", "--targets", "experts,attention")
    assert code == 0, printed
    assert f"serve it: vllm serve {tmp_path / 'b'}" in printed
    assert "the source has no tokenizer: copy one there first" in printed
    (hf_model / "tokenizer.json").write_text("{}")
    _, printed = qarl("quantize", hf_model, tmp_path / "with_tokenizer", "--targets", "experts,attention")
    assert "has no tokenizer" not in printed
    assert re.search(r"\d+ kB|\d\.\d+ MB", printed)
    assert "0.00 GB" not in printed
    ours, expected = (load_file(tmp_path / name / "model-00001-of-00001.safetensors") for name in "ab")
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_what_is_left_out_is_said(qarl, hf_model, tmp_path):
    path = hf_model / "model.safetensors"
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(16) for layer in range(2)}
    save_file(load_file(path) | frequencies, path)
    code, printed = qarl("quantize", hf_model, tmp_path / "out")
    assert code == 0, printed
    expected = "left out: model.layers.{0..1}.self_attn.rotary_emb.inv_freq (engines compute rotary frequencies from"
    assert expected in " ".join(printed.split())


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "qwen3_next", "gemma3"])
def test_another_model_is_refused_by_its_type(qarl, hf_model, tmp_path, model_type):
    config = json.loads((hf_model / "config.json").read_text())
    (hf_model / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    code, printed = qarl("quantize", hf_model, tmp_path / "out")
    assert code == 2
    assert f'model_type is "{model_type}"; supported: qwen3_moe, qwen3, qwen2, llama, mistral' in printed
    assert not list(tmp_path.glob("out*"))


def test_what_does_not_fit_is_one_message_and_no_folder(qarl, hf_model, megatron, tmp_path):
    config = json.loads((hf_model / "config.json").read_text())
    (hf_model / "config.json").write_text(json.dumps(config | {"vocab_size": 60, "num_hidden_layers": 3}))
    code, printed = qarl("convert", megatron, tmp_path / "out", "--hf-model", hf_model)
    assert code == 2
    assert "decoder.layers.mlp.router.weight has shape [2, 4, 256], the config implies [3, 4, 256]" in printed
    assert "output_layer.weight: 4 of 4 rows behind the vocabulary of 60 are not zero" in printed
    assert "Traceback" not in printed
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_the_module_runs_where_the_command_is_not_installed(hf_model, megatron, tmp_path):
    arguments = ["convert", megatron, tmp_path / "out", "--hf-model", hf_model, "--format", "fp8_block"]
    subprocess.run([sys.executable, "-m", "qarl_nemo", *map(str, arguments)], check=True, capture_output=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"


def test_everything_wrong_with_the_options_is_listed_at_once(qarl, hf_model, tmp_path):
    file = tmp_path / "file"
    file.touch()
    wrong = ["--format", "nf4", "--targets", "x", "--max-shard-bytes", 0, "--device", "tpu"]
    for command, source, options, problem in (
        ("quantize", file, [], f"checkpoint {file} is a file, not a folder; name the folder that it is in: {tmp_path}"),
        ("convert", hf_model, ["--hf-model", hf_model], f"{hf_model} is not a torch_dist checkpoint"),
    ):
        code, printed = qarl(command, source, file / "out", *options, *wrong)
        assert code == 2
        named = ("unknown format 'nf4'", "unknown targets: x", "max_shard_bytes=0 must be at least 1", "device=tpu")
        for text in ("6 problem(s), nothing was written", problem, f"{file / 'out'} cannot be made: {file}", *named):
            assert text in printed, printed
    code, printed = qarl("quantize", hf_model, hf_model / "out", "--max-shard-bytes", 0)
    assert "must not contain each other\n  max_shard_bytes=0 must be" in printed
