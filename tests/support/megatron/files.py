"""Write a Hugging Face state dict as Megatron-core's ranks would, with torch.distributed.checkpoint itself.

The mapping is written down a second time, from the other side: global tensors are built from the model and cut as
tensor-, expert-tensor- and expert-parallel ranks cut them. tests/integration/test_convert_megatron.py has the real one.
"""

from dataclasses import dataclass, field
from io import BytesIO
from itertools import product

import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType


@dataclass
class Layout:
    """How ranks cut the model, and how Megatron-core spells it.

    Attributes:
        tp: ranks that share a dense linear.
        etp: ranks that share an expert.
        per_layer: a key for each layer instead of a layer axis.
        singleton: with `per_layer`, a key for each expert and half of fc1, too.
        separate_norms: norms are modules of their own, not parts of the linear behind them.
        padded_vocab: rows of the embedding, None for the vocabulary itself.
        experts_per_chunk: experts that a chunk holds.
        replaced: tensors that are added, or take the place of others; None leaves one out.
    """

    tp: int = 1
    etp: int = 1
    per_layer: bool = False
    singleton: bool = False
    separate_norms: bool = False
    padded_vocab: int | None = None
    experts_per_chunk: int = 1
    replaced: dict = field(default_factory=dict)


def write_megatron(folder, weights, config, layout):
    """Write a checkpoint with an optimizer and an extra state that nobody may unpickle."""
    tensors = global_tensors(weights, config, layout) | layout.replaced
    tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    tensors |= {f"optimizer.state.exp_avg.{key}": tensor for key, tensor in tensors.items()}
    state = {"decoder.layers.self_attention.linear_qkv._extra_state/shard_0_1": BytesIO(b"no pickle at all")}
    save(state, storage_writer=FileSystemWriter(folder), planner=ChunkPlanner(tensors, layout), no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return folder


def global_tensors(weights, config, layout):
    """Return Megatron-core's global tensors by key."""
    layers = [layer_tensors(weights, config, layer, layout) for layer in range(config["num_hidden_layers"])]
    if layout.per_layer:
        tensors = {f"decoder.layers.{i}.{key}": value for i, layer in enumerate(layers) for key, value in layer.items()}
    else:
        tensors = {f"decoder.layers.{key}": torch.stack([layer[key] for layer in layers]) for key in layers[0]}
    padding = (0, 0, 0, (layout.padded_vocab or config["vocab_size"]) - config["vocab_size"])
    outer = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
    tensors |= {key: torch.nn.functional.pad(weights[name], padding) for key, name in outer.items() if name in weights}
    return tensors | {"decoder.final_layernorm.weight": weights["model.norm.weight"]}


def layer_tensors(weights, config, layer, layout):
    """Return a layer's tensors by the rest of their key."""
    prefix = f"model.layers.{layer}."
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    norms = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    if not layout.separate_norms:
        norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    tensors = {norms[0]: own["input_layernorm.weight"], norms[1]: own["post_attention_layernorm.weight"]}
    tensors["self_attention.linear_proj.weight"] = own["self_attn.o_proj.weight"]
    for suffix in ("weight", "bias"):
        if f"self_attn.q_proj.{suffix}" in own:
            parts = [own[f"self_attn.{part}_proj.{suffix}"] for part in "qkv"]
            groups = [part.unflatten(0, (config["num_key_value_heads"], -1)) for part in parts]
            tensors[f"self_attention.linear_qkv.{suffix}"] = torch.cat(groups, 1).flatten(0, 1)
    for which in "qk":
        if f"self_attn.{which}_norm.weight" in own:
            tensors[f"self_attention.{which}_layernorm.weight"] = own[f"self_attn.{which}_norm.weight"]
    return tensors | mlp_tensors(own, layout)


def mlp_tensors(own, layout):
    """Return the MLP's or the experts' tensors by the rest of their key."""
    if "mlp.gate.weight" not in own:
        parts = [own[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down")]
        return linears("mlp.", parts, layout)
    num_experts = len(own["mlp.gate.weight"])
    experts = [
        [own[f"mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")] for e in range(num_experts)
    ]
    tensors = {"mlp.router.weight": own["mlp.gate.weight"]}
    if layout.singleton:
        for e, parts in enumerate(experts):
            tensors |= linears(f"mlp.experts.experts.{e}.", parts, layout)
        return tensors
    each = [linears("mlp.experts.experts.", parts, layout) for parts in experts]
    return tensors | {key: torch.stack([expert[key] for expert in each]) for key in each[0]}


def linears(prefix, parts, layout):
    """Return fc1 and fc2 of gate, up and down."""
    gate, up, down = parts
    fc1 = {"_w": gate, "_v": up} if layout.singleton else {"": torch.cat([gate, up])}
    return {f"{prefix}linear_fc1.weight{end}": half for end, half in fc1.items()} | {f"{prefix}linear_fc2.weight": down}


def chunk_sizes(key, shape, layout):
    """Return the sizes of what a rank writes of a tensor."""
    sizes = list(shape)
    experts = ".experts." in key
    num_ranks = layout.etp if experts else layout.tp
    if "decoder.layers." in key and not layout.per_layer:
        sizes[0] = 1
    if experts and not layout.singleton:
        sizes[-3] = layout.experts_per_chunk
    if "linear_fc1.weight" in key:
        sizes[-2] //= num_ranks * (1 if layout.singleton else 2)
    elif key.endswith("linear_qkv.bias"):
        sizes[-1] //= num_ranks
    elif key.endswith(("linear_qkv.weight", "word_embeddings.weight", "output_layer.weight")):
        sizes[-2] //= num_ranks
    elif key.endswith(("linear_proj.weight", "linear_fc2.weight")):
        sizes[-1] //= num_ranks
    return sizes


class ChunkPlanner(DefaultSavePlanner):
    """Writes tensors in the chunks of a layout, as if ranks had held them."""

    def __init__(self, tensors, layout):
        super().__init__(flatten_state_dict=False)
        self.tensors, self.layout = tensors, layout

    def create_local_plan(self):
        items = list(super().create_local_plan().items)
        for key, tensor in self.tensors.items():
            sizes = torch.Size(chunk_sizes(key, tensor.shape, self.layout))
            properties = TensorProperties(dtype=tensor.dtype)
            for offsets in product(*(range(0, limit, size) for limit, size in zip(tensor.shape, sizes, strict=True))):
                chunk = ChunkStorageMetadata(torch.Size(offsets), sizes)
                data = TensorWriteData(chunk, properties, tensor.shape)
                items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item):
        if write_item.tensor_data is None:
            return super().resolve_data(write_item)
        chunk = write_item.tensor_data.chunk
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        return self.tensors[write_item.index.fqn][box].clone()
