"""The models that this package knows, and every parameter's name and shape, from config.json alone.

Names are Hugging Face's, with one tensor per expert, as checkpoints hold them. No weight is read and nothing is loaded.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl_nemo.files import FileError, read_json

CONFIG_FILE = "config.json"
# `models/...` is what our configs call a place of one's own.
_HUB_NAME = re.compile(r"(?!models/)[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a `model_type` apart; all are pre-norm decoders with gated MLPs.

    Attributes:
        class_name: its entry in config.json's `architectures`.
        qk_norm: whether queries and keys are normalized by head.
        qkv_bias: whether q, k and v always have biases.
        optional_biases: whether `attention_bias` and `mlp_bias` are read; other families must not set them.
        experts: whether layers have experts, except where the config says otherwise.
        head_dim: used if the config has no such key; 0 is hidden_size / num_attention_heads.
        megatron: whether Megatron-core's learner and checkpoints are supported, too.
    """

    class_name: str
    qk_norm: bool = False
    qkv_bias: bool = False
    optional_biases: bool = False
    experts: bool = False
    head_dim: int = 0
    megatron: bool = True


FAMILIES = {
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, experts=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "llama": Family("LlamaForCausalLM", optional_biases=True, megatron=False),
    "mistral": Family("MistralForCausalLM", megatron=False),
}
MEGATRON_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.megatron)

