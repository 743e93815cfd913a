"""A push serves an update or says why not: in this order, on an idle engine, with nothing left of what failed."""

import pytest
import torch
from receiving_rank import ReceivingRank

from qarl_kernels import get_format
from qarl_nemo.refit.manifest import Manifest
from qarl_nemo.refit.publish import RefitUpdate, StreamedUpdate
from qarl_nemo.refit.push import push, serving_version
from qarl_nemo.refit.send import FileSender


class Engine:
    """Ranks of this process, which is busy or keeps prefixes if it is told so."""

    def __init__(self, num_ranks):
        self.ranks = [ReceivingRank(number) for number in range(num_ranks)]
        self.busy = self.holds_blocks = False
        self.calls = []

    def collective_rpc(self, method, *, args=()):
        self.calls.append(method)
        return [getattr(rank, method)(*args) for rank in self.ranks]

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        return not self.holds_blocks

    def is_busy(self):
        return self.busy


class Sender(FileSender):
    """Counts how often it was released."""

    released = 0

    def release(self):
        self.released += 1


@pytest.fixture
def sender(tmp_path):
    return Sender(tmp_path, timeout_s=60)


@pytest.fixture
def engine(sender):
    """An engine that serves version 1."""
    engine = Engine(3)
    push(update_of(1), engine, sender)
    engine.calls.clear()
    sender.released = 0
    return engine


def update_of(version):
    tensors = {"model.norm.weight": torch.full((5,), float(version)), "lm_head.weight": torch.ones(2, 3)}
    return RefitUpdate(Manifest.of([tensors], version=version, fmt="bf16"), [tensors])


def served(engine):
    return {float(rank.session.served["model.norm.weight"][0]) for rank in engine.ranks}


def test_an_update_is_served_by_every_rank_in_this_order(engine, sender):
    report = push(update_of(2), engine, sender)
    steps = ["announce", "transfer", "verify", "replace"]
    assert (report.version, report.num_bytes, list(report.seconds)) == (2, 44, steps)
    calls = ["qarl_version", "qarl_begin", "qarl_receive", "qarl_verify", "reset_prefix_cache", "qarl_replace"]
    assert engine.calls == calls
    assert (served(engine), serving_version(engine), sender.released) == ({2.0}, 2, 1)


def test_a_rehearsed_update_is_sent_again_and_served_when_it_has_come(engine, sender):
    tensors = dict(update_of(2).tensors)
    update = StreamedUpdate(lambda: iter([tensors]), get_format("bf16"), version=2, rehearsed=True)
    with update:
        push(update, engine, sender)
    assert engine.calls[-4:] == ["reset_prefix_cache", "qarl_replace", "qarl_receive", "qarl_replaced"]
    assert (served(engine), serving_version(engine)) == ({2.0}, 2)


@pytest.mark.parametrize(
    ("state", "said"), [("busy", "requests are unfinished"), ("holds_blocks", "a request holds cache blocks")]
)
def test_an_engine_that_answers_requests_is_not_refitted(engine, sender, state, said):
    setattr(engine, state, True)
    with pytest.raises(ValueError, match=f"refit refused, {said}"):
        push(update_of(2), engine, sender)
    assert (served(engine), serving_version(engine), sender.released) == ({1.0}, 1, 1)
    # Nothing of it is left.
    with pytest.raises(RuntimeError, match="no refit is under way"):
        engine.ranks[0].session.verify(2)
    setattr(engine, state, False)
    push(update_of(2), engine, sender)
    assert served(engine) == {2.0}


def test_what_differs_from_its_manifest_is_refused_before_it_is_announced(engine, sender):
    update = update_of(2)
    update.layers[0]["lm_head.weight"] = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"refit to version 2 refused, .* keeps serving version 1(.|\n)*lm_head"):
        push(update, engine, sender)
    assert "qarl_begin" not in engine.calls


def test_what_arrives_with_other_bytes_is_refused_before_any_rank_replaces(engine, sender):
    update = update_of(2)
    update.layers[0]["lm_head.weight"][0, 0] = 7
    with pytest.raises(ValueError, match=r"version 2 refused(.|\n)*lm_head.weight: its bytes differ"):
        push(update, engine, sender)
    assert "qarl_replace" not in engine.calls
    assert (served(engine), serving_version(engine)) == ({1.0}, 1)


def test_what_fails_after_the_reason_is_a_note_on_it(engine, sender):
    engine.busy = True
    sender.release = lambda: 1 / 0
    with pytest.raises(ValueError, match="requests are unfinished") as raised:
        push(update_of(2), engine, sender)
    assert raised.value.__notes__ == ["giving back what was sent failed, too: ZeroDivisionError: division by zero"]


def test_a_problem_of_some_ranks_names_them_and_one_of_all_does_not(engine, sender):
    first, *others = [rank.session for rank in engine.ranks]
    for session in others:
        session.refusals = lambda *_, **__: ["has no such layer"]
    with pytest.raises(ValueError, match=r"has no such layer \(ranks \[1, 2\]\)$"):
        push(update_of(2), engine, sender)
    first.refusals = others[0].refusals
    with pytest.raises(ValueError, match=r"has no such layer$"):
        push(update_of(2), engine, sender)
    assert served(engine) == {1.0}


def test_ranks_that_do_not_serve_one_whole_version_serve_none(engine):
    engine.ranks[1].session.version = 2
    with pytest.raises(RuntimeError, match=r"version 1, rank 1: version 2, rank 2: version 1\); push a whole update"):
        serving_version(engine)
    for rank in engine.ranks:
        rank.session.version = 1
        rank.session.whole = False
    with pytest.raises(RuntimeError, match=r"\(nothing \(an earlier refit broke off\)\)"):
        serving_version(engine)
    assert serving_version(Engine(2)) is None
