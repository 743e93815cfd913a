"""An engine's response, and the logprobs that a model's forward gives its tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qarl_nemo.metrics.fidelity import Scores

# FP32 logits over a vocabulary of 150k at this many positions of one response take 150 MB.
_LOGIT_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Response:
    """What an engine answered to one prompt, and its logprobs when it reads its own answer.

    Attributes:
        prompt: token ids.
        tokens: token ids of the response, its stop token included.
        logprobs: the tokens' logprobs at temperature 1 as they were sampled, nats.
        top_tokens: the likeliest token at each position.
        read_logprobs: the same tokens' logprobs when the engine reads prompt and response at once, nats.
        read_top_tokens: the likeliest token at each position then.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    top_tokens: list[int]
    read_logprobs: list[float]
    read_top_tokens: list[int]


def engine_scores(responses: list[Response]) -> Scores:
    """Compare an engine that reads its responses with itself as it sampled them."""
    read = pad_right([response.read_logprobs for response in responses], 0.0)
    return model_scores(responses, read, pad_right([response.read_top_tokens for response in responses], -1))


def model_scores(responses: list[Response], logprobs: Tensor, tops: Tensor) -> Scores:
    """Compare a model's and the engine's logprobs of the engine's tokens.

    Args:
        responses: B responses.
        logprobs: the model's, from `read_responses`.
        tops: its likeliest tokens, from there too.
    """
    engine = pad_right([response.logprobs for response in responses], 0.0)
    mask = _mask(responses)
    same_top = tops == pad_right([response.top_tokens for response in responses], -1)
    return Scores(logprobs, engine, same_top & mask, mask)


def kernel_scores(responses: list[Response], one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Scores:
    """Compare what two attention kernels of a model make of the engine's tokens.

    Args:
        responses: B responses.
        one: `read_responses` with one kernel.
        other: the same with the other.
    """
    mask = _mask(responses)
    return Scores(one[0], other[0], (one[1] == other[1]) & mask, mask)


def read_responses(
    model: PreTrainedModel, responses: list[Response], *, batch_size: int, pad_id: int
) -> tuple[Tensor, Tensor]:
    """Return what `read_tokens` does, of B responses."""
    sequences = [(response.prompt, response.tokens) for response in responses]
    return read_tokens(model, sequences, batch_size=batch_size, pad_id=pad_id)


def _mask(responses: list[Response]) -> Tensor:
    return pad_right([[True] * len(response.tokens) for response in responses], False)


@torch.inference_mode()
def read_tokens(
    model: PreTrainedModel, sequences: list[tuple[list[int], list[int]]], *, batch_size: int, pad_id: int
) -> tuple[Tensor, Tensor]:
    """Compute a model's logprobs of responses to prompts.

    Args:
        model: the model.
        sequences: B prompts and responses, token ids.
        batch_size: sequences of one forward.
        pad_id: filler.

    Returns:
        On the CPU: logprobs of the response tokens [B, R] FP32 at temperature 1, and the likeliest token at each
        position [B, R].
    """
    width = max(len(tokens) for _, tokens in sequences)
    parts = [
        _read_batch(model, sequences[start : start + batch_size], pad_id, width)
        for start in range(0, len(sequences), batch_size)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([tops for _, tops in parts])


def _read_batch(
    model: PreTrainedModel, batch: list[tuple[list[int], list[int]]], pad_id: int, width: int
) -> tuple[Tensor, Tensor]:
    # With padding on the right, where no token attends, attention needs no mask and runs its causal kernel.
    input_ids = pad_right([prompt + tokens for prompt, tokens in batch], pad_id).to(model.device)
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
    first = torch.tensor([len(prompt) - 1 for prompt, _ in batch], device=model.device)
    places = (first[:, None] + torch.arange(width, device=model.device)).clamp(max=input_ids.shape[1] - 2)
    hidden = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
    chosen = input_ids.gather(1, places + 1)
    logprobs, tops = [], []
    for part, tokens in zip(hidden.split(_LOGIT_COLUMNS, 1), chosen.split(_LOGIT_COLUMNS, 1), strict=True):
        logits = model.lm_head(part)
        tops.append(logits.argmax(-1))
        logprobs.append(logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
    return torch.cat(logprobs, dim=-1).cpu(), torch.cat(tops, dim=-1).cpu()


def pad_right(rows: list[list], filler: float) -> Tensor:
    """Stack lists of different lengths.

    Args:
        rows: B lists.
        filler: fills up shorter lists.

    Returns:
        [B, longest].
    """
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])
