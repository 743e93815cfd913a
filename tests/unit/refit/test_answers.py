"""A rank that fails answers, so that no answer of another rank is left for the next call."""

import pytest

from qarl_nemo.refit.answers import answering, ask


@answering
class Rank:
    def __init__(self, number):
        self.number = number

    def qarl_half(self, of):
        """Return a half, in ranks above 0."""
        return of // self.number

    def other(self):
        raise ValueError("vLLM's own business")


class Ranks:
    """An engine that gives the answers of all its ranks, as vLLM does where none raises."""

    def __init__(self, count):
        self.ranks = [Rank(number) for number in range(count)]

    def collective_rpc(self, method, *, args=()):
        return [getattr(rank, method)(*args) for rank in self.ranks]


def test_answers_come_in_the_order_of_ranks():
    engine = Ranks(3)
    del engine.ranks[0]
    assert ask(engine, "qarl_half", 8) == [8, 4]


def test_ranks_that_failed_are_named_with_their_reasons(caplog):
    with pytest.raises(RuntimeError, match=r"qarl_half failed in 1 rank\(s\):\n  rank 0: ZeroDivisionError: ") as error:
        ask(Ranks(3), "qarl_half", 8)
    assert "rank 1" not in str(error.value)
    assert "ZeroDivisionError" in caplog.text, "the rank's log has the whole traceback"


def test_one_reason_of_several_ranks_is_said_once():
    with pytest.raises(RuntimeError, match=r"2 rank\(s\):\n  rank 0, 1: TypeError: .*$"):
        ask(Ranks(2), "qarl_half", "eight")


def test_methods_keep_their_names_and_others_raise():
    assert Rank.qarl_half.__name__ == "qarl_half"
    assert Rank.qarl_half.__doc__ == "Return a half, in ranks above 0."
    with pytest.raises(ValueError, match="own business"):
        Rank(1).other()
