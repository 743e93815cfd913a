"""A killed evaluation leaves no engine behind."""

import multiprocessing
import time
from multiprocessing.connection import Connection

import pytest

from qarl_nemo.measure.eval.orphan import end_with_parent

CONTEXT = multiprocessing.get_context("spawn")


def _engine(connection: Connection) -> None:
    end_with_parent()
    connection.send("computing")
    time.sleep(600)


def _evaluation(connection: Connection) -> None:
    CONTEXT.Process(target=_engine, args=(connection,)).start()
    connection.close()
    time.sleep(600)


def test_an_engine_ends_with_the_process_that_asks_it():
    ours, theirs = CONTEXT.Pipe()
    evaluation = CONTEXT.Process(target=_evaluation, args=(theirs,))
    evaluation.start()
    theirs.close()
    assert ours.recv() == "computing"
    assert not ours.poll(0.2)
    evaluation.kill()
    # Only the engine still holds the other end.
    assert ours.poll(30)
    with pytest.raises(EOFError):
        ours.recv()
