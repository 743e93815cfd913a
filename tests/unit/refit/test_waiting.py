"""Nobody waits longer than was said, and no answer is taken for another call's."""

import threading
import time

import pytest

from qarl_nemo.refit.waiting import within


class Engine:
    """Answers when it is let."""

    def __init__(self):
        self.free = threading.Event()
        self.made = []

    def call(self, number):
        self.made.append(number)
        self.free.wait(30)
        return number


def test_a_call_that_does_not_end_is_given_up_and_its_answer_dropped():
    engine = Engine()
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^rank 0 did not answer within 0.2 s$"):
        within(0.2, "rank 0", lambda: engine.call(1), owner=engine)
    with pytest.raises(TimeoutError, match=r"within 0.2 s: it has not ended an earlier call"):
        within(0.2, "rank 0", lambda: engine.call(2), owner=engine)
    assert time.monotonic() - started < 10
    engine.free.set()
    assert within(30, "rank 0", lambda: engine.call(3), owner=engine) == 3
    assert engine.made == [1, 3]


def test_errors_of_the_call_are_its_own():
    def late():
        raise TimeoutError("the call's own")

    with pytest.raises(TimeoutError, match="the call's own"):
        within(30, "rank 0", late, owner=Engine())


def test_a_call_that_leaves_its_thread_is_not_waited_for():
    def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        within(30, "rank 0", leave, owner=Engine())


def test_without_a_limit_the_call_stays_on_its_thread():
    assert within(None, "rank 0", threading.current_thread, owner=Engine()) is threading.current_thread()
    assert within(30, "rank 0", threading.current_thread, owner=Engine()) is not threading.current_thread()
