"""Where Megatron-core keeps the weights of a Hugging Face model: keys, axes and rows of its `torch_dist` checkpoints.

If all layers are alike, they share a key with a layer axis (`decoder.layers.mlp.router.weight` [layers, ...]);
otherwise each has its own key (`decoder.layers.3.mlp.router.weight`). Experts add an axis or, with
`singleton_local_shards`, a key each. Global shapes do not depend on how many ranks wrote them. Query, key and value are
interleaved: each key-value head follows the queries it serves. The first half of fc1 is the gate.

Source: Megatron-core 0.16.1 and 0.20.0, `sharded_state_dict` of TransformerBlock, SelfAttention, MLP, TEGroupedMLP and
SequentialMLP; names of Megatron-Bridge's qwen bridges.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from qarl_nemo.architecture import Architecture

LAYERS = "decoder.layers."
_EXPERTS = "mlp.experts.experts."
# Transformer-Engine's fused modules hold the norm before a linear in the linear; elsewhere it is a module of its own.
_NORMS = {
    "input_layernorm": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "post_attention_layernorm": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
}
RowRanges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Location:
    """A place where a weight may be stored.

    Attributes:
        key: the checkpoint's key.
        index: position in the leading dimensions: layer, expert, both or none.
        shape: global sizes that the key must have; with `padded` the first may be larger.
        ranges: the weight's rows in the dimension after `index`.
        padded: whether rows that belong to no token may follow.
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
        locations: every place where Megatron-core may keep it; a checkpoint has one of them.
    """

    name: str
    shape: tuple[int, ...]
    locations: tuple[Location, ...]


def model_weights(model: Architecture) -> Iterator[Weight]:
    """Return every weight of a model, in an order that reads each stored chunk once."""
    layout = _Layout(model, dict(model.parameters()))
    yield layout.vocabulary("model.embed_tokens.weight", "embedding.word_embeddings.weight")
    for layer in range(model.num_hidden_layers):
        yield from layout.attention(layer)
        yield from layout.experts(layer) if layer in model.sparse_layers else layout.dense_mlp(layer)
    final = Location("decoder.final_layernorm.weight", (), (model.hidden_size,), ((0, model.hidden_size),))
    yield Weight("model.norm.weight", (model.hidden_size,), (final,))
    if not model.tie_word_embeddings:
        yield layout.vocabulary("lm_head.weight", "output_layer.weight")


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where Megatron-core keeps a model's parameters.

    Attributes:
        model: its sizes.
        shapes: Hugging Face name -> shape.
    """

    model: Architecture
    shapes: dict[str, tuple[int, ...]]

    def attention(self, layer: int) -> Iterator[Weight]:
        heads, groups, head_dim = self.model.num_attention_heads, self.model.num_key_value_heads, self.model.head_dim
        per_group = heads // groups
        rows, module = (heads + 2 * groups) * head_dim, f"model.layers.{layer}.self_attn"
        starts = {"q": (0, per_group), "k": (per_group, 1), "v": (per_group + 1, 1)}
        yield self.norm(layer, "input_layernorm")
        for suffix in ("weight", "bias"):
            for projection, (first, count) in starts.items():
                name = f"{module}.{projection}_proj.{suffix}"
                if name not in self.shapes:
                    continue
                begins = [(group * (per_group + 2) + first) * head_dim for group in range(groups)]
                ranges = tuple((begin, begin + count * head_dim) for begin in begins)
                stored = (rows, *self.shapes[name][1:])
                yield self.layer_weight(layer, name, (f"self_attention.linear_qkv.{suffix}",), stored, ranges)
        yield self.layer_weight(layer, f"{module}.o_proj.weight", ("self_attention.linear_proj.weight",))
        for which in "qk":
            if f"{module}.{which}_norm.weight" in self.shapes:
                keys = (f"self_attention.{which}_layernorm.weight",)
                yield self.layer_weight(layer, f"{module}.{which}_norm.weight", keys)

    def dense_mlp(self, layer: int) -> Iterator[Weight]:
        yield self.norm(layer, "post_attention_layernorm")
        width, hidden = self.model.intermediate_size, self.model.hidden_size
        module, key = f"model.layers.{layer}.mlp", "mlp.linear_fc1.weight"
        for half, projection in enumerate(("gate", "up")):
            ranges = ((half * width, (half + 1) * width),)
            weight = self.layer_weight(layer, f"{module}.{projection}_proj.weight", (key,), (2 * width, hidden), ranges)
            single = Location(f"{LAYERS}{layer}.{key}_{'wv'[half]}", (), (width, hidden), ((0, width),))
            yield Weight(weight.name, weight.shape, (*weight.locations, single))
        yield self.layer_weight(layer, f"{module}.down_proj.weight", ("mlp.linear_fc2.weight",))

    def experts(self, layer: int) -> Iterator[Weight]:
        yield self.norm(layer, "post_attention_layernorm")
        num_layers, num_experts = self.model.num_hidden_layers, self.model.num_experts
        module = f"model.layers.{layer}.mlp"
        yield self.layer_weight(layer, f"{module}.gate.weight", ("mlp.router.weight",))
        # All experts' gates, then their other projections: a chunk may hold one projection of several experts.
        for projection, part, half in (("gate", "fc1", 0), ("up", "fc1", 1), ("down", "fc2", 0)):
            single = "" if part == "fc2" else f"_{'wv'[half]}"
            linear = f"linear_{part}.weight"
            for expert in range(num_experts):
                name = f"{module}.experts.{expert}.{projection}_proj.weight"
                shape = self.shapes[name]
                stacked = (num_experts, shape[0] * (1 if part == "fc2" else 2), shape[1])
                ranges = ((half * shape[0], (half + 1) * shape[0]),)
                locations = (
                    Location(f"{LAYERS}{_EXPERTS}{linear}", (layer, expert), (num_layers, *stacked), ranges),
                    Location(f"{LAYERS}{layer}.{_EXPERTS}{linear}", (expert,), stacked, ranges),
                    Location(f"{LAYERS}{layer}.{_EXPERTS}{expert}.{linear}{single}", (), shape, ((0, shape[0]),)),
                )
                yield Weight(name, shape, locations)

    def norm(self, layer: int, which: str) -> Weight:
        return self.layer_weight(layer, f"model.layers.{layer}.{which}.weight", _NORMS[which])

    def layer_weight(
        self,
        layer: int,
        name: str,
        keys: tuple[str, ...],
        stored: tuple[int, ...] | None = None,
        ranges: RowRanges | None = None,
    ) -> Weight:
        shape = self.shapes[name]
        stored, ranges = stored or shape, ranges or ((0, shape[0]),)
        shared = (self.model.num_hidden_layers, *stored)
        locations = [Location(LAYERS + key, (layer,), shared, ranges) for key in keys]
        locations += [Location(f"{LAYERS}{layer}.{key}", (), stored, ranges) for key in keys]
        return Weight(name, shape, tuple(locations))

    def vocabulary(self, name: str, key: str) -> Weight:
        shape = self.shapes[name]
        return Weight(name, shape, (Location(key, (), shape, ((0, shape[0]),), padded=True),))
