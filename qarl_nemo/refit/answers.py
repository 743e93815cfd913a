"""Calls that every rank of a rollout engine answers; a rank that fails says so in its answer.

If a rank raises, vLLM's executor raises at once and leaves the other ranks' answers in their queues, where the next
call takes them for its own (vllm/v1/executor/multiproc_executor.py, `collective_rpc`, 0.25.1).
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

from qarl_nemo.refit.engine import RolloutEngine
from qarl_nemo.refit.waiting import within

_FAILED = "qarl_failed"
_logger = logging.getLogger(__name__)


def answering(extension: type) -> type:
    """Make an extension's `qarl_` methods answer with their failures, which `ask` raises, instead of raising them."""
    for name, method in list(vars(extension).items()):
        if name.startswith("qarl_"):
            setattr(extension, name, _answering(method))
    return extension


def _answering(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def answer(*args: Any) -> Any:
        try:
            return method(*args)
        except Exception as error:
            _logger.exception("%s failed in this rank", method.__name__)
            return {_FAILED: f"{type(error).__name__}: {error}"}

    return answer


def ask(engine: RolloutEngine, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
    """Call a method of every rank.

    Args:
        engine: an engine whose ranks' methods are `answering`.
        method: the extension's method.
        args: arguments that vLLM can send.
        timeout_s: how long to wait for all answers; None waits on this thread, for engines in this process.

    Returns:
        The results, in the order of ranks.

    Raises:
        RuntimeError: ranks failed; all are named with their reasons.
        TimeoutError: a rank did not answer in time.
    """

    def call() -> list[Any]:
        # vLLM's own timeout is not used: a late answer would stay in its queues for the next call to take.
        return engine.collective_rpc(method, args=args)

    return require_answers(method, within(timeout_s, f"the engine's ranks, asked for {method},", call, owner=engine))


def require_answers(method: str, answers: list[Any]) -> list[Any]:
    """Return the answers of all ranks.

    Raises:
        RuntimeError: ranks failed; all are named with their reasons.
    """
    ranks: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        if isinstance(answer, dict) and _FAILED in answer:
            ranks.setdefault(answer[_FAILED], []).append(rank)
    if ranks:
        reasons = [f"rank {', '.join(map(str, who))}: {reason}" for reason, who in ranks.items()]
        raise RuntimeError("\n  ".join([f"{method} failed in {sum(map(len, ranks.values()))} rank(s):", *reasons]))
    return answers
