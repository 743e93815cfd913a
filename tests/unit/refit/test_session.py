"""A rank serves an update only when all of its manifest arrived and was verified, whatever it is called with."""

import copy

import pytest
import torch
from receiving_rank import PlainSession

from qarl_nemo.refit.manifest import Manifest, version_problems
from qarl_nemo.refit.publish import RefitUpdate
from support.asserts import assert_bitwise_equal

NAMES = ("model.layers.0.mlp.experts.down_proj.weight_packed", "model.norm.weight", "lm_head.weight")
STRANGER = "model.stranger"


def update_of(version: int) -> RefitUpdate:
    generator = torch.Generator().manual_seed(version)
    tensors = {name: torch.rand(4, 6, generator=generator) for name in NAMES}
    return RefitUpdate(Manifest.of([tensors], version=version, fmt="bf16"), [tensors])


def begin(session, update, *, rehearsed=False):
    assert session.begin(update.manifest.to_message(), rehearsed) == []


def send(session, update):
    session.receive(update.manifest.version, "direct", dict(update.tensors))


def refit(session, update):
    begin(session, update)
    send(session, update)
    assert session.verify(update.manifest.version) == []
    session.replace(update.manifest.version)
    assert_serves(session, update)


def assert_serves(session, update):
    assert session.state() == {"version": update.manifest.version, "whole": True}
    for name, tensor in update.tensors.items():
        assert_bitwise_equal(session.served[name], tensor)


@pytest.fixture
def session():
    """A rank that serves version 1; whatever a test does to it, the next whole update is served."""
    session = PlainSession()
    refit(session, update_of(1))
    yield session
    refit(session, update_of(9))


WHOLE = update_of(2).tensors
ARRIVED = {
    "nothing": ([], rf"version 2 is not served; 3 problem(.|\n)*missing: {NAMES[0]}"),
    "a part": ([{name: WHOLE[name] for name in NAMES[1:]}], rf"1 problem\(s\):\n  missing: {NAMES[0]}$"),
    "other bytes": ([WHOLE | {NAMES[1]: WHOLE[NAMES[1]] + 1}], f"{NAMES[1]}: its bytes differ"),
    "a stranger": ([WHOLE, {STRANGER: torch.ones(3)}], f"not in the manifest: {STRANGER}"),
}


@pytest.mark.parametrize(("arrived", "said"), ARRIVED.values(), ids=ARRIVED)
def test_only_what_was_announced_is_served_also_where_nobody_verifies(session, arrived, said):
    begin(session, update_of(2))
    for tensors in arrived:
        session.receive(2, "direct", tensors)
    with pytest.raises(ValueError, match=said):
        session.replace(2)
    assert_serves(session, update_of(1))


def test_nothing_is_served_that_changed_after_it_was_verified(session):
    update = update_of(2)
    begin(session, update)
    send(session, update)
    assert session.verify(2) == []
    session.receive(2, "direct", {NAMES[2]: update.tensors[NAMES[2]] + 1})
    with pytest.raises(ValueError, match=f"sent twice: {NAMES[2]}"):
        session.replace(2)
    assert_serves(session, update_of(1))


def test_what_was_found_once_is_said_once(session):
    begin(session, update_of(2))
    session.receive(2, "direct", WHOLE | {NAMES[1]: WHOLE[NAMES[1]] + 1})
    said = [f"{NAMES[1]}: its bytes differ from the manifest's checksum"]
    assert session.verify(2) == session.verify(2) == said


def test_a_rank_that_no_update_was_announced_to_takes_none(session):
    update = update_of(2)
    for call in (lambda: send(session, update), lambda: session.verify(2), lambda: session.replace(2)):
        with pytest.raises(RuntimeError, match="no refit is under way in this rank: qarl_begin comes first"):
            call()
    assert_serves(session, update_of(1))


@pytest.mark.parametrize("rehearsed", [False, True])
def test_an_update_is_served_once(session, rehearsed):
    if rehearsed:
        rehearse(session, update_of(2))
        session.replace(2)
        send(session, update_of(2))
        session.finish(2)
    else:
        refit(session, update_of(2))
    with pytest.raises(RuntimeError, match="no refit is under way"):
        session.replace(2)
    assert_serves(session, update_of(2))


def test_calls_of_an_update_that_another_one_followed_are_refused(session):
    begin(session, update_of(2))
    begin(session, update_of(3))
    late = (lambda: send(session, update_of(2)), lambda: session.verify(2), lambda: session.replace(2))
    for call in (*late, lambda: session.finish(2)):
        with pytest.raises(RuntimeError, match="this is of version 2; the refit under way in this rank is to 3"):
            call()
    session.abort(2)
    send(session, update_of(3))
    session.replace(3)
    assert_serves(session, update_of(3))


def test_an_aborted_update_is_forgotten(session):
    begin(session, update_of(2))
    send(session, update_of(2))
    session.abort(2)
    with pytest.raises(RuntimeError, match="no refit is under way"):
        session.replace(2)


