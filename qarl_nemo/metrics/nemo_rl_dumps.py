"""NeMo-RL's dump of one batch, `train_data_step7.jsonl`, read as the diagnostics of its step.

A dump has the tokens, log-probabilities before the update and advantages of every response, one a line, but nothing of
the update, and no text of single tokens: error tokens can be counted, not shown.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qarl_nemo.files import FileError
from qarl_nemo.metrics.diagnostics import StepDiagnostics, sum_positions
from qarl_nemo.metrics.recorded import each_line

# Those of `error_token_mask`; a test holds the two together.
MAX_PROB, MAX_NGRAM, MIN_REPEATS, MIN_RUN_TOKENS = 1e-3, 8, 4, 16
_TOKEN_COLUMNS = ("prev_logprobs", "generation_logprobs", "advantages")
_MAX_TOKENS = 4096
_MAX_EXAMPLES = 8

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Response:
    """One response: its tokens that count [N, 3] by _TOKEN_COLUMNS, and which of them [N] are error tokens."""

    tokens: Floats
    errors: Mask | None
    reward: float


def read_dump(step: int, file: Path) -> StepDiagnostics:
    """Read a dump.

    Args:
        step: its training step.
        file: the dump.

    Returns:
        Mismatch weights, an even sample of tokens, and examples with `step` and `num_error_tokens`, which is None if
        the dump lacks `token_ids`; else also the counts by position.

    Raises:
        FileError: a line is damaged.
    """
    responses, examples = [], []
    for number, line in enumerate(each_line(file), start=1):
        try:
            row = {key: value[0] if isinstance(value, list) else value for key, value in line.items()}
            response = _response(row)
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise FileError(
                f"{file}, line {number} is damaged: expected a response with {', '.join(_TOKEN_COLUMNS)}, "
                "token_loss_mask and sample_loss_mask, numbers, as many in each (and in token_ids, where there are "
                f"any), but: {type(error).__name__} {error}"
            ) from error
        if not len(response.tokens):
            continue
        responses.append(response)
        if len(examples) < _MAX_EXAMPLES and (texts := _texts(row.get("content"))):
            examples.append({"step": step} | _example(texts, response))
    return StepDiagnostics(step, _arrays(responses), examples)


def response_error_mask(
    prev_logprobs: Floats, generation_logprobs: Floats, token_ids: NDArray[np.int64], token_mask: Mask
) -> Mask:
    """Mark the error tokens of one response as `error_token_mask` does, without torch, which a report does not load.

    Args:
        prev_logprobs: [T] the learner's logprobs, nats.
        generation_logprobs: [T] the rollout engine's logprobs, nats.
        token_ids: [T] the tokens.
        token_mask: [T] true for response tokens.

    Returns:
        [T], false outside `token_mask`.
    """
    wrong = (prev_logprobs < math.log(MAX_PROB)) & (generation_logprobs < math.log(MAX_PROB))
    for ngram in range(1, MAX_NGRAM + 1):
        matches = (token_ids[ngram:] == token_ids[:-ngram]) & token_mask[ngram:] & token_mask[:-ngram]
        edges = np.flatnonzero(np.diff(matches, prepend=False, append=False))
        for start, end in edges.reshape(-1, 2):
            # As many matches in a row at this distance, and the copy before them, are a run of one n-gram.
            if end - start + ngram >= max(ngram * MIN_REPEATS, MIN_RUN_TOKENS):
                wrong[start : end + ngram] = True
    return wrong & token_mask


def _response(row: Mapping[str, Any]) -> _Response:
    mask = np.array(row["token_loss_mask"], bool) & bool(row["sample_loss_mask"])
    columns = [np.array(row[key], float) for key in _TOKEN_COLUMNS]
    ids = None if row.get("token_ids") is None else np.array(row["token_ids"], np.int64)
    shapes = [array.shape for array in (mask, *columns, *([] if ids is None else [ids]))]
    if mask.ndim != 1 or len(set(shapes)) > 1:
        raise ValueError(f"shapes {shapes}")
    if not columns[0].any():
        # Where `force_on_policy_ratio` leaves a forward out, NeMo-RL dumps zeros: nobody knows them.
        columns[0], ids = np.full_like(columns[0], np.nan), None
    errors = None if ids is None else response_error_mask(columns[0], columns[1], ids, mask)[mask]
    # Under dynamic sampling `rewards` are those of all that was sampled, of which only some are dumped.
    reward = row.get("filtered_rewards", row.get("rewards"))
    return _Response(np.stack(columns, axis=-1)[mask], errors, float(reward or 0.0))


def _arrays(responses: list[_Response]) -> dict[str, NDArray[Any]]:
    counts = [np.stack([np.ones(len(one.errors)), one.errors]) for one in responses if one.errors is not None]
    whole = bool(counts) and len(counts) == len(responses)
    responses = [one for one in responses if np.isfinite(one.tokens[:, 0]).all()]
    chosen = np.concatenate([*(one.tokens for one in responses), np.empty((0, 3))])
    # Evenly spaced over the step.
    chosen = chosen[:: max(1, math.ceil(len(chosen) / _MAX_TOKENS))]
    gaps = [float(np.mean(one.tokens[:, 0] - one.tokens[:, 1])) for one in responses]
    arrays = {
        "seq_mismatch_weight": np.array([math.exp(min(gap, 20.0)) for gap in gaps]),
        "seq_advantage": np.array([float(one.tokens[:, 2].mean()) for one in responses]),
        "token_prev_logprob": chosen[:, 0],
        "token_generation_logprob": chosen[:, 1],
        "token_advantage": chosen[:, 2],
    }
    if whole:
        arrays["position_tokens"], arrays["position_error_tokens"] = sum_positions(counts)
    return arrays


def _texts(content: Any) -> list[str]:
    """Return the messages' texts: the prompt, then responses, each with the environment's words after it."""
    texts = content if isinstance(content, list) else [content]
    return texts if all(isinstance(text, str) for text in texts) else []


def _example(texts: list[str], response: _Response) -> dict[str, Any]:
    # Of one text alone, only the tokenizer could tell where the response begins.
    prompt, responses = (texts[0], texts[1:]) if len(texts) > 1 else ("", texts)
    return {
        "prompt": prompt,
        # What the environment says last is no part of the response.
        "response": "\n".join(responses[:-1] or responses),
        "answer": "",
        "reward": response.reward,
        "advantage": float(response.tokens[:, 2].mean()),
        "error_tokens": [],
        "num_error_tokens": None if response.errors is None else int(response.errors.sum()),
    }
