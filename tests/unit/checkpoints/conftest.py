import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from qarl_kernels import QuantizedWeight
from support.formats import SUFFIXES
from support.megatron.files import Layout, write_megatron


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A tied Qwen3-MoE of two sparse layers and a dense one, in several files."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=3,
        mlp_only_layers=[2],
        num_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=64,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    folder = tmp_path_factory.mktemp("source")
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="1MB")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def make_source(tmp_path):
    """Write a single-file checkpoint; of a whole model `whole_models.tensors_of` makes the tensors."""

    def make(tensors, config=None, name="made"):
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config or {"model_type": "qwen3_moe"}))
        return folder

    return make


@pytest.fixture
def read_all():
    """Read every tensor of a checkpoint folder through its index."""

    def read(folder):
        index = folder / "model.safetensors.index.json"
        files = [path.name for path in folder.glob("*.safetensors")]
        tensors = {}
        for file in files:
            with safe_open(folder / file, framework="pt") as handle:
                tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        if index.exists():
            assert set(json.loads(index.read_text())["weight_map"]) == set(tensors)
        return tensors

    return read


@pytest.fixture
def read_quantized():
    """Rebuild one stored weight and return it as BF16."""

    def read(tensors, name, fmt):
        module = name.removesuffix(".weight")
        stored = {suffix: tensors[f"{module}.{suffix}"] for suffix in SUFFIXES[fmt.weight_kind]}
        if fmt.weight_kind == "int":
            shape = tuple(tensors[f"{module}.weight_shape"].tolist())
        else:
            shape = tuple(next(iter(stored.values())).shape)
        return QuantizedWeight(fmt, shape, stored).dequantize()

    return read


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "dtype": "bfloat16",
}
MOE = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
MODELS = {
    "moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False)),
    "mixed": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **MOE, mlp_only_layers=[0], tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=False)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
}


@pytest.fixture(scope="package")
def models(tmp_path_factory):
    """Every model, saved by transformers: folder and tensors by Hugging Face name."""
    saved = {}
    for name, (cls, config) in MODELS.items():
        torch.manual_seed(1)
        folder = tmp_path_factory.mktemp(name)
        model = cls(config).to(torch.bfloat16)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder)
        saved[name] = folder, load_file(folder / "model.safetensors")
    return saved


@pytest.fixture
def megatron(models, tmp_path):
    """Write a model's Megatron checkpoint; returns its folder and the model's."""

    def write(model="moe", layout=None, **changes):
        folder, weights = models[model]
        config = json.loads((folder / "config.json").read_text())
        return write_megatron(tmp_path / "megatron", weights, config, layout or Layout(**changes)), folder

    return write
