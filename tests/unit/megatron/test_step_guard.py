"""A gradient that is not finite on one rank is a step less on all of them, named, and too many end the run."""

import json
import math

import pytest

pytest.importorskip("megatron", reason="needs megatron-core")

from qarl_nemo.losses.nonfinite import NonFinite, cause_of
from support.programs import run_program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guard")
    printed = run_program("megatron.run_step_guard", folder)
    return printed, [json.loads((folder / f"facts{rank}.json").read_text()) for rank in (0, 1)]


def test_megatron_alone_ends_the_run_where_the_guard_skips_the_step(ran):
    _, (clean, broken) = ran
    assert broken["without"] == "RuntimeError"
    assert clean["steps"] == broken["steps"] == [True, False, True, False, False]
    assert clean["in_a_row"] == broken["in_a_row"] == [0, 1, 0, 1, 2]
    assert clean["num_skipped"] == broken["num_skipped"] == 4


def test_gradients_are_prepared_once_a_step_and_clipped_by_their_norm(ran):
    for facts in ran[1]:
        assert facts["prepared"] == len(facts["steps"]) == 5
        # Both ranks' inputs are ones, so the gradient is 2 in all 64 weights and 8 biases.
        assert facts["norms"][0] == pytest.approx(2 * math.sqrt(72))


def test_a_skipped_step_changes_no_weight_on_any_rank(ran):
    _, (clean, broken) = ran
    for facts in (clean, broken):
        start, (first, second, third, fourth, fifth) = facts["start"], facts["weights"]
        assert start != first == second != third == fourth == fifth
    assert clean["weights"] == broken["weights"]


def test_all_ranks_stop_with_the_response_that_one_of_them_held(ran):
    printed, facts = ran
    assert "optimizer step skipped, 1 in a row: response 17, response token 5: prev_logprobs is nan" in printed
    assert "optimizer step skipped, 2 in a row: response 17, response token 5: prev_logprobs is inf" in printed
    for one in facts:
        assert one["error"].startswith("3 optimizer steps in a row were skipped; in the last one every log-prob")
        assert "every log-probability was finite, but the loss or its gradient was not" in one["error"]
        assert "qarl.max_skipped_steps" in one["error"]


def test_a_skipped_step_is_put_down_to_the_first_response_that_its_own_loss_found(ran):
    printed, facts = ran
    causes = [line.partition(" in a row: ")[2] for line in printed.splitlines() if "optimizer step skipped" in line]
    assert causes[-3:] == ["response 0, response token 7: advantages is inf", cause_of(None), cause_of(None)]
    assert [one["norms_by_group"] for one in facts] == [{}, {}]


def test_a_step_that_megatron_skips_by_itself_counts_on_all_ranks(ran):
    _, (applied, skipped) = ran
    assert skipped["own"] == [[True, 0], [False, 1], [True, 0]]
    assert applied["own"] == [[True, 0], [True, 1], [True, 0]]


def test_what_ranks_exchange_is_what_was_found():
    for found in (NonFinite(17, 5, "advantages", float("-inf")), NonFinite(0, 0, "curr_logprobs", float("nan"))):
        assert str(NonFinite.of(found.numbers())) == str(found)
    assert NonFinite.NOTHING[0] < 0
    assert "finite" in cause_of(None)
