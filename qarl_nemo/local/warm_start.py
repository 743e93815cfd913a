"""Supervised warm start: next-token cross-entropy on the answers, in full precision, for models that know nothing."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qarl_nemo.local.config import WarmStart
from qarl_nemo.local.rollouts import encode_prompts, pad_left, positions
from qarl_nemo.local.tasks import TaskSource


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: TaskSource,
    config: WarmStart,
    progress: Callable[[int, float], None],
) -> None:
    """Minimize -mean log p(answer, stop | prompt) over the answers' tokens with AdamW.

    Args:
        model: trained in place.
        tokenizer: its tokenizer.
        source: where the tasks come from; the stream differs from RL's.
        config: steps, batch size, learning rate.
        progress: called with the step and its loss.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    device = next(model.parameters()).device
    for step in range(1, config.steps + 1):
        tasks = source.train(step, config.batch_size, stream="warm_start")
        prompts = encode_prompts(tasks, tokenizer)
        answers = [tokenizer(task.answer, add_special_tokens=False)["input_ids"] for task in tasks]
        rows = [[*p, *a, tokenizer.eos_token_id] for p, a in zip(prompts, answers, strict=True)]
        input_ids, mask = pad_left(rows, tokenizer.pad_token_id, device)
        lengths = torch.tensor([len(a) + 1 for a in answers], device=device)
        columns = torch.arange(input_ids.shape[1], device=device)
        labels = input_ids.masked_fill(columns < input_ids.shape[1] - lengths[:, None], -100)
        logits = model(input_ids=input_ids, attention_mask=mask, position_ids=positions(mask)).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step, float(loss.detach()))
