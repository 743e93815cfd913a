"""Where Megatron-core keeps the weights of a Hugging Face model: keys, axes and rows of its `torch_dist` checkpoints.

Layers that are all alike share a key with a layer axis (`decoder.layers.mlp.router.weight` [layers, ...]), others have
one each (`decoder.layers.3.mlp.router.weight`); experts add an axis, or with `singleton_local_shards` a key. Global
shapes do not depend on how many ranks wrote them. Query, key and value are interleaved: each key-value head follows the
queries it serves. Of fc1 the first half is the gate.

Source: Megatron-core 0.16.1 and 0.20.0, `sharded_state_dict` of TransformerBlock, SelfAttention, MLP, TEGroupedMLP and
SequentialMLP; names of Megatron-Bridge's qwen bridges.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LAYERS = "decoder.layers."
_EXPERTS = "mlp.experts.experts."
# The norm before a linear is that linear's in Transformer-Engine's fused modules, else a module of its own.
_NORMS = {
    "input_layernorm": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "post_attention_layernorm": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
}
_FAMILIES = ("qwen2", "qwen3", "qwen3_moe")
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
_NUM_EXPERTS = ("num_experts", "num_local_experts")  # transformers 4 and 5

RowRanges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Location:
    """A place where a weight may be stored.

    Attributes:
        key: the checkpoint's key.
        index: of the first dimensions: layer, expert, both or none.
        shape: global sizes the key must have; with `padded` the first may be larger.
        ranges: the weight's rows in the dimension behind `index`.
        padded: whether rows may follow that belong to no token.
    """

    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    ranges: RowRanges
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the Hugging Face model.

    Attributes:
        name: Hugging Face name.
        shape: its sizes.
        locations: every place Megatron-core may keep it in; a checkpoint has one of them.
    """

    name: str
    shape: tuple[int, ...]
    locations: tuple[Location, ...]


