"""Answers more prompts than vLLM decodes at once, without losing its CUDA graphs.

vLLM gives the place of a finished answer to the next prompt at once. CUDA graphs hold decoding steps alone, so a step
that also reads a prompt runs without one, kernel by kernel. While many prompts wait, an answer ends in almost every
step, and almost every step is such a slow one, in which a small model waits for its launches. So prompts are handed to
the engine in groups, as soon as a whole group of places is free.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

# Groups that fill the engine. Larger groups cost fewer slow steps and leave more places empty. Where a slow step takes
# as long as s others and answers have n tokens, groups of sqrt(2 s / n) of the places cost least: 0.14 to 0.23 of them
# for s of 3 to 8 and n of 300, and near that little changes.
_GROUPS = 4


def answer_all(
    llm: Any,
    prompts: Sequence[Any],
    sampling: Sequence[Any],
    *,
    lora_request: Any = None,
    num_groups: int | None = None,
) -> list[Any]:
    """Return vLLM's `CompletionOutput` for each prompt, in their order.

    Args:
        llm: a `vllm.LLM` that answers nothing else meanwhile.
        prompts: what `LLM.generate` takes.
        sampling: vLLM's parameters for each prompt.
        lora_request: the adapter of all of them.
        num_groups: how many groups of prompts fill the engine; None: as many as cost least, or, in an engine without
            CUDA graphs, one for each place, as vLLM itself does it.

    Returns:
        The first answer to each.

    Source: vllm 0.25.1, `vllm/entrypoints/offline_utils.py`, `_run_engine`.
    """
    engine = llm.llm_engine
    config = engine.vllm_config
    places = config.scheduler_config.max_num_seqs
    if num_groups is None:
        num_groups = places if config.model_config.enforce_eager else _GROUPS
    waiting, finished = deque(zip(prompts, sampling, strict=True)), []
    while waiting or engine.has_unfinished_requests():
        free = places - engine.get_num_unfinished_requests()
        if waiting and num_groups * free >= places:
            group = [waiting.popleft() for _ in range(min(free, len(waiting)))]
            texts, parameters = zip(*group, strict=True)
            llm.enqueue(list(texts), list(parameters), use_tqdm=False, lora_request=lora_request)
        finished += [output for output in engine.step() if output.finished]
    return [output.outputs[0] for output in sorted(finished, key=lambda output: int(output.request_id))]
