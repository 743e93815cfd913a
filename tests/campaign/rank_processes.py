"""An engine of several processes, each with the receiving half of one rank, which can be stopped and killed."""

import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Self

from receiving_rank import ReceivingRank

_CONTEXT = multiprocessing.get_context("forkserver")


def _rank(number: int, calls: Connection) -> None:
    # A rank logs what it refuses, which here is nearly everything.
    logging.disable(logging.ERROR)
    rank = ReceivingRank(number)
    while True:
        call, method, args = calls.recv()
        calls.send((call, getattr(rank, method)(*args)))


class RankProcesses:
    """What `push` calls an engine; waits for its ranks as long as they take, as vLLM does.

    Args:
        num_ranks: how many.
    """

    def __init__(self, num_ranks: int) -> None:
        # Torch is imported once, by the process that the ranks are forked from.
        _CONTEXT.set_forkserver_preload(["qarl_nemo.refit.session"])
        self._calls = 0
        self._pipes, self._processes = [], []
        for number in range(num_ranks):
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_rank, args=(number, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        # Wait until all have started.
        self.collective_rpc("qarl_process")

    def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of every rank and return the answers, in the order of ranks."""
        self._calls += 1
        for pipe in self._pipes:
            pipe.send((self._calls, method, args))
        return [self._answer(pipe) for pipe in self._pipes]

    def _answer(self, pipe: Connection) -> Any:
        while True:
            call, answer = pipe.recv()
            if call == self._calls:
                return answer

    def reset_prefix_cache(self) -> bool:
        """Forget nothing: there is no cache."""
        return True

    def is_busy(self) -> bool:
        """Answer no requests."""
        return False

    @contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        """Stop a rank's process, which then holds its connections and answers nothing."""
        pid = self._processes[rank].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def kill(self, rank: int) -> None:
        """Kill a rank's process."""
        self._processes[rank].kill()
        self._processes[rank].join()

    def forget_dead(self) -> None:
        """Call only the ranks that are left."""
        alive = [process.is_alive() for process in self._processes]
        self._pipes = [pipe for pipe, lives in zip(self._pipes, alive, strict=True) if lives]

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
            process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
