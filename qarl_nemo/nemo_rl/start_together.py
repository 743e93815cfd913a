"""Starts a learner's processes while the engines that share its GPUs start.

A learner rank spends most of its start on importing packages, and touches no GPU meanwhile. NeMo-RL asks for the
learner once engines sleep. Here engines start in a thread, so that it asks at once, and ranks that have imported
everything wait for the engines to sleep, because an engine wants a GPU for itself while it starts.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import ray

GATE = "QARL_ENGINES_ASLEEP"
"""The environment variable that names the actor at which learner ranks wait; without it none waits."""


class Gate:
    """An actor at which processes wait until it is opened."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()

    async def open(self) -> None:
        """Let all pass, from now on."""
        self._opened.set()

    async def passed(self) -> None:
        """Return once it is open."""
        await self._opened.wait()


def wait_for_engines() -> None:
    """Wait, in a learner rank that has touched no GPU yet, until the engines that start beside it sleep."""
    if name := os.environ.get(GATE):
        ray.get(ray.get_actor(name).passed.remote())


class StartTogether:
    """Starts engines in a thread, and the learner beside them."""

    def __init__(self) -> None:
        self._engines: Future[None] | None = None
        self._gate: Any = None

    @contextmanager
    def engines(self, module: Any) -> Iterator[None]:
        """Have NeMo-RL's `setup` start colocated engines in a thread, until the `with` block ends.

        Args:
            module: the one of `setup`, in which it finds the class `VllmGeneration`.
        """
        own = module.VllmGeneration
        module.VllmGeneration = self._in_thread(own)
        try:
            yield
        finally:
            module.VllmGeneration = own

    def learner(self, make: Callable[[], Any]) -> Any:
        """Make the learner, whose ranks wait for the engines, and return it once they sleep.

        Args:
            make: makes it, without waiting for its ranks.

        Raises:
            Exception: what ended the engines' start.
        """
        made = make()
        if self._engines is not None:
            self._engines.result()
            ray.get(self._gate.open.remote())
        return made

    def _in_thread(self, own: Any) -> Any:
        together = self

        class Engines(own):
            def __init__(self, cluster: Any, config: Any, **named: Any) -> None:
                if named.get("defer_model_load"):
                    # NeMo-Gym is started beside these, and loads them itself.
                    super().__init__(cluster, config, **named)
                    return
                # Engines and learner both ask for the cluster's placement groups, and whoever comes first makes them.
                self.init_cluster_placement_groups(cluster, config)
                begin = super().__init__, super().finish_generation
                together._start(lambda: _start_and_sleep(*begin, cluster=cluster, config=config, **named))

            def finish_generation(self, *arguments: Any, **named: Any) -> bool:
                # NeMo-RL asks for it as soon as they are made; those that still start fall asleep when they have.
                if together._engines is not None and not together._engines.done():
                    return True
                return super().finish_generation(*arguments, **named)

        return Engines

    def _start(self, start: Callable[[], None]) -> None:
        name = f"{GATE}_{uuid4().hex}"
        self._gate = ray.remote(Gate).options(name=name, num_cpus=0).remote()
        # NeMo-RL hands its own environment on to workers.
        os.environ[GATE] = name
        engines: Future[None] = Future()

        def run() -> None:
            try:
                engines.set_result(start())
            except BaseException as error:  # noqa: BLE001 - raised where the engines are waited for
                engines.set_exception(error)

        self._engines = engines
        # Not a pool's thread, for which a program that fails would wait.
        threading.Thread(target=run, daemon=True).start()


def _start_and_sleep(start: Callable[..., None], sleep: Callable[[], bool], **named: Any) -> None:
    start(**named)
    if not sleep():
        raise RuntimeError("engines have started and did not fall asleep, so that the learner cannot have their GPUs")