def config_problems(config: dict[str, Any]) -> list[str]:
    """Say why this layout cannot be told from a Hugging Face config.

    Args:
        config: content of config.json.

    Returns:
        One sentence for each problem.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        return [f"config.json: model_type is {family}; legal are {', '.join(_FAMILIES)}"]
    required = [(key,) for key in _REQUIRED]
    required += [("moe_intermediate_size",), _NUM_EXPERTS] if family == "qwen3_moe" else []
    lacking = [" or ".join(keys) for keys in required if not any(isinstance(config.get(key), int) for key in keys)]
    problems = [f"config.json lacks {', '.join(lacking)}"] if lacking else []
    if family != "qwen2" and config.get("attention_bias"):
        problems.append("config.json: attention_bias is set, which no published model of this family has")
    return problems


def model_weights(config: dict[str, Any]) -> Iterator[Weight]:
    """Return every weight of a model, in an order that reads each stored chunk once.

    Args:
        config: content of config.json, without `config_problems`.

    Yields:
        The weights.
    """
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield _vocabulary("model.embed_tokens.weight", "embedding.word_embeddings.weight", vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        yield from _attention(config, layer)
        yield from _experts(config, layer) if is_sparse(config, layer) else _dense_mlp(config, layer)
    final = Location("decoder.final_layernorm.weight", (), (hidden,), ((0, hidden),))
    yield Weight("model.norm.weight", (hidden,), (final,))
    if not config.get("tie_word_embeddings"):
        yield _vocabulary("lm_head.weight", "output_layer.weight", vocab, hidden)


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    """Say whether a layer has experts.

    Args:
        config: content of config.json.
        layer: its number, from 0.

    Returns:
        True if it has.
    """
    every = config.get("decoder_sparse_step", 1)
    return (
        config["model_type"] == "qwen3_moe"
        and layer not in (config.get("mlp_only_layers") or ())
        and (layer + 1) % every == 0
    )


def _attention(config: dict[str, Any], layer: int) -> Iterator[Weight]:
    hidden, heads, groups = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim = config.get("head_dim") or hidden // heads
    per_group = heads // groups
    rows, module = (heads + 2 * groups) * head_dim, f"model.layers.{layer}.self_attn"
    starts = {"q": (0, per_group), "k": (per_group, 1), "v": (per_group + 1, 1)}
    yield _norm(config, layer, "input_layernorm")
    tails = {"weight": (hidden,)} | ({"bias": ()} if config["model_type"] == "qwen2" else {})
    for suffix, tail in tails.items():
        for projection, (first, count) in starts.items():
            begins = [(group * (per_group + 2) + first) * head_dim for group in range(groups)]
            ranges = tuple((begin, begin + count * head_dim) for begin in begins)
            shape = (groups * count * head_dim, *tail)
            name = f"{module}.{projection}_proj.{suffix}"
            keys = (f"self_attention.linear_qkv.{suffix}",)
            yield _layer_weight(config, layer, name, shape, keys, (rows, *tail), ranges)
    shape = (hidden, heads * head_dim)
    yield _layer_weight(config, layer, f"{module}.o_proj.weight", shape, ("self_attention.linear_proj.weight",))
    if config["model_type"] != "qwen2":
        for which in "qk":
            keys = (f"self_attention.{which}_layernorm.weight",)
            yield _layer_weight(config, layer, f"{module}.{which}_norm.weight", (head_dim,), keys)


def _dense_mlp(config: dict[str, Any], layer: int) -> Iterator[Weight]:
    yield _norm(config, layer, "post_attention_layernorm")
    width, hidden, module = config["intermediate_size"], config["hidden_size"], f"model.layers.{layer}.mlp"
    for half, projection in enumerate(("gate", "up")):
        ranges = ((half * width, (half + 1) * width),)
        name, key = f"{module}.{projection}_proj.weight", "mlp.linear_fc1.weight"
        weight = _layer_weight(config, layer, name, (width, hidden), (key,), (2 * width, hidden), ranges)
        single = Location(f"{LAYERS}{layer}.{key}_{'wv'[half]}", (), (width, hidden), ((0, width),))
        yield Weight(weight.name, weight.shape, (*weight.locations, single))
    yield _layer_weight(config, layer, f"{module}.down_proj.weight", (hidden, width), ("mlp.linear_fc2.weight",))


def _experts(config: dict[str, Any], layer: int) -> Iterator[Weight]:
    yield _norm(config, layer, "post_attention_layernorm")
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    num_experts = next(config[key] for key in _NUM_EXPERTS if key in config)
    module = f"model.layers.{layer}.mlp"
    yield _layer_weight(config, layer, f"{module}.gate.weight", (num_experts, hidden), ("mlp.router.weight",))
    # Gates of all experts, then the others: a chunk may hold one projection of several experts.
    for projection, part, half in (("gate", "fc1", 0), ("up", "fc1", 1), ("down", "fc2", 0)):
        shape = (hidden, width) if part == "fc2" else (width, hidden)
        rows = shape[0] if part == "fc2" else 2 * width
        ranges = ((half * shape[0], (half + 1) * shape[0]),)
        single = "" if part == "fc2" else f"_{'wv'[half]}"
        linear = f"linear_{part}.weight"
        for expert in range(num_experts):
            stacked = (num_experts, rows, shape[1])
            locations = (
                Location(
                    f"{LAYERS}{_EXPERTS}{linear}", (layer, expert), (config["num_hidden_layers"], *stacked), ranges
                ),
                Location(f"{LAYERS}{layer}.{_EXPERTS}{linear}", (expert,), stacked, ranges),
                Location(f"{LAYERS}{layer}.{_EXPERTS}{expert}.{linear}{single}", (), shape, ((0, shape[0]),)),
            )
            yield Weight(f"{module}.experts.{expert}.{projection}_proj.weight", shape, locations)


def _norm(config: dict[str, Any], layer: int, which: str) -> Weight:
    return _layer_weight(config, layer, f"model.layers.{layer}.{which}.weight", (config["hidden_size"],), _NORMS[which])


def _layer_weight(
    config: dict[str, Any],
    layer: int,
    name: str,
    shape: tuple[int, ...],
    keys: tuple[str, ...],
    stored: tuple[int, ...] | None = None,
    ranges: RowRanges | None = None,
) -> Weight:
    stored, ranges = stored or shape, ranges or ((0, shape[0]),)
    shared = (config["num_hidden_layers"], *stored)
    locations = [Location(LAYERS + key, (layer,), shared, ranges) for key in keys]
    locations += [Location(f"{LAYERS}{layer}.{key}", (), stored, ranges) for key in keys]
    return Weight(name, shape, tuple(locations))


def _vocabulary(name: str, key: str, vocab: int, hidden: int) -> Weight:
    return Weight(name, (vocab, hidden), (Location(key, (), (vocab, hidden), ((0, vocab),), padded=True),))
