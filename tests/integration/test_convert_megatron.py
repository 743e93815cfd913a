"""Checkpoints that Megatron-core itself wrote, converted: the model computes what Megatron-core's computed."""

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from qarl_nemo.checkpoints import open_megatron
from support.needs import MEGATRON
from support.programs import run_program

pytestmark = [pytest.mark.slow, MEGATRON]

CONFIG = Qwen3MoeConfig(
    architectures=["Qwen3MoeForCausalLM"],
    vocab_size=512,
    hidden_size=128,
    intermediate_size=192,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
# FP32 on both sides; gate and up exchanged move logits by more than 0.01.
TOLERANCE = 1e-5
LAYOUTS = {
    "tp2_ep2_etp2": (
        4,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    ),
    "pp2_ep2": (4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}),
}


def save_models(*jobs):
    """Let Megatron-core build and save models, one job after another in a process of its own."""
    config = CONFIG.to_dict() | {"num_local_experts": CONFIG.num_experts}
    jobs = [{"config": config, "ranks": 1, "parallel": {}} | job for job in jobs]
    run_program("megatron.run_save", json.dumps(jobs), CUDA_DEVICE_MAX_CONNECTIONS="1")


def convert(source, destination, **changes):
    """Read a checkpoint under Hugging Face's names, and save and return its tensors in FP32, as they are."""
    Qwen3MoeConfig.from_dict(CONFIG.to_dict() | changes).save_pretrained(destination)
    checkpoint = open_megatron(source, destination)
    with checkpoint.open_reader() as reader:
        tensors = {info.name: reader.read(info).clone() for info in checkpoint.tensors}
    save_file(tensors, destination / "model.safetensors", {"format": "pt"})
    return tensors


def logits_gap(folder, expected, *, exchange=False):
    """Return the largest |difference| of transformers' logits, if asked with every gate and up exchanged."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if exchange:
        for layer in model.model.layers:
            gate_up = layer.mlp.experts.gate_up_proj
            gate_up.data = gate_up.data.roll(gate_up.shape[1] // 2, 1)
    with torch.no_grad():
        return (model(expected["tokens"]).logits - expected["logits"]).abs().max().item()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where everything lies that one process saved."""
    folder = tmp_path_factory.mktemp("saved")
    layouts = [
        {"ranks": ranks, "parallel": parallel, "load": f"{folder}/one_rank", "save": f"{folder}/{name}"}
        for name, (ranks, parallel) in LAYOUTS.items()
    ]
    save_models(
        {"save": f"{folder}/one_rank", "logits": f"{folder}/one_rank.pt"},
        *layouts,
        {"save": f"{folder}/each_expert", "metadata": {"singleton_local_shards": True}},
        {"save": f"{folder}/some_dense", "moe_layer_freq": [0, 1], "logits": f"{folder}/some_dense.pt"},
    )
    return folder


@pytest.fixture(scope="module")
def one_rank(saved):
    """The converted weights of what one rank saved."""
    return convert(saved / "one_rank", saved / "one_rank_out")


def test_transformers_computes_megatrons_logits(saved, one_rank):
    expected = torch.load(saved / "one_rank.pt")
    assert logits_gap(saved / "one_rank_out", expected) < TOLERANCE
    assert logits_gap(saved / "one_rank_out", expected, exchange=True) > 1e-2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_converts_to_the_same_weights(layout, saved, one_rank, tmp_path):
    assert len(list((saved / layout).glob("__3_*.distcp"))) > 0
    found = convert(saved / layout, tmp_path / "out")
    assert found.keys() == one_rank.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in one_rank.items())


def test_keys_of_each_expert_convert_to_the_same_weights(saved, one_rank, tmp_path):
    found = convert(saved / "each_expert", tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in one_rank.items())


def test_dense_layers_between_sparse_ones_compute_megatrons_logits(saved, tmp_path):
    convert(saved / "some_dense", tmp_path / "out", mlp_only_layers=[0])
    assert logits_gap(tmp_path / "out", torch.load(saved / "some_dense.pt")) < TOLERANCE


@pytest.mark.skipif(bool(find_spec("megatron")) and not find_spec("megatron.bridge"), reason="needs megatron-bridge")
def test_a_model_comes_back_from_bridge_bit_for_bit(tmp_path):
    hf = tmp_path / "hf"
    Qwen3MoeForCausalLM(CONFIG).save_pretrained(hf)
    # One rank: of experts without Transformer-Engine, Bridge 0.3.1 gives every expert-parallel rank the first ones.
    save_models({"hf_model": str(hf), "save": str(tmp_path / "megatron")})
    found, expected = convert(tmp_path / "megatron", tmp_path / "out"), load_file(hf / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
