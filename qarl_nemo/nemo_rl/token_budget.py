"""Finds the largest micro-batch that fits, because short kernels spend most of their time being launched."""

from dataclasses import replace

from qarl_nemo.memory import MAX_TOKENS, Learner, ModelSize, Parallelism, rank_memory

_STEP = 1024


def largest_budget(model: ModelSize, ranks: Parallelism, learner: Learner, gpu_bytes: float) -> int | None:
    """Find the largest micro-batch whose training step fits a GPU.

    Args:
        model: its sizes.
        ranks: how GPUs share it.
        learner: what it holds and computes; its `tokens` are not read.
        gpu_bytes: what the learner may take.

    Returns:
        Tokens, a multiple of 1024; None if not even 1024 fit.
    """
    low, high = 0, MAX_TOKENS // _STEP
    while low < high:
        middle = (low + high + 1) // 2
        fits = rank_memory(model, ranks, replace(learner, tokens=middle * _STEP)).fits(gpu_bytes)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * _STEP or None
