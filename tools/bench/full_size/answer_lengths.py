"""Answers of given lengths: the copy of NeMo-RL in which arms run asks here how long each answer may be."""

import json
import os
import threading
from typing import Any

FILE = "FULL_SIZE_LENGTHS"
KEY = "answer_tokens"
"""Where a batch carries the lengths from the driver to the engines."""
_ASKING = threading.Lock()


def with_lengths(engines: Any, batch: Any) -> Any:
    """Give a batch's answers the next lengths of the file that the environment names; without one, change nothing.

    A thread gets the lengths of a whole step before it gets another's: NeMo-RL's asynchronous loop asks for each step's
    answers one by one from a thread of its own, and has two steps under way at once.

    Args:
        engines: NeMo-RL's handle of them, which remembers what was asked for.
        batch: NeMo-RL's `BatchedDataDict` of prompts.

    Returns:
        The batch, with a length for each row.
    """
    file = os.environ.get(FILE)
    if file is None:
        return batch
    import torch

    with _ASKING:
        if not hasattr(engines, "steps_asked"):
            with open(file, encoding="utf-8") as lengths:
                engines.step_lengths, engines.steps_asked, engines.lengths_left = json.load(lengths), 0, {}
        left = engines.lengths_left.setdefault(threading.get_ident(), [])
        while len(left) < batch.size:
            left += engines.step_lengths[engines.steps_asked % len(engines.step_lengths)]
            engines.steps_asked += 1
        chosen, left[:] = left[: batch.size], left[batch.size :]
    sized = batch.copy()
    sized[KEY] = torch.tensor(chosen)
    return sized
