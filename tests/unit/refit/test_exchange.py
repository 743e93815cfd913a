"""What a learner's ranks tell each other is plain data: bytes that arrive are read, never run."""

import multiprocessing
import pickle

import pytest
import torch
import torch.distributed as dist

from qarl_nemo.refit.exchange import broadcast_bytes, broadcast_plain, gather_plain, waiting_group

RANKS = 3
SAID = {"handle": b"\x00\xff", "sizes": [1, 2.5], "none": None}


class Harmful:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was run')",))


def rank(number, path, answers):
    store = dist.FileStore(str(path), RANKS)
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    group = waiting_group()
    found = {
        "same group": waiting_group() is group,
        "broadcast": broadcast_plain(SAID if number == 1 else None, group, source=1),
        "gathered": gather_plain({"rank": number, "filler": "x" * number}, group),
        "empty": broadcast_bytes(b"", group),
    }
    if number == 0:
        # What a stranger would send in its place.
        broadcast_bytes(pickle.dumps(Harmful()), group)
    else:
        try:
            broadcast_plain(None, group)
        except ValueError as error:
            found["refused"] = type(error).__name__
    answers.put((number, found))
    dist.barrier(group=group)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    context = multiprocessing.get_context("forkserver")
    answers, path = context.Queue(), tmp_path_factory.mktemp("store") / "store"
    processes = [context.Process(target=rank, args=(number, path, answers)) for number in range(RANKS)]
    for process in processes:
        process.start()
    results = dict(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * RANKS
    return results


def test_every_rank_reads_what_one_says(found):
    assert [found[number]["broadcast"] for number in range(RANKS)] == [SAID] * RANKS
    assert [found[number]["empty"] for number in range(RANKS)] == [b""] * RANKS


def test_every_rank_reads_what_all_say(found):
    wanted = [{"rank": number, "filler": "x" * number} for number in range(RANKS)]
    assert [found[number]["gathered"] for number in range(RANKS)] == [wanted] * RANKS


def test_the_group_to_wait_on_is_made_once(found):
    assert all(found[number]["same group"] for number in range(RANKS))


def test_a_pickle_that_arrives_is_refused_and_not_run(found):
    assert [found[number].get("refused") for number in range(1, RANKS)] == ["UnicodeDecodeError"] * (RANKS - 1)


def test_what_json_cannot_hold_is_named():
    with pytest.raises(TypeError, match="no plain data: tensor"):
        broadcast_plain(torch.ones(2), None)
