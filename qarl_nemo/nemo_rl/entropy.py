"""The learner's exact entropy, from the logits of which NeMo-RL gives its losses only those of the sampled tokens.

N are the positions of a micro-batch, in NeMo-RL's layouts: [B, S], or one row of sequences that are each padded and
split over the context-parallel ranks. V is the vocabulary, of which a tensor-parallel rank has a part.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from qarl_nemo.nemo_rl.loss import ENTROPY_KEY

_CHUNK_ROWS = 256
_PREPARATIONS = ("prepare_loss_input", "prepare_packed_loss_input")


@contextmanager
def entropy_of_logits(train_module: Any) -> Iterator[None]:
    """Make NeMo-RL hand our loss the mean entropy of a call's response tokens inside the block; on every rank.

    Args:
        train_module: `nemo_rl.models.megatron.train`, which prepares a loss's input from logits.

    Yields:
        Nothing; a step is trained meanwhile.
    """
    own = {name: getattr(train_module, name) for name in _PREPARATIONS}
    for name, prepare in own.items():
        setattr(train_module, name, partial(_with_entropy, prepare))
    try:
        yield
    finally:
        for name, prepare in own.items():
            setattr(train_module, name, prepare)


def _with_entropy(prepare: Callable[..., Any], **given: Any) -> tuple[Any, Any]:
    loss_input, data = prepare(**given)
    if given["loss_fn"].use_fused_linear_logprobs:
        # Then what is called logits are log-probabilities already.
        return loss_input, data
    logits, context = given["logits"], given.get("context_parallel_group")
    mask = next_token_mask(data, logits.shape[1], given.get("cu_seqlens_q"), given.get("cu_seqlens_q_padded"), context)
    return loss_input, {**data, ENTROPY_KEY: mean_entropy(logits, mask, given.get("vocab_parallel_group"), context)}


def next_token_mask(
    data: Mapping[str, Tensor], length: int, ends: Tensor | None, padded_ends: Tensor | None, group: Any
) -> Tensor:
    """Say at which positions the next token is one of a response that counts, in the layout of the logits.

    Args:
        data: `token_mask` [B, S] and `sample_mask` [B].
        length: positions in a row of this rank's logits.
        ends: [B + 1] int, where sequences end in a packed row without their padding, from 0; None: one a row.
        padded_ends: [B + 1] int, the same with their padding.
        group: context-parallel ranks; None is one.

    Returns:
        [B, length], or [1, length] of a packed row, bool.
    """
    counted = data["token_mask"].bool() & data["sample_mask"].bool().unsqueeze(-1)
    following = torch.nn.functional.pad(counted[:, 1:], (0, 1))
    size = 1 if group is None else distributed.get_world_size(group)
    if ends is None or padded_ends is None:
        return _own_part(_resized(following, length * size), group)
    own, padded = ends.diff().tolist(), padded_ends.diff().tolist()
    rows = [_resized(row[:real].unsqueeze(0), whole) for row, real, whole in zip(following, own, padded, strict=True)]
    return torch.cat([_own_part(row, group) for row in rows], dim=1)


def _resized(mask: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(mask, (0, length - mask.shape[1]))


def _own_part(mask: Tensor, group: Any) -> Tensor:
    """Return this context-parallel rank's columns: one part from the front and one from the back, as Megatron cuts."""
    if group is None or distributed.get_world_size(group) == 1:
        return mask
    rank, parts = distributed.get_rank(group), mask.chunk(2 * distributed.get_world_size(group), dim=1)
    return torch.cat([parts[rank], parts[-1 - rank]], dim=1)


@torch.no_grad()
def mean_entropy(logits: Tensor, mask: Tensor, vocabulary_group: Any, context_group: Any) -> Tensor:
    """Average -sum_v p_v log p_v over positions.

    Args:
        logits: [..., V / TP] at the sampling temperature.
        mask: [...] bool, the positions that count.
        vocabulary_group: ranks that share the vocabulary; None is one.
        context_group: ranks that share the positions; None is one.

    Returns:
        Scalar, FP32, in nats, the same on all of these ranks; 0 without such a position.
    """
    rows, flat = mask.flatten().nonzero().squeeze(-1), logits.flatten(0, -2)
    # FP32 logits of all positions at once would be the step's largest tensor.
    sums = torch.zeros(2, device=logits.device)
    for part in rows.split(_CHUNK_ROWS):
        # A part without rows is one on all ranks that share the vocabulary.
        sums += torch.stack([_entropy(flat[part].float(), vocabulary_group).sum(), sums.new_tensor(len(part))])
    _reduce(sums, distributed.ReduceOp.SUM, context_group)
    return sums[0] / sums[1].clamp(min=1)


def _entropy(logits: Tensor, group: Any) -> Tensor:
    largest = logits.amax(-1)
    _reduce(largest, distributed.ReduceOp.MAX, group)
    shifted = logits - largest.unsqueeze(-1)
    weights = shifted.exp()
    sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])
    _reduce(sums, distributed.ReduceOp.SUM, group)
    normalizer, weighted = sums
    return normalizer.log() - weighted / normalizer


def _reduce(values: Tensor, operation: Any, group: Any) -> None:
    if group is not None:
        distributed.all_reduce(values, op=operation, group=group)
