"""A synthetic Megatron `torch_dist` checkpoint with Qwen3-30B-A3B's sizes, as eight expert-parallel ranks write it."""

import io
import json
import os
import pickle
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

NUM_RANKS = 8
MODEL = Path(__file__).parents[2] / "examples" / "models" / "qwen3-30b-a3b"
CONFIG = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
PADDED_VOCAB = 152064


def layout(num_layers: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
    """Yield what `NUM_RANKS` expert-parallel ranks write.

    Yields:
        Key, global sizes, sizes of a chunk, and the axis along which ranks share chunks; -1 if rank 0 has them all.
    """
    hidden, width, experts = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"], CONFIG["num_experts"]
    head_dim, heads, groups = CONFIG["head_dim"], CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        yield key, (PADDED_VOCAB, hidden), (PADDED_VOCAB, hidden), -1
    yield "decoder.final_layernorm.weight", (hidden,), (hidden,), -1
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": (hidden,),
        "self_attention.linear_qkv.weight": ((heads + 2 * groups) * head_dim, hidden),
        "self_attention.linear_proj.weight": (hidden, heads * head_dim),
        "self_attention.q_layernorm.weight": (head_dim,),
        "self_attention.k_layernorm.weight": (head_dim,),
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.router.weight": (experts, hidden),
    }
    for name, shape in layer.items():
        yield f"decoder.layers.{name}", (num_layers, *shape), (1, *shape), -1
    fused = "decoder.layers.mlp.experts.experts.linear_fc"
    yield f"{fused}1.weight", (num_layers, experts, 2 * width, hidden), (1, 1, width, hidden), 1
    yield f"{fused}2.weight", (num_layers, experts, hidden, width), (1, 1, hidden, width), 1


def write_checkpoint(folder: Path, num_layers: int, *, sparse: bool) -> int:
    """Write a synthetic Megatron checkpoint whose optimizer is in the table of contents only.

    Args:
        folder: where it goes.
        num_layers: how many layers.
        sparse: zeros in files with holes.

    Returns:
        Bytes of weights.
    """
    folder.mkdir()
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    tensors, places, num_bytes = {}, {}, 0
    files = [(folder / f"__{rank}_0.distcp").open("wb") for rank in range(NUM_RANKS)]
    for key, shape, sizes, axis in layout(num_layers):
        blob, hole = saved(sizes, sparse=sparse)
        num_bytes += 2 * torch.Size(shape).numel()
        chunks = []
        for offsets in product(*(range(0, limit, step) for limit, step in zip(shape, sizes, strict=True))):
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            file = files[offsets[axis] * NUM_RANKS // shape[axis] if axis >= 0 else 0]
            index = MetadataIndex(key, chunks[-1].offsets)
            places[index] = _StorageInfo(Path(file.name).name, file.tell(), len(blob))
            write_around(file, blob, hole)
        for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "optimizer.state.fp32_param."):
            properties = TensorProperties(dtype=torch.bfloat16)
            tensors[prefix + key] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
            for chunk in chunks if prefix else ():
                places[MetadataIndex(prefix + key, chunk.offsets)] = _StorageInfo("__optimizer.distcp", 0, 0)
    for file in files:
        file.truncate()
        file.close()
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, None, places)))
    return num_bytes


def saved(sizes: tuple[int, ...], *, sparse: bool) -> tuple[bytes, tuple[int, int]]:
    """Return a tensor as `torch.save` writes it, and the range of zeros in it that need not be written.

    Args:
        sizes: the tensor's sizes.
        sparse: zeros instead of random numbers.

    Returns:
        The bytes, and the hole's begin and end.
    """
    buffer = io.BytesIO()
    tensor = torch.zeros(sizes, dtype=torch.bfloat16) if sparse else torch.randn(sizes).bfloat16() / 50
    if sizes[0] == PADDED_VOCAB:
        tensor[CONFIG["vocab_size"] :] = 0
    torch.save(tensor, buffer)
    blob = buffer.getvalue()
    # torch aligns data to 64 bytes within the first KiB; what follows the data is shorter than 1 KiB, too.
    return blob, (2048, len(blob) - 2048) if sparse and len(blob) > 8192 else (0, 0)


def write_around(file: io.BufferedWriter, blob: bytes, hole: tuple[int, int]) -> None:
    """Write bytes, skipping the hole.

    Args:
        file: where they go.
        blob: the bytes.
        hole: its begin and end.
    """
    view = memoryview(blob)
    file.write(view[: hole[0]])
    file.seek(hole[1] - hole[0], os.SEEK_CUR)
    file.write(view[hole[1] :])
