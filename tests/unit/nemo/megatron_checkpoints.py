"""What an aligned model's distributed checkpoint holds, beside what Megatron's own model's does."""

from typing import Any

import torch
from megatron_models import TINY, Layout, megatron_model, parallel, plain_spec, transformer_config

# isort: split
from megatron.core.models.gpt.gpt_model import GPTModel

from qarl_nemo.nemo.alignment import Alignment

Described = set[tuple[Any, ...]]


def _described(sharded: dict[str, Any]) -> Described:
    """Of each shard: the key on disk, the whole tensor's shape, and where the shard lies in it."""
    shards = set()
    for shard in sharded.values():
        # Fused gate and up are split where they are saved.
        for part in _leaves(shard.build()) if hasattr(shard, "build_fn") else [shard]:
            shards.add((part.key, tuple(part.global_shape), tuple(part.global_offset), tuple(part.replica_id)))
    return shards


def _leaves(built: Any) -> list[Any]:
    if isinstance(built, dict | list | tuple):
        return [leaf for part in (built.values() if isinstance(built, dict) else built) for leaf in _leaves(part)]
    return [built]


def checkpoint_keys(layout: Layout, alignment: Alignment) -> tuple[Described, Described]:
    """This rank's shards of the aligned model, and of Megatron's own model."""
    with parallel(layout):
        config = transformer_config(layout, torch.float32)
        sizes = {"vocab_size": TINY.padded_vocab, "max_sequence_length": TINY.sequence}
        untied = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
        plain = GPTModel(config, plain_spec(), **sizes, **untied)
        aligned = megatron_model(layout, alignment)
        aligned.load_state_dict(aligned.state_dict())
        assert alignment.version.value > 0
        return _described(aligned.sharded_state_dict()), _described(plain.sharded_state_dict())
