"""Ranks that are stopped or killed, as processes over gloo: the learner is told in time, and why."""

import socket
import time

import pytest
import torch
from rank_processes import RankProcesses

from qarl_kernels import get_format
from qarl_nemo.refit import send
from qarl_nemo.refit.answers import ask
from qarl_nemo.refit.collective import address_towards, listening_store
from qarl_nemo.refit.publish import RefitUpdate
from qarl_nemo.refit.push import push, serving_version
from qarl_nemo.refit.send import CollectiveSender, FileSender
from support.listening import listeners

CPU = torch.device("cpu")
TIMEOUT_S = 3.0
# Of a push: its longest wait, what ranks get to speak for themselves, the abort, and a busy machine.
PATIENCE_S = TIMEOUT_S + 5 + TIMEOUT_S + 10


def update_of(version):
    layers = [{f"model.layers.{layer}.norm.weight": torch.full((5,), float(version))} for layer in range(3)]
    return RefitUpdate.of(layers, get_format("bf16"), version=version)


class Sender(CollectiveSender):
    """Says whether it was released, and does something on its way."""

    def __init__(self, *, at=None, then=lambda: None):
        super().__init__(2, CPU, backend="gloo", timeout_s=TIMEOUT_S)
        self.released, self.num_layers = 0, 0
        self.at, self.then = at, then

    def _broadcast(self, version, layer, engine):
        if self.num_layers == self.at:
            self.then()
        self.num_layers += 1
        super()._broadcast(version, layer, engine)

    def release(self):
        self.released += 1
        super().release()


@pytest.fixture
def engine():
    with RankProcesses(2) as ranks:
        push(update_of(1), ranks, CollectiveSender(2, CPU, backend="gloo", timeout_s=60))
        yield ranks


def failed_push(engine, sender) -> BaseException:
    started = time.monotonic()
    with pytest.raises((RuntimeError, OSError, EOFError)) as raised:
        push(update_of(2), engine, sender)
    assert time.monotonic() - started < PATIENCE_S
    assert sender.released == 1
    return raised.value


def assert_heals(engine):
    assert serving_version(engine, timeout_s=60) == 1
    push(update_of(3), engine, CollectiveSender(2, CPU, backend="gloo", timeout_s=60))
    assert serving_version(engine, timeout_s=60) == 3


def test_a_stopped_rank_holds_the_learner_up_no_longer_than_was_said(engine):
    with engine.stopped(1):
        error = failed_push(engine, Sender())
        assert "the engine's ranks, asked for qarl_version, did not answer within 3 s" in str(error)
    assert_heals(engine)


def test_a_rank_that_stops_within_the_transfer_is_named_in_time(engine, monkeypatch):
    # No rank that still runs has anything to say here.
    monkeypatch.setattr(send, "_GRACE_S", 0.5)
    stopping = engine.stopped(0)
    sender = Sender(at=1, then=stopping.__enter__)
    error = failed_push(engine, sender)
    assert any("aborting failed, too: TimeoutError" in note for note in error.__notes__)
    stopping.__exit__(None, None, None)
    assert_heals(engine)


@pytest.mark.slow
def test_a_rank_that_is_stopped_before_it_connects_is_named_in_time(engine):
    sender, started = Sender(), time.monotonic()
    with engine.stopped(1), pytest.raises((RuntimeError, TimeoutError)):
        sender._connect(engine)
    assert time.monotonic() - started < PATIENCE_S
    assert_heals(engine)


def test_the_abort_of_a_dead_rank_does_not_hide_what_broke(engine, tmp_path):
    class Cut(FileSender):
        released = 0

        def send(self, update, engine):
            engine.kill(1)
            raise ConnectionError("cut")

        def release(self):
            self.released += 1
            raise OSError("the folder is gone")

    sender = Cut(tmp_path, timeout_s=TIMEOUT_S)
    error = failed_push(engine, sender)
    assert isinstance(error, ConnectionError)
    assert str(error) == "cut"
    abort, release = error.__notes__
    assert abort.startswith("aborting failed, too: ")
    assert release == "giving back what was sent failed, too: OSError: the folder is gone"


def test_a_rank_that_dies_within_the_transfer_ends_it(engine):
    error = failed_push(engine, Sender(at=1, then=lambda: engine.kill(1)))
    assert not isinstance(error, TimeoutError)


def test_what_was_sent_is_given_back_also_after_a_whole_refit(engine):
    sender = Sender()
    push(update_of(2), engine, sender)
    assert sender.released == 1
    assert ask(engine, "qarl_version", timeout_s=60) == [{"version": 2, "whole": True}] * 2


def test_a_learner_listens_on_its_hosts_address_alone(engine):
    before = listeners()
    sender = CollectiveSender(2, CPU, backend="gloo", timeout_s=60)
    push(update_of(2), engine, sender)
    opened = listeners() - before
    assert opened, "gloo and the store listen somewhere"
    # 127.0.0.1, as the kernel writes it; other addresses of this machine are not among them.
    assert {address for address, _ in opened} == {"0100007F"}
    for _, port in opened:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)


def test_a_store_listens_where_it_is_told():
    store = listening_store("127.0.0.2", 5)
    socket.create_connection(("127.0.0.2", store.port), timeout=5).close()
    for other in ("127.0.0.1", "127.0.0.3"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, store.port), timeout=5)
    with pytest.raises(ValueError, match=r"cannot listen on host '192\.0\.2\.77'"):
        listening_store("192.0.2.77", 5)


def test_a_rank_listens_on_the_address_that_faces_the_learner():
    assert address_towards("127.0.0.1", 29500) == "127.0.0.1"
    assert address_towards("127.0.0.2", 29500) in ("127.0.0.1", "127.0.0.2")
