"""Serves one model by vLLM in a process of its own, which frees the GPU when it ends."""

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from qarl_nemo.measure.compare.vllm_responses import saved_adapter, start_engine
from qarl_nemo.measure.eval.orphan import end_with_parent
from qarl_nemo.refit.engine_methods import chosen_methods
from qarl_nemo.train.sampling import SamplingParams
from qarl_nemo.train.vllm.admission import answer_all


def serve(
    connection: Connection,
    checkpoint: str,
    adapter: str | None,
    device: str,
    options: dict[str, Any],
    stop_ids: list[int],
) -> None:
    """Answer until told to stop.

    Sends the chosen methods once it is ready, then for each (prompts, params, seeds) that it receives a
    list of (tokens, truncated); None ends it. An exception is sent as the text of a RuntimeError.

    Args:
        connection: to the process that asks.
        checkpoint: the model's folder.
        adapter: PEFT folder of the adapters that all answers are given with; None: there are none.
        device: `cpu` or `cuda`.
        options: keyword arguments of `vllm.LLM`.
        stop_ids: tokens that end an answer.
    """
    # Its warnings are of what is left out on purpose, a tokenizer among them, and hide what `qarl eval` says.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    end_with_parent()
    try:
        llm = start_engine(checkpoint, device, **options)
        connection.send(llm.apply_model(chosen_methods)[0])
        while (asked := connection.recv()) is not None:
            connection.send(_answers(llm, adapter, stop_ids, *asked))
    except KeyboardInterrupt:
        return
    except (Exception, SystemExit) as error:  # noqa: BLE001 vLLM raises unrelated types, and whoever waits must hear
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _answers(
    llm: Any,
    adapter: str | None,
    stop_ids: list[int],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    seeds: Sequence[int],
) -> list[tuple[list[int], bool]]:
    from vllm import SamplingParams as VllmSamplingParams

    sampling = [
        VllmSamplingParams(
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=seed,
            stop_token_ids=stop_ids,
            detokenize=False,
        )
        for seed in seeds
    ]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = answer_all(llm, requests, sampling, lora_request=saved_adapter(adapter))
    return [(list(answer.token_ids), answer.finish_reason == "length") for answer in answers]
