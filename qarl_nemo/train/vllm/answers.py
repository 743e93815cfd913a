"""From vLLM's answers to rollouts: tokens, logprobs, and the experts that every token was routed to."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qarl_nemo.layers.router import NO_ROUTE
from qarl_nemo.train.rollouts import Rollouts, pad_left, require_finite


def make_rollouts(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Any],
    *,
    pad_id: int,
    num_prompt_columns: int,
    router_layers: Sequence[int],
    weight_version: int,
    device: torch.device,
) -> Rollouts:
    """Arrange vLLM's answers as rollouts.

    Args:
        prompts: token ids.
        answers: vLLM's `CompletionOutput` for each prompt, with flat logprobs of the sampled tokens alone.
        pad_id: filler.
        num_prompt_columns: least number of prompt columns P.
        router_layers: the model's layers that have a router; empty if routes are not captured.
        weight_version: the version that the engine serves.
        device: where the result goes.

    Returns:
        The rollouts; without routes if `router_layers` is empty.

    Raises:
        RuntimeError: logprobs are not finite, or vLLM captured no routes.
    """
    width = max(len(answer.token_ids) for answer in answers)
    input_ids, prompt_mask = pad_left(prompts, pad_id, torch.device("cpu"), width=num_prompt_columns)
    tokens = torch.full((len(answers), width), pad_id)
    logprobs = torch.zeros(len(answers), width)
    mask = torch.zeros(len(answers), width, dtype=torch.bool)
    for row, answer in enumerate(answers):
        length = len(answer.token_ids)
        tokens[row, :length] = torch.tensor(answer.token_ids)
        logprobs[row, :length] = torch.tensor(answer.logprobs.logprobs)
        mask[row, :length] = True
    require_finite(logprobs, "logprobs", weight_version)
    attention = torch.cat([prompt_mask, mask], dim=-1)
    captured = [answer.routed_experts for answer in answers] if router_layers else []
    return Rollouts(
        input_ids=torch.cat([input_ids, tokens], dim=-1).to(device),
        attention_mask=attention.to(device),
        response_mask=mask.to(device),
        generation_logprobs=logprobs.to(device),
        routes=stack_routes(captured, attention, router_layers).to(device) if router_layers else None,
        truncated=torch.tensor([answer.finish_reason == "length" for answer in answers], device=device),
        weight_version=weight_version,
    )


def stack_routes(captured: Sequence[Any], attention_mask: Tensor, router_layers: Sequence[int]) -> Tensor:
    """Arrange captured routes as the learner replays them.

    Args:
        captured: for each response [tokens - 1, layers of the model, k] integers, prompt first; the last token was
            sampled but never fed back, so no router has seen it.
        attention_mask: [B, S] bool, with one contiguous run of true in each row.
        router_layers: L layers that hold a router.

    Returns:
        [B, S, L, k] int16, `NO_ROUTE` where there is none.

    Raises:
        RuntimeError: vLLM returned no routes, routes for another number of tokens, or expert 0 for every choice of a
            token.
    """
    wrong = sum(
        routes is None or len(routes) != tokens - 1
        for routes, tokens in zip(captured, attention_mask.sum(-1).tolist(), strict=True)
    )
    if wrong:
        raise RuntimeError(f"vLLM returned no routed experts, or too few, for {wrong} of {len(captured)} responses")
    each = [torch.from_numpy(routes[:, router_layers].astype("int16")) for routes in captured]
    _require_routed(torch.cat(each))
    stacked = torch.full((*attention_mask.shape, *each[0].shape[1:]), NO_ROUTE, dtype=torch.int16)
    for row, (routes, mask) in enumerate(zip(each, attention_mask, strict=True)):
        first = int(mask.int().argmax())
        stacked[row, first : first + len(routes)] = routes
    return stacked


def _require_routed(routes: Tensor) -> None:
    # A token's k experts all differ, so zeros mean unrouted; with k = 1 only a batch of nothing but zeros shows it.
    all_zero = (routes == 0).all(-1)
    unrouted = int(all_zero.sum())
    if unrouted and (routes.shape[-1] > 1 or bool(all_zero.all())):
        raise RuntimeError(
            f"vLLM says expert 0 for all choices of {unrouted} of {all_zero.numel()} tokens and layers: its experts' "
            "kernels do not report routes, as on a CPU. Set qarl.router_replay=false, or rollout.engine=packed"
        )
