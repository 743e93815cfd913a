"""SIGTERM as a request to end: the first is one, a later one is what it was, and processes share it through a file."""

import os
import signal
import threading

import pytest

from qarl_nemo.train import stop_request
from qarl_nemo.train.stop_request import StopRequest


@pytest.fixture
def ends():
    """What a SIGTERM did before, here without an end of the test run."""
    taken = []
    before = signal.signal(signal.SIGTERM, lambda number, _: taken.append(number))
    yield taken
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_is_a_request_and_a_later_one_ends(ends, monkeypatch, capfd):
    now = [10.0]
    monkeypatch.setattr(stop_request.time, "monotonic", lambda: now[0])
    with StopRequest() as request:
        assert not request.made
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.made
        now[0] += 4.9
        # From whoever started this process, the same once more.
        os.kill(os.getpid(), signal.SIGTERM)
        assert not ends
        now[0] += 0.1
        os.kill(os.getpid(), signal.SIGTERM)
    assert ends == [signal.SIGTERM]
    assert capfd.readouterr().err.count("told to end (SIGTERM): ends after this step") == 1


def test_afterwards_a_signal_does_what_it_did_before(ends):
    handler = signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) != handler
    assert signal.getsignal(signal.SIGTERM) == handler


def test_processes_tell_each_other_through_a_file(ends, tmp_path):
    file = tmp_path / "stop"
    with StopRequest(file) as told:
        other, apart = StopRequest(file), StopRequest()
        assert not other.made
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.made
        assert other.made
        assert not apart.made


def test_a_thread_takes_no_signals_and_learns_of_the_file(tmp_path):
    before, made = signal.getsignal(signal.SIGTERM), []

    def run():
        with StopRequest(tmp_path / "stop") as request:
            made.append(request.made)
            (tmp_path / "stop").touch()
            made.append(request.made)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert made == [False, True]
    assert signal.getsignal(signal.SIGTERM) == before
