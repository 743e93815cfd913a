"""All of NeMo-RL's vLLM engines as the one engine that `refit.push` knows; each engine is a Ray actor."""

from collections.abc import Sequence
from typing import Any

import ray

from qarl_nemo.refit.answers import require_answers


class RayEngines:
    """Several engines whose ranks are numbered through, in the order of the engines.

    Args:
        workers: handles of the actors that own an engine.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = list(workers)

    def place(self) -> int:
        """Number the ranks of all engines through; comes before the first refit.

        Returns:
            How many ranks there are.
        """
        first_rank = 0
        for worker in self.workers:
            ranks = ray.get(worker.qarl_rpc.remote("qarl_process"))
            require_answers("qarl_place", ray.get(worker.qarl_rpc.remote("qarl_place", (first_rank,))))
            first_rank += len(ranks)
        return first_rank

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of every rank of every engine.

        Args:
            method: of the ranks.
            timeout: seconds; None waits.
            args: positional arguments.

        Returns:
            The results, in the order of ranks.

        Raises:
            ray.exceptions.RayError: an engine failed or is gone.
        """
        shared = ray.put(args)
        calls = [worker.qarl_rpc.remote(method, shared) for worker in self.workers]
        return [result for results in ray.get(calls, timeout=timeout) for result in results]

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes in every engine; false while a request holds some."""
        return all(ray.get([worker.qarl_reset_prefix_cache.remote() for worker in self.workers]))

    @property
    def llm_engine(self) -> "RayEngines":
        """What `push` asks for unfinished requests."""
        return self

    def has_unfinished_requests(self) -> bool:
        """Say whether an engine is still answering."""
        return any(ray.get([worker.qarl_busy.remote() for worker in self.workers]))