@pytest.mark.parametrize("version", [1, 0, "x", "2", None, 2.0, True, -1])
def test_versions_are_whole_numbers_that_grow(session, version):
    message = update_of(2).manifest.to_message() | {"version": version}
    (problem,) = session.begin(message, False)
    assert problem == version_problems(version, 1)[0]
    assert repr(version) in problem
    with pytest.raises(RuntimeError, match="no refit is under way"):
        session.replace(version)
    assert_serves(session, update_of(1))


def test_a_fresh_rank_begins_with_any_version():
    for version in (0, 7):
        refit(PlainSession(), update_of(version))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["records"], [], "records are named"),
        (["format"], 4, "format is a name"),
        (["published"], 8, "published format is a name or null"),
        (["published"], "w6a16", "nested_in"),
        (["grid_bits"], None, "grid_bits a number"),
        (["records", NAMES[1]], None, NAMES[1]),
        (["records", NAMES[1], 0], 4, NAMES[1]),
        (["records", NAMES[1], 0, 0], -4, NAMES[1]),
        (["records", NAMES[1], 1], "load", NAMES[1]),
        (["records", NAMES[1], 2], "7", NAMES[1]),
    ],
)
def test_what_is_no_manifest_is_refused_by_name(session, path, value, said):
    message = copy.deepcopy(update_of(2).manifest.to_message())
    place = message
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=said):
        session.begin(message, False)
    with pytest.raises(ValueError, match="a manifest holds format, grid_bits, published, records, version"):
        session.begin({key: value for key, value in message.items() if key != path[0]}, False)
    assert_serves(session, update_of(1))


def test_a_rank_that_broke_off_answers_nobody_until_a_whole_refit(session, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(session, "install", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            refit(session, update_of(2))
    assert session.state() == {"version": 1, "whole": False}
    assert session.begin(update_of(1).manifest.to_message(), False) == version_problems(1, 1)
    refit(session, update_of(2))


def rehearse(session, update):
    begin(session, update, rehearsed=True)
    send(session, update)
    assert session.verify(update.manifest.version) == []


def test_a_rehearsed_update_is_served_when_it_has_come_again(session):
    rehearse(session, update_of(2))
    session.replace(2)
    assert not session.state()["whole"]
    send(session, update_of(2))
    session.finish(2)
    assert_serves(session, update_of(2))


def test_a_rehearsed_update_is_installed_one_message_at_a_time(session, monkeypatch):
    update, installed, install = update_of(2), [], session.install
    monkeypatch.setattr(session, "install", lambda layers: (installed.append(layers.copy()), install(layers)))
    begin(session, update, rehearsed=True)
    for again in (False, True):
        for name in NAMES:
            session.receive(2, "direct", {name: update.tensors[name]})
        session.finish(2) if again else session.replace(2)
    assert [list(parts) for layers in installed for parts in layers.values()] == [[name] for name in NAMES]


def test_what_was_wrong_with_one_message_is_not_forgotten_with_the_next(session):
    begin(session, update_of(2), rehearsed=True)
    session.receive(2, "direct", {STRANGER: torch.ones(3)})
    send(session, update_of(2))
    assert session.verify(2) == [f"not in the manifest: {STRANGER}"]


def test_an_announcement_that_is_none_ends_the_update_before_it(session):
    begin(session, update_of(2))
    with pytest.raises(ValueError, match="a manifest holds"):
        session.begin({}, False)
    with pytest.raises(RuntimeError, match="no refit is under way"):
        send(session, update_of(2))


def test_a_rehearsal_alone_is_served_by_nobody(session):
    rehearse(session, update_of(2))
    with pytest.raises(RuntimeError, match="version 2 is not being replaced: qarl_replace comes first"):
        session.finish(2)
    assert_serves(session, update_of(1))


def test_a_rehearsed_update_is_replaced_once(session):
    rehearse(session, update_of(2))
    session.replace(2)
    with pytest.raises(RuntimeError, match="version 2 is being replaced already"):
        session.replace(2)
    with pytest.raises(ValueError, match=r"not what was rehearsed; 3 problem\(s\)"):
        session.finish(2)
    assert not session.state()["whole"]
    send(session, update_of(2))
    session.finish(2)
    assert_serves(session, update_of(2))


def test_a_rehearsal_within_the_replacing_is_not_taken_for_it(session):
    rehearse(session, update_of(2))
    session.replace(2)
    session.receive(2, "direct", {NAMES[0]: update_of(2).tensors[NAMES[0]]})
    rehearse(session, update_of(2))
    with pytest.raises(RuntimeError, match="version 2 is not being replaced"):
        session.finish(2)
    assert not session.state()["whole"]


class WholeSession(PlainSession):
    """Installs all tensors at once, as vLLM does a layer's."""

    def pieces(self, layers):
        return [f"comes in pieces, without {name}" for name in NAMES if name not in layers]


def send_apart(session, update):
    for name in NAMES:
        session.receive(1, "direct", {name: update.tensors[name]})
    session.replace(1)


@pytest.mark.parametrize("again", [False, True], ids=["rehearsed", "served"])
def test_a_piece_of_what_is_installed_at_once_is_not_served(again):
    session, update = WholeSession(), update_of(1)
    begin(session, update, rehearsed=True)
    if again:
        send(session, update)
        session.replace(1)
    with pytest.raises(ValueError, match=f"comes in pieces, without {NAMES[1]}"):
        send_apart(session, update)
    assert session.served == {}
