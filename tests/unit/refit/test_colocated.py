"""A refit from all ranks of a learner tells every rank why it failed, and gives back what was sent."""

import pytest
import torch
from rank_processes import RankProcesses

from qarl_kernels import get_format
from qarl_nemo.refit import colocated
from qarl_nemo.refit.colocated import push_from_all
from qarl_nemo.refit.manifest import Manifest
from qarl_nemo.refit.publish import RefitUpdate, StreamedUpdate
from qarl_nemo.refit.push import serving_version
from qarl_nemo.refit.send import FileSender

TENSORS = {"model.norm.weight": torch.ones(5)}


@pytest.fixture
def engine():
    with RankProcesses(2) as ranks:
        yield ranks


class Sender(FileSender):
    """Says how often it was released."""

    released, kills = 0, None

    def send(self, update, engine):
        if self.kills is not None:
            engine.kill(self.kills)
        super().send(update, engine)

    def release(self):
        self.released += 1


def test_a_whole_refit_is_reported_and_given_back(learner, engine, tmp_path):
    sender = Sender(tmp_path, timeout_s=60)
    update = RefitUpdate(Manifest.of([TENSORS], version=1, fmt="bf16"), [TENSORS])
    assert push_from_all(update, engine, sender)["num_bytes"] == 20
    assert sender.released >= 1
    assert serving_version(engine, timeout_s=60) == 1


def test_a_dead_rank_is_the_reason_and_what_came_of_it_stands_behind(learner, engine, tmp_path):
    sender = Sender(tmp_path, timeout_s=60)
    sender.kills = 1
    update = RefitUpdate(Manifest.of([TENSORS], version=1, fmt="bf16"), [TENSORS])
    with pytest.raises(
        RuntimeError, match=r"^(EOFError|BrokenPipeError|ConnectionResetError)(.|\n)*aborting failed, too"
    ):
        push_from_all(update, engine, sender)
    assert sender.released >= 1


def test_a_learner_that_cannot_go_on_does_not_hide_the_reason(learner, engine, tmp_path):
    class Cut(Sender):
        def send(self, update, engine):
            raise ConnectionError("cut")

    passes = []

    def stream():
        passes.append(None)
        if len(passes) > 1:
            raise OSError("another rank of the learner is gone")
        yield TENSORS

    sender = Cut(tmp_path, timeout_s=60)
    with pytest.raises(RuntimeError, match=r"^ConnectionError: cut$") as raised:
        push_from_all(StreamedUpdate(stream, get_format("bf16"), version=1), engine, sender)
    assert str(raised.value.__cause__) == "another rank of the learner is gone"
    assert sender.released >= 1


def test_a_rank_that_cannot_make_a_layer_asks_nothing_more_of_the_others(learner, engine, tmp_path, monkeypatch):
    """They wait in the middle of that pass, for longer than anybody would, unless this rank's failure ends the run."""
    passes = []

    def stream():
        passes.append(None)
        yield TENSORS
        if len(passes) == 2:
            raise torch.OutOfMemoryError("no room for the next layer")

    update = StreamedUpdate(stream, get_format("bf16"), version=1, rehearsed=True)
    monkeypatch.setattr(colocated, "broadcast_plain", lambda *_: pytest.fail("nobody listens"))
    sender = Sender(tmp_path, timeout_s=60)
    with pytest.raises(RuntimeError, match=r"^OutOfMemoryError: no room for the next layer"):
        push_from_all(update, engine, sender)
    assert len(passes) == 2
    assert sender.released >= 1


def test_a_stopped_engine_ends_the_refit_in_time(learner, engine, tmp_path):
    sender = Sender(tmp_path, timeout_s=2.0)
    update = RefitUpdate(Manifest.of([TENSORS], version=1, fmt="bf16"), [TENSORS])
    with engine.stopped(0), pytest.raises(RuntimeError, match=r"TimeoutError: .* did not answer within 2 s"):
        push_from_all(update, engine, sender)
    push_from_all(update, engine, Sender(tmp_path, timeout_s=60))
    assert serving_version(engine, timeout_s=60) == 1
