"""Checkpoints that Megatron-core itself wrote, converted: the model computes what Megatron-core's computed."""

import json
import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from qarl_kernels import get_format
from qarl_nemo.checkpoints import open_megatron, quantize_checkpoint
from support.programs import environment

HAS_MEGATRON = find_spec("megatron") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_MEGATRON, reason="needs pip install megatron-core"),
]

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
    "TP2 x EP2 x ETP2": (
        4,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    ),
    "PP2 x EP2": (4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}),
}


def save_ranks(num_ranks, **job):
    """Run the ranks of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = json.dumps({"config": CONFIG.to_dict() | {"num_local_experts": CONFIG.num_experts}} | job)
    command = [sys.executable, "-W", "ignore", "-m", "support.megatron.run_save", job]
    settings = environment(CUDA_DEVICE_MAX_CONNECTIONS="1")
    ranks = [
        subprocess.Popen([*command, str(rank), str(num_ranks), str(port)], env=settings) for rank in range(num_ranks)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0] * num_ranks


def convert(source, destination, **changes):
    """Convert to BF16's path, which copies FP32 as it is; return the tensors."""
    hf = destination.with_name(destination.name + "-hf")
    Qwen3MoeConfig.from_dict(CONFIG.to_dict() | changes).save_pretrained(hf)
    quantize_checkpoint(open_megatron(source, hf), destination, get_format("bf16"), ["experts"])
    return load_file(destination / "model-00001-of-00001.safetensors")


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
def one_rank(tmp_path_factory):
    """What one rank saved, its logits, and the converted weights."""
    folder = tmp_path_factory.mktemp("one")
    save_ranks(1, parallel={}, save=str(folder / "megatron"), logits=str(folder / "logits.pt"))
    return folder, torch.load(folder / "logits.pt"), convert(folder / "megatron", folder / "out")


def test_transformers_computes_megatrons_logits(one_rank):
    folder, expected, _ = one_rank
    assert logits_gap(folder / "out", expected) < TOLERANCE
    assert logits_gap(folder / "out", expected, exchange=True) > 1e-2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_converts_to_the_same_weights(layout, one_rank, tmp_path):
    folder, _, expected = one_rank
    num_ranks, parallel = LAYOUTS[layout]
    save_ranks(num_ranks, parallel=parallel, load=str(folder / "megatron"), save=str(tmp_path / "megatron"))
    assert len(list((tmp_path / "megatron").glob("__3_*.distcp"))) > 0
    found = convert(tmp_path / "megatron", tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_keys_of_each_expert_convert_to_the_same_weights(one_rank, tmp_path):
    _, _, expected = one_rank
    save_ranks(1, parallel={}, metadata={"singleton_local_shards": True}, save=str(tmp_path / "megatron"))
    found = convert(tmp_path / "megatron", tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_dense_layers_between_sparse_ones_compute_megatrons_logits(tmp_path):
    logits = tmp_path / "logits.pt"
    save_ranks(1, parallel={}, moe_layer_freq=[0, 1], save=str(tmp_path / "megatron"), logits=str(logits))
    convert(tmp_path / "megatron", tmp_path / "out", mlp_only_layers=[0])
    assert logits_gap(tmp_path / "out", torch.load(logits)) < TOLERANCE


@pytest.mark.skipif(HAS_MEGATRON and find_spec("megatron.bridge") is None, reason="needs megatron-bridge")
def test_a_model_comes_back_from_bridge_bit_for_bit(tmp_path):
    hf = tmp_path / "hf"
    Qwen3MoeForCausalLM(CONFIG).save_pretrained(hf)
    # One rank: of experts without Transformer-Engine, Bridge 0.3.1 gives every expert-parallel rank the first ones.
    save_ranks(1, parallel={}, hf_model=str(hf), save=str(tmp_path / "megatron"))
    found, expected = convert(tmp_path / "megatron", tmp_path / "out"), load_file(hf / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
