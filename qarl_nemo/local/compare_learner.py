"""The learner of a comparison: what its forward says about tokens that an engine chose."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qarl_kernels import QuantFormat
from qarl_nemo.layers.install import install
from qarl_nemo.local.compare_engines import Response
from qarl_nemo.local.compare_settings import Job
from qarl_nemo.local.model import load_checkpoint
from qarl_nemo.local.rollouts import pad_left, positions

# A vocabulary of 150k in FP32 for this many places of one response is 150 MB.
_LOGIT_COLUMNS = 256


def load_learner(job: Job, fmt: QuantFormat) -> PreTrainedModel:
    """Load the checkpoint with layers that execute `fmt`.

    Args:
        job: the comparison.
        fmt: what the targets execute; the others stay as they are.

    Returns:
        The model on the job's device.
    """
    model, _ = load_checkpoint(job.settings.checkpoint, job.dtype)
    install(model.to(job.device), job.settings.targets, fmt)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def score(
    model: PreTrainedModel, responses: list[Response], *, batch_size: int, pad_id: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compare what learner and engine say about the engine's tokens.

    Args:
        model: the learner.
        responses: B responses.
        batch_size: responses of one forward.
        pad_id: filler.

    Returns:
        On the CPU: the learner's logprobs [B, R] and the engine's [B, R], both FP32 at temperature 1, whether both hold
        the same token for the likeliest [B, R], and where a response has a token [B, R].
    """
    width = max(len(response.tokens) for response in responses)
    learner = torch.zeros(len(responses), width)
    same_top = torch.zeros(len(responses), width, dtype=torch.bool)
    for start in range(0, len(responses), batch_size):
        batch = responses[start : start + batch_size]
        logprobs, tops = _score_batch(model, batch, pad_id)
        rows = slice(start, start + len(batch))
        learner[rows, : logprobs.shape[1]] = logprobs.cpu()
        engine_tops = _pad_right([response.top_tokens for response in batch], -1)
        same_top[rows, : logprobs.shape[1]] = tops.cpu() == engine_tops
    engine = _pad_right([response.logprobs for response in responses], 0.0)
    mask = _pad_right([[True] * len(response.tokens) for response in responses], False)
    return learner, engine, same_top & mask, mask


def _score_batch(model: PreTrainedModel, batch: list[Response], pad_id: int) -> tuple[Tensor, Tensor]:
    tokens = _pad_right([response.tokens for response in batch], pad_id).to(model.device)
    mask = _pad_right([[True] * len(response.tokens) for response in batch], False).to(model.device)
    prompts, prompt_mask = pad_left([response.prompt for response in batch], pad_id, model.device)
    attention = torch.cat([prompt_mask, mask], dim=-1)
    hidden = model.model(
        input_ids=torch.cat([prompts, tokens], dim=-1),
        attention_mask=attention,
        position_ids=positions(attention),
        use_cache=False,
    ).last_hidden_state[:, prompts.shape[1] - 1 : -1]
    logprobs, tops = [], []
    for part, chosen in zip(hidden.split(_LOGIT_COLUMNS, 1), tokens.split(_LOGIT_COLUMNS, 1), strict=True):
        logits = model.lm_head(part)
        tops.append(logits.argmax(-1))
        logprobs.append(logits.float().log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1))
    return torch.cat(logprobs, dim=-1), torch.cat(tops, dim=-1)


def _pad_right(rows: list[list], filler: float) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])
