"""Translates Megatron's parameters that stay BF16 to Hugging Face's names and layout.

Norms may be fused as in Transformer-Engine (`linear_qkv.layer_norm_weight`) or modules of their own
(`input_layernorm.weight`).
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

OUTER_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_QKV = "self_attention.linear_qkv."
_GATE_UP = "mlp.linear_fc1.weight"


def num_row_blocks(name: str) -> int:
    """Return how many tensors follow one another along a parameter's rows: 2 for a dense MLP's gate and up."""
    return 2 if name == _GATE_UP else 1


def outer_parameter(name: str, whole: Tensor, vocab_size: int) -> tuple[str, Tensor]:
    """Translate a parameter outside the layers.

    Args:
        name: Megatron's, e.g. `output_layer.weight`.
        whole: gathered over tensor parallel ranks; its vocabulary may be padded.
        vocab_size: rows that Hugging Face's embedding has.

    Returns:
        Hugging Face's name and tensor.

    Raises:
        ValueError: the name is not known.
    """
    if name not in OUTER_NAMES:
        raise _unknown(name, OUTER_NAMES)
    return OUTER_NAMES[name], whole if name == "decoder.final_layernorm.weight" else whole[:vocab_size]


def layer_parameter(layer: int, name: str, whole: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Translate a parameter of a decoder layer.

    Args:
        layer: number from 0.
        name: Megatron's, within the layer, e.g. `self_attention.linear_qkv.weight`.
        whole: gathered over tensor parallel ranks.
        config: Megatron's `TransformerConfig`.

    Yields:
        Hugging Face's names and tensors: three for a fused qkv, two for a fused gate and up.

    Raises:
        ValueError: the name is not known.
    """
    prefix = f"model.layers.{layer}."
    if name.startswith(_QKV) and name.removeprefix(_QKV) in ("weight", "bias"):
        suffix = name.removeprefix(_QKV)
        for letter, part in zip("qkv", split_qkv(whole, config), strict=True):
            yield f"{prefix}self_attn.{letter}_proj.{suffix}", part
    elif name == _GATE_UP:
        for projection, part in zip(("gate", "up"), whole.chunk(2), strict=True):
            yield f"{prefix}mlp.{projection}_proj.weight", part
    elif name in LAYER_NAMES:
        yield prefix + LAYER_NAMES[name], whole
    else:
        raise _unknown(name, [*LAYER_NAMES, _QKV + "weight", _QKV + "bias", _GATE_UP])


def split_qkv(rows: Tensor, config: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Take Megatron's fused rows apart: for each KV head its query heads, its key, its value.

    Args:
        rows: [(num_attention_heads + 2 num_query_groups) * kv_channels, ...], or fewer rows per head, such as one block
            scale for each 128.
        config: Megatron's `TransformerConfig`.

    Returns:
        q, k and v rows, heads in order.
    """
    groups = config.num_query_groups
    heads = rows.unflatten(0, (groups, config.num_attention_heads // groups + 2, -1))
    return heads[:, :-2].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)


def _unknown(name: str, known: Any) -> ValueError:
    return ValueError(f"no Hugging Face name for Megatron's parameter {name!r}; known are {', '.join(known)}")
