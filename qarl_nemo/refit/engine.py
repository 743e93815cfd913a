"""The rollout engine as a refit sees it."""

from typing import Any, Protocol


class RolloutEngine(Protocol):
    """What a refit needs of an engine."""

    def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of every rank's worker and return the results, in the order of ranks."""

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; false while a request holds some."""

    def is_busy(self) -> bool:
        """Say whether a request is unfinished."""


class VllmEngine:
    """A `vllm.LLM` as a rollout engine; make one for each engine and keep it, as its calls take turns.

    Args:
        llm: an engine started with `worker_extension_cls="qarl_nemo.refit.load.PackedRefit"`.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of every rank's worker and return the results, in the order of ranks."""
        return self.llm.collective_rpc(method, args=args)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; false while a request holds some."""
        return self.llm.reset_prefix_cache()

    def is_busy(self) -> bool:
        """Say whether a request is unfinished."""
        return self.llm.llm_engine.has_unfinished_requests()
