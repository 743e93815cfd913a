"""Answers of given lengths: the copy of NeMo-RL in which arms run asks here how long each answer may be."""

import json
import os
from typing import Any

FILE = "FULL_SIZE_LENGTHS"
KEY = "answer_tokens"
"""Where a batch carries the lengths from the driver to the engines."""


def with_lengths(engines: Any, batch: Any) -> Any:
    """Give a batch's answers the next lengths of the file that the environment names; without one, change nothing.

    Args:
        engines: NeMo-RL's handle of them, which counts the answers that were asked for.
        batch: NeMo-RL's `BatchedDataDict` of prompts.

    Returns:
        The batch, with a length for each row.
    """
    file = os.environ.get(FILE)
    if file is None:
        return batch
    import torch

    if not hasattr(engines, "answers_asked"):
        with open(file, encoding="utf-8") as lengths:
            engines.answer_lengths, engines.answers_asked = json.load(lengths), 0
    first = engines.answers_asked
    engines.answers_asked += batch.size
    chosen = [engines.answer_lengths[place % len(engines.answer_lengths)] for place in range(first, first + batch.size)]
    sized = batch.copy()
    sized[KEY] = torch.tensor(chosen)
    return sized
