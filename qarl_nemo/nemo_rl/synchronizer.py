"""NeMo-RL's weight synchronizer, which its training loop calls before rollouts with new weights, for packed weights."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import ray
from nemo_rl.weight_sync.interfaces import WeightSynchronizer

from qarl_nemo.nemo_rl.engines import RayEngines
from qarl_nemo.refit.answers import require_answers
from qarl_nemo.refit.exchange import PATIENCE

_TIMED = "prepare_for_generation/transfer_and_update_weights"
_WAKE_FIX = (
    "Where it ran out of memory, lower policy.generation.vllm_cfg.gpu_memory_utilization or what stays of the learner "
    "on these GPUs"
)
_SLEEP_FIX = "It still holds its share of these GPUs, so the learner would run out of memory: start the run again"


class PackedWeightSynchronizer(WeightSynchronizer):
    """Makes every sync one refit of all engines, completely or not at all, with the next version number.

    Args:
        policy: NeMo-RL's policy with our workers.
        generation: NeMo-RL's `VllmGeneration` with our workers; from now on it is an error if colocated engines do not
            wake up or go to sleep, and those that forgot their weights in their sleep wake up with a refit.
    """

    def __init__(self, policy: Any, generation: Any) -> None:
        self._policy, self._generation = policy, generation
        self._colocated = generation.cfg["colocated"]["enabled"]
        if self._colocated:
            _raise_failures(generation)
            self._bring_what_was_forgotten(generation)
        group = generation.worker_group
        self._engines = [group.workers[index] for index in group.dp_leader_worker_indices]
        self._num_ranks = 0
        self.version = self._attempted = 0
        self.failure: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Rollout collectors get a copy of the engines' handle, but only the driver synchronizes weights.
        return {"version": self.version}

    @property
    def is_stale(self) -> bool:
        """Whether no refit has reached the engines yet."""
        return self.version == 0

    def init_communicator(self) -> None:
        """Number the engines' ranks; connections are made by the first refit that needs them."""
        self._num_ranks = RayEngines(self._engines).place()

    def sync_weights(self, *, timer: Any = None, kv_scales: dict[str, float] | None = None) -> dict[str, float]:
        """Make the engines serve the policy's weights.

        Args:
            timer: NeMo-RL's timer.
            kv_scales: scales of an FP8 cache, which packed refits do not carry.

        Returns:
            Seconds of each phase as `<phase>_s`, `num_bytes`, the shares of `FlippedCodes`, and the `version` served
            now. `wait_s` is how long rollouts wait once engines are awake, less than `total_s` where publishing began
            before. Colocated engines add what comes before (`make_room`, `wake_weights`) and after (`leave`,
            `wake_cache`).

        Raises:
            ValueError: `kv_scales` are given.
            RuntimeError: engines did not wake up, or weights hold NaN or Inf.
            ray.exceptions.ActorDiedError: an engine or a learner rank died; names it.
            ray.exceptions.RayTaskError: the refit was refused or broke off; gives the workers' reason.
            TimeoutError: a worker did not finish its part within an hour.
        """
        try:
            figures = self._sync(timer, kv_scales)
        except Exception as error:
            # Some of NeMo-RL's loops swallow the exception, so the launcher reads it here.
            self.failure = f"{type(error).__name__}: {error}"
            raise
        self.failure = None
        return figures

    def _sync(self, timer: Any, kv_scales: dict[str, float] | None) -> dict[str, float]:
        if kv_scales is not None:
            raise ValueError("packed refits carry no KV cache scales: set vllm_cfg.kv_cache_dtype=auto")
        seconds: dict[str, float] = {}
        # Engines accept each number once, and a refit that broke off may have reached some of them.
        self._attempted += 1
        weights = {"version": self._attempted, "step": self._policy.next_step}
        published: list[Any] = []
        if self._colocated:
            with _timed(seconds, "make_room"):
                self._policy.offload_before_refit()
            published = self._on_all_ranks("qarl_publish", **weights)
            with _timed(seconds, "wake_weights"):
                self._generation.prepare_for_generation(tags=["weights"])
        with timer.time(_TIMED) if timer is not None else nullcontext(), _timed(seconds, "wait"):
            _results(published)
            refit = self._on_all_ranks("qarl_refit", engines=self._engines, num_ranks=self._num_ranks, **weights)
            figures = _results(refit)
        self.version = self._attempted
        if self._colocated:
            with _timed(seconds, "leave"):
                self._policy.offload_after_refit()
            with _timed(seconds, "wake_cache"):
                self._generation.prepare_for_generation(tags=["kv_cache"])
        return figures[0] | seconds | {"version": float(self.version)}

    def _bring_what_was_forgotten(self, generation: Any) -> None:
        wake = generation.prepare_for_generation

        def wake_whole(*arguments: Any, **named: Any) -> bool:
            # NeMo-RL's loop wakes engines without a refit where they served these weights before they slept, as it does
            # in the step after a validation.
            if named.get("tags") or self.version == 0 or self._all_serve():
                return wake(*arguments, **named)
            self.sync_weights()
            return True

        generation.prepare_for_generation = wake_whole

    def _all_serve(self) -> bool:
        states = require_answers("qarl_version", RayEngines(self._engines).collective_rpc("qarl_version"))
        return all(state["whole"] for state in states)

    def _on_all_ranks(self, method: str, **arguments: Any) -> list[Any]:
        return self._policy.worker_group.run_all_workers_single_data(method, **arguments)

    def shutdown(self) -> None:
        """Do nothing: connections end with the workers."""


def _raise_failures(generation: Any) -> None:
    wake, sleep = generation.prepare_for_generation, generation.finish_generation

    def require(succeeded: bool, what: str, fix: str) -> bool:
        # NeMo-RL prints what went wrong and returns False, which its own loops ignore.
        if not succeeded:
            # An engine that died names itself; one that lives has answered already.
            _results([worker.__ray_ready__.remote() for worker in generation.worker_group.workers])
            raise RuntimeError(f"vLLM did not {what}: NeMo-RL printed why above. {fix}")
        return True

    def wake_or_raise(*arguments: Any, **named: Any) -> bool:
        parts = " and ".join(named.get("tags") or ("weights", "kv_cache"))
        return require(wake(*arguments, **named), f"wake up its {parts}", _WAKE_FIX)

    def sleep_or_raise(*arguments: Any, **named: Any) -> bool:
        return require(sleep(*arguments, **named), "go to sleep", _SLEEP_FIX)

    generation.prepare_for_generation, generation.finish_generation = wake_or_raise, sleep_or_raise


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[f"{phase}_s"] = time.perf_counter() - started


def _results(calls: list[Any]) -> list[Any]:
    # The others wait for a worker that died, so its error must be raised without waiting for them.
    waiting, deadline = calls, time.monotonic() + PATIENCE.total_seconds()
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise TimeoutError(
                f"{len(waiting)} of {len(calls)} policy workers have not ended the refit within {PATIENCE}"
            )
        ray.get(done)
    return [ray.get(call) for call in calls]
