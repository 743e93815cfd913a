"""All of NeMo-RL's vLLM engines, each a Ray actor, as the one engine that `refit.push` knows."""

from collections.abc import Sequence
from typing import Any

import ray

from qarl_nemo.refit.answers import require_answers

# How long an engine's answer may take; the first refit may wait for engines that compile kernels.
TIMEOUT_S = 600.0


class RayEngines:
    """Several engines whose ranks are numbered consecutively, in the order of the engines.

    Args:
        workers: handles of the actors that own an engine.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = list(workers)

    def place(self) -> int:
        """Number the ranks of all engines consecutively, and count them; must be called before the first refit."""
        first_rank = 0
        for worker in self.workers:
            ranks = ray.get(worker.qarl_rpc.remote("qarl_process"), timeout=TIMEOUT_S)
            placed = ray.get(worker.qarl_rpc.remote("qarl_place", (first_rank,)), timeout=TIMEOUT_S)
            require_answers("qarl_place", placed)
            first_rank += len(ranks)
        return first_rank

    def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of every rank of every engine.

        Args:
            method: the ranks' method.
            args: positional arguments.

        Returns:
            The results, in the order of ranks.

        Raises:
            ray.exceptions.RayError: an engine failed, is gone, or has not answered in time.
        """
        shared = ray.put(args)
        calls = [worker.qarl_rpc.remote(method, shared) for worker in self.workers]
        return [result for results in ray.get(calls, timeout=TIMEOUT_S) for result in results]

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes in every engine; false while a request holds some."""
        calls = [worker.qarl_reset_prefix_cache.remote() for worker in self.workers]
        return all(ray.get(calls, timeout=TIMEOUT_S))

    def is_busy(self) -> bool:
        """Say whether an engine is still answering."""
        return any(ray.get([worker.qarl_busy.remote() for worker in self.workers], timeout=TIMEOUT_S))
