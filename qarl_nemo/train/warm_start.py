"""Supervised warm start for random models: next-token cross-entropy on the answers, unquantized."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qarl_nemo.train.config import AdamWConfig, WarmStart
from qarl_nemo.train.optimizer import MasterOptimizer
from qarl_nemo.train.prompts import PromptEncoder
from qarl_nemo.train.rollouts import pad_left, positions
from qarl_nemo.train.tasks import Task, TaskSource


def warm_start(
    model: PreTrainedModel,
    encode: PromptEncoder,
    source: TaskSource,
    config: WarmStart,
    progress: Callable[[int, float], None],
    greedy_reward: Callable[[], float],
) -> None:
    """Minimize -mean log p(answer, stop | prompt) over the answers' tokens with AdamW until the target is reached.

    Args:
        model: trained in place.
        encode: makes prompts of the tasks, with the model's tokenizer.
        source: where the tasks come from, in another stream than RL's.
        config: steps, batch size, learning rate, target.
        progress: called with the step and its loss.
        greedy_reward: mean reward of the model's greedy answers now.
    """
    settings = AdamWConfig(lr=config.lr, betas=(0.9, 0.999))
    optimizer = MasterOptimizer(model.named_parameters(), settings, max_grad_norm=1.0)
    for step in range(1, config.steps + 1):
        loss = _answer_loss(model, encode, source.train(step, config.batch_size, stream="warm_start"))
        loss.backward()
        optimizer.step()
        progress(step, float(loss.detach()))
        looking = config.target_reward is not None and step % config.check_period == 0
        if looking and greedy_reward() >= config.target_reward:
            return


def _answer_loss(model: PreTrainedModel, encode: PromptEncoder, tasks: list[Task]) -> Tensor:
    device, tokenizer = next(model.parameters()).device, encode.tokenizer
    prompts = encode(tasks)
    answers = [tokenizer(task.answer, add_special_tokens=False)["input_ids"] for task in tasks]
    rows = [[*p, *a, tokenizer.eos_token_id] for p, a in zip(prompts, answers, strict=True)]
    input_ids, mask = pad_left(rows, tokenizer.pad_token_id, device)
    lengths = torch.tensor([len(a) + 1 for a in answers], device=device)
    columns = torch.arange(input_ids.shape[1], device=device)
    labels = input_ids.masked_fill(columns < input_ids.shape[1] - lengths[:, None], -100)
    logits = model(input_ids=input_ids, attention_mask=mask, position_ids=positions(mask)).logits
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


@torch.no_grad()
def greedy_answers(model: PreTrainedModel, encode: PromptEncoder, tasks: list[Task], max_new_tokens: int) -> list[str]:
    """Decode one greedy answer for each task with the plain, unquantized model.

    Args:
        model: the model before its layers are replaced.
        encode: makes prompts of the tasks, with the model's tokenizer.
        tasks: the tasks.
        max_new_tokens: budget, tokens.
    """
    device, tokenizer = next(model.parameters()).device, encode.tokenizer
    input_ids, mask = pad_left(encode(tasks), tokenizer.pad_token_id, device)
    tokens = model.generate(
        input_ids=input_ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.batch_decode(tokens[:, input_ids.shape[1] :], skip_special_tokens=True)
