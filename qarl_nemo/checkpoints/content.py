"""Compare a checkpoint's tensors with its config.json: every parameter once, in its shape, and nothing else."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from qarl_nemo.architecture import CONFIG_FILE, Architecture
from qarl_nemo.checkpoints.reader import FLOAT_DTYPES, Checkpoint, TensorInfo
from qarl_nemo.names import summarize_names

_ROTARY = re.compile(r"(?:model\.)?(?:layers\.\d+\.self_attn\.)?rotary_emb\.(?:inv_freq|cos_cached|sin_cached)")
_STACKED = re.compile(r".*\.mlp\.experts\.(?:gate_up|down)_proj")
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# For each kind of problem this many names and pairs of shapes are written out; the others are counted.
_SHOWN = 8


def drop_reason(name: str, architecture: Architecture) -> str | None:
    """Say why a tensor that is not a parameter may be left out of the output; None if it may not.

    Returns:
        The reason, for a short list of tensors that old checkpoints carry and no engine reads.
    """
    if _ROTARY.fullmatch(name):
        return "engines compute rotary frequencies from config.json"
    if name == LM_HEAD and architecture.tie_word_embeddings:
        return "config.json ties it to the embedding, whose values it has"
    return None


def content_problems(tensors: Iterable[TensorInfo], architecture: Architecture) -> list[str]:
    """Say where tensors are not the parameters of a model.

    Args:
        tensors: what the checkpoint holds, each name once, without what `drop_reason` leaves out.
        architecture: the model.

    Returns:
        One sentence for each kind of problem, with the first names and a count.
    """
    found = {info.name: info for info in tensors}
    missing: list[str] = []
    wrong: dict[str, list[str]] = defaultdict(list)
    for name, shape in architecture.parameters():
        info = found.pop(name, None)
        if info is None:
            missing.append(name)
            continue
        if info.shape != shape:
            wrong[f"shape {list(info.shape)}, config.json implies {list(shape)}"].append(name)
        if info.dtype not in FLOAT_DTYPES:
            wrong[f"dtype {info.dtype}, not floating point"].append(name)
    stacked = [name for name in found if _STACKED.fullmatch(name)]
    foreign = [name for name in found if name not in stacked]
    problems = [_counted("missing", missing)] if missing else []
    if stacked:
        hint = "stacked expert weights; save the model with one tensor per expert (transformers' save_pretrained)"
        problems.append(f"{hint}: {summarize_names(stacked, _SHOWN)}")
    problems += [_counted(f"not part of a {architecture.model_type} model", foreign)] if foreign else []
    problems += [_counted(f"of {what}", names) for what, names in list(wrong.items())[:_SHOWN]]
    return problems + ([f"{len(wrong) - _SHOWN} more wrong shapes"] if len(wrong) > _SHOWN else [])


def require_whole(checkpoint: Checkpoint) -> None:
    """Require that a checkpoint holds its whole model: loaders put random values in place of a missing tensor.

    Raises:
        ValueError: another model, or tensors that are missing, have other shapes or belong to no model; all are listed.
    """
    architecture = Architecture.parse(checkpoint.config, str(checkpoint.companions / CONFIG_FILE))
    problems = content_problems(
        (info for info in checkpoint.tensors if drop_reason(info.name, architecture) is None), architecture
    )
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise ValueError(f"checkpoint {checkpoint.folder} is not what its config.json says:\n{listed}")
    require_tied_copy(checkpoint)


def require_tied_copy(checkpoint: Checkpoint) -> None:
    """Require that an lm_head beside a tied embedding is a copy of it, because engines read the embedding instead.

    Args:
        checkpoint: any; nothing is read if config.json ties nothing or there is no lm_head.

    Raises:
        ValueError: the two differ.
    """
    tables = {info.name: info for info in checkpoint.tensors if info.name in (LM_HEAD, EMBEDDING)}
    if len(tables) < 2 or not checkpoint.config.get("tie_word_embeddings"):
        return
    with checkpoint.open_reader() as reader:
        # By their bits, since no NaN equals another.
        embedding = reader.read(tables[EMBEDDING]).clone().view(torch.uint8)
        if not torch.equal(embedding, reader.read(tables[LM_HEAD]).contiguous().view(torch.uint8)):
            raise ValueError(
                f"{checkpoint.folder}: config.json says tie_word_embeddings, but lm_head.weight is not "
                "model.embed_tokens.weight; engines would ignore it: set tie_word_embeddings to false, or remove it"
            )


def _counted(what: str, names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) > 1)} {what}: {summarize_names(names, _SHOWN)}"