# Key -> the largest size that is accepted: far above any model, far below what would fill the memory with names.
_LIMITS = {
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 512,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "vocab_size": 2**24,
    "head_dim": 4096,
    "moe_intermediate_size": 2**20,
    "num_experts": 1024,
    "num_experts_per_tok": 1024,
}
_EXPERT_KEYS = ("moe_intermediate_size", "num_experts", "num_experts_per_tok")
_SPELLINGS = {"num_experts": ("num_experts", "num_local_experts")}  # transformers 4 and 5


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a model, in the words of its config.json; those of experts are 0 in a dense model.

    Attributes:
        model_type: its family.
        hidden_size: width of the hidden states.
        intermediate_size: width of a dense MLP.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads.
        vocab_size: number of tokens.
        head_dim: width of a head.
        moe_intermediate_size: width of an expert.
        num_experts: number of experts in a layer.
        num_experts_per_tok: number of experts that a token is sent to.
        sparse_layers: indices of the layers with experts.
        biases: projections that have a bias.
        tie_word_embeddings: whether lm_head is the embedding.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int
    moe_intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    sparse_layers: frozenset[int] = frozenset()
    biases: frozenset[str] = frozenset()
    tie_word_embeddings: bool = False

    @classmethod
    def parse(cls, config: Mapping[str, Any], place: str, supported: Sequence[str] = tuple(FAMILIES)) -> "Architecture":
        """Read a config.

        Args:
            config: content of config.json.
            place: its path, for the error.
            supported: model types that are legal here.

        Raises:
            FileError: an unsupported model, or sizes that no model has; every problem is listed.
        """
        if problems := _family_problems(config, supported):
            raise FileError(f"{place}: " + "; ".join(problems))
        family = FAMILIES[config["model_type"]]
        sizes = _sizes(config, family, problems)
        sparse = _sparse_layers(config, family, sizes, problems)
        biases = _biases(config, family, problems)
        tied = _flag(config, "tie_word_embeddings", problems)
        if problems:
            raise FileError(f"{place}: " + "; ".join(problems))
        return cls(config["model_type"], **sizes, sparse_layers=sparse, biases=biases, tie_word_embeddings=tied)

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield every parameter's name and shape, in the model's order."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for layer in range(self.num_hidden_layers):
            yield from ((f"model.layers.{layer}.{name}", shape) for name, shape in self._layer(layer))
        yield "model.norm.weight", (self.hidden_size,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def _layer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, head_dim = self.hidden_size, self.head_dim
        queries, keys = self.num_attention_heads * head_dim, self.num_key_value_heads * head_dim
        yield "input_layernorm.weight", (hidden,)
        for name, shape in {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}.items():
            yield from self._linear(f"self_attn.{name}_proj", shape)
        yield from self._linear("self_attn.o_proj", (hidden, queries))
        if FAMILIES[self.model_type].qk_norm:
            yield "self_attn.q_norm.weight", (head_dim,)
            yield "self_attn.k_norm.weight", (head_dim,)
        yield "post_attention_layernorm.weight", (hidden,)
        if layer not in self.sparse_layers:
            yield from self._mlp("mlp", self.intermediate_size)
            return
        yield "mlp.gate.weight", (self.num_experts, hidden)
        for expert in range(self.num_experts):
            yield from self._mlp(f"mlp.experts.{expert}", self.moe_intermediate_size)

    def _mlp(self, block: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self._linear(f"{block}.gate_proj", (width, self.hidden_size))
        yield from self._linear(f"{block}.up_proj", (width, self.hidden_size))
        yield from self._linear(f"{block}.down_proj", (self.hidden_size, width))

    def _linear(self, module: str, shape: tuple[int, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{module}.weight", shape
        if module.rpartition(".")[2] in self.biases:
            yield f"{module}.bias", shape[:1]


def read_architecture(path: Path, supported: Sequence[str] = tuple(FAMILIES)) -> Architecture:
    """Read the sizes of a model.

    Args:
        path: Hugging Face folder, or its config.json.
        supported: model types that are legal here.

    Raises:
        FileError: no readable config.json, or as `Architecture.parse`.
    """
    file = config_file(path)
    return Architecture.parse(read_json(file, "a model's config.json"), str(file), supported)


def config_file(path: Path) -> Path:
    """Return the config.json that a user names.

    Returns:
        The file, which may be missing from a folder.

    Raises:
        FileError: there is nothing at the path.
    """
    if not path.exists():
        raise FileError(f"{path}: expected a model's {CONFIG_FILE}, but: no such file or directory{hub_hint(path)}")
    return path / CONFIG_FILE if path.is_dir() else path


def hub_hint(path: Path) -> str:
    """Say how to fetch a model that is named as the Hugging Face hub names it.

    Args:
        path: what was named, where nothing is.

    Returns:
        The command, after a semicolon; empty if it looks like a path.
    """
    if not _HUB_NAME.fullmatch(str(path)) or path.parent.exists():
        return ""
    return f"; a model on the Hugging Face hub is fetched first: hf download {path} --local-dir ..."


def _family_problems(config: Mapping[str, Any], supported: Sequence[str]) -> list[str]:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in supported:
        return [f"model_type is {_shown(model_type)}; supported: {', '.join(supported)}"]
    if not isinstance(config.get("quantization_config"), dict | None):
        return [f"quantization_config is {_shown(config['quantization_config'])}; expected an object, or none"]
    class_name, given = FAMILIES[model_type].class_name, config.get("architectures")
    if given is None or given == [class_name]:
        return []
    return [f"architectures is {_shown(given)}; of a {model_type} model [{class_name!r}] is supported"]


def _sizes(config: Mapping[str, Any], family: Family, problems: list[str]) -> dict[str, int]:
    keys = [key for key in _LIMITS if key != "head_dim" and (family.experts or key not in _EXPERT_KEYS)]
    found = {key: _given(config, key) for key in keys}
    if found["num_key_value_heads"] is None and config.get("model_type") == "llama":
        found["num_key_value_heads"] = found["num_attention_heads"]  # the first Llamas have no such key
    lacking = [" or ".join(_SPELLINGS.get(key, (key,))) for key, value in found.items() if value is None]
    problems += [f"lacks {', '.join(lacking)}"] if lacking else []
    head_dim = config.get("head_dim", family.head_dim or None)
    wrong = _out_of_range({**found, "head_dim": head_dim})
    problems += wrong
    if wrong or lacking:
        return {}
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    if heads % found["num_key_value_heads"]:
        problems.append(f"num_attention_heads={heads} is no multiple of {found['num_key_value_heads']} key-value heads")
    if head_dim is None and hidden % heads:
        problems.append(f"hidden_size={hidden} is no multiple of num_attention_heads={heads}, and there is no head_dim")
    if found.get("num_experts_per_tok", 0) > found.get("num_experts", 0):
        problems.append(f"num_experts_per_tok={found['num_experts_per_tok']} of {found['num_experts']} experts")
    return {**found, "head_dim": head_dim or hidden // heads}


def _given(config: Mapping[str, Any], key: str) -> Any:
    return next((config[name] for name in _SPELLINGS.get(key, (key,)) if config.get(name) is not None), None)


def _out_of_range(sizes: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}={_shown(value)} is not a whole number from 1 to {_LIMITS[key]}"
        for key, value in sizes.items()
        if value is not None and not _whole(value, _LIMITS[key], least=1)
    ]


def _sparse_layers(
    config: Mapping[str, Any], family: Family, sizes: Mapping[str, int], problems: list[str]
) -> frozenset[int]:
    if not family.experts or not sizes:
        return frozenset()
    num_layers = sizes["num_hidden_layers"]
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not _whole(step, _LIMITS["num_hidden_layers"], least=1):
        problems.append(f"decoder_sparse_step={_shown(step)} is not a whole number from 1")
        return frozenset()
    if not isinstance(dense, list) or not all(_whole(layer, num_layers - 1) for layer in dense):
        problems.append(f"mlp_only_layers={_shown(dense)} is not a list of layers from 0 to {num_layers - 1}")
        return frozenset()
    return frozenset(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense)


def _biases(config: Mapping[str, Any], family: Family, problems: list[str]) -> frozenset[str]:
    if family.qkv_bias:
        return frozenset(("q_proj", "k_proj", "v_proj"))
    named = {
        "attention_bias": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "mlp_bias": ("gate_proj", "up_proj", "down_proj"),
    }
    given = [key for key in named if _flag(config, key, problems)]
    if given and not family.optional_biases:
        problems.append(f"{' and '.join(given)} set, which no published model of this family has")
    return frozenset(name for key in given for name in named[key])


def _flag(config: Mapping[str, Any], key: str, problems: list[str]) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        problems.append(f"{key}={_shown(value)} is neither true nor false")
    return value is True


def _whole(value: Any, most: int, *, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
