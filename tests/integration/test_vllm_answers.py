"""Why a rank answers with its failure: vLLM's own executor hands what raising ranks leave behind to the next call."""

import queue
from collections import deque

import pytest

pytest.importorskip("vllm")

# isort: split
import qarl_nemo.train  # noqa: F401 hides what CPU vLLM brings broken

# isort: split
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from qarl_nemo.refit.answers import answering, ask


class Raising:
    """A rank of an engine, without the engine."""

    def qarl_receive(self, kind):
        """Take what nobody can take."""
        raise ValueError(f"unknown transport {kind!r}")

    def qarl_version(self):
        """Return the version served."""
        return 7


@answering
class Answering(Raising):
    """The same, with its failures as answers."""

    def qarl_receive(self, kind):
        """Take what nobody can take."""
        return super().qarl_receive(kind)


class Mailbox(queue.Queue):
    """What vLLM's shared-memory queue does, within this process."""

    def dequeue(self, timeout=None):
        """Return the oldest message."""
        return self.get(timeout=timeout or 1)


class Calls:
    """Runs a call on every rank, as vLLM's worker processes do."""

    def __init__(self, ranks, mailboxes):
        self.ranks, self.mailboxes = ranks, mailboxes

    def enqueue(self, call):
        """Answer a call."""
        method, args, kwargs, _ = call
        for rank, mailbox in zip(self.ranks, self.mailboxes, strict=True):
            try:
                mailbox.put((WorkerProc.ResponseStatus.SUCCESS, getattr(rank, method)(*args, **kwargs)))
            except ValueError as error:
                mailbox.put((WorkerProc.ResponseStatus.FAILURE, str(error)))


def engine(rank_type):
    """vLLM's executor over ranks of this process."""
    executor = object.__new__(MultiprocExecutor)
    executor.response_mqs = [Mailbox(), Mailbox()]
    executor.rpc_broadcast_mq = Calls([rank_type(), rank_type()], executor.response_mqs)
    executor.is_failed, executor.futures_queue = False, deque()
    # What its destructor would end.
    executor.shutdown = lambda: None
    return executor


def test_a_call_after_a_failed_one_gets_its_own_answers():
    ranks = engine(Answering)
    with pytest.raises(RuntimeError, match=r"2 rank\(s\):\n  rank 0, 1: ValueError: unknown transport 'pigeon'"):
        ask(ranks, "qarl_receive", "pigeon")
    for _ in range(2):
        assert ask(ranks, "qarl_version") == [7, 7]


def test_ranks_that_raise_leave_answers_behind():
    ranks = engine(Raising)
    with pytest.raises(RuntimeError, match="pigeon"):
        ask(ranks, "qarl_receive", "pigeon")
    with pytest.raises(RuntimeError, match="pigeon"):
        ask(ranks, "qarl_version")
