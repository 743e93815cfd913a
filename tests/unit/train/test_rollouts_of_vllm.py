"""vLLM's answers become rollouts; routes that no kernel reported are refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qarl_nemo.layers.router import NO_ROUTE
from qarl_nemo.train.vllm.answers import make_rollouts, stack_routes
from qarl_nemo.train.vllm.options import capture_sizes
from support.asserts import assert_bitwise_equal

PROMPTS = [[5], [6, 7, 8]]
TOKENS = [[9, 10, 2], [11]]
LAYERS, CHOICES = 3, 2


def routes(num_tokens, first=1):
    """Distinct experts for each token and layer, numbered so that a misplaced one shows."""
    numbers = np.arange(first, first + num_tokens * LAYERS * CHOICES) % 250 + 1
    return numbers.astype(np.uint8).reshape(num_tokens, LAYERS, CHOICES)


def answers(captured):
    return [
        SimpleNamespace(
            token_ids=tokens,
            logprobs=SimpleNamespace(logprobs=[-float(token) for token in tokens]),
            finish_reason="stop" if tokens[-1] == 2 else "length",
            routed_experts=each,
        )
        for tokens, each in zip(TOKENS, captured, strict=True)
    ]


def rollouts(captured, *, router_layers=(0, 2), **options):
    settings = {"pad_id": 0, "num_prompt_columns": 0, "weight_version": 3, "device": torch.device("cpu")} | options
    return make_rollouts(PROMPTS, answers(captured), router_layers=router_layers, **settings)


def test_prompts_are_padded_left_and_responses_right():
    made = rollouts([routes(3), routes(3)])
    assert_bitwise_equal(made.input_ids, torch.tensor([[0, 0, 5, 9, 10, 2], [6, 7, 8, 11, 0, 0]]))
    assert_bitwise_equal(made.generation_logprobs, torch.tensor([[-9.0, -10.0, -2.0], [-11.0, 0.0, 0.0]]))
    assert made.response_mask.tolist() == [[True] * 3, [True, False, False]]
    assert made.truncated.tolist() == [False, True]
    assert (made.weight_version, made.num_prompt_columns) == (3, 3)


def test_each_token_keeps_the_experts_of_the_layers_that_route():
    captured = [routes(3), routes(3, first=100)]
    made = rollouts(captured).routes
    assert made.shape == (2, 6, 2, CHOICES)
    assert made.dtype == torch.int16
    expected = torch.full((2, 6, 2, CHOICES), NO_ROUTE, dtype=torch.int16)
    # One prompt token and two of the response fed back; three prompt tokens and none fed back.
    expected[0, 2:5] = torch.from_numpy(captured[0][:, [0, 2]].astype("int16"))
    expected[1, 0:3] = torch.from_numpy(captured[1][:, [0, 2]].astype("int16"))
    assert_bitwise_equal(made, expected)


def test_without_routers_there_are_no_routes():
    assert rollouts([None, None], router_layers=()).routes is None


@pytest.mark.parametrize("captured", [[None, routes(3)], [routes(2), routes(3)], [routes(4), routes(3)]])
def test_routes_of_another_number_of_tokens_are_refused(captured):
    with pytest.raises(RuntimeError, match="no routed experts, or too few, for 1 of 2 responses"):
        rollouts(captured)


def test_routes_that_are_all_zero_are_refused():
    with pytest.raises(
        RuntimeError, match=r"for all choices of 12 of 12.*qarl\.router_replay=false, or rollout\.engine"
    ):
        rollouts([np.zeros_like(routes(3))] * 2)


def test_one_layer_without_routes_is_refused():
    silent = routes(3)
    silent[:, 2] = 0
    with pytest.raises(RuntimeError, match="expert 0 for all choices of 3 of 12"):
        rollouts([silent, routes(3)])


def test_one_expert_a_token_may_be_expert_0_but_not_always():
    mask = torch.ones(1, 4, dtype=torch.bool)
    some = np.array([[[0]], [[1]], [[0]]], dtype=np.uint8)
    assert stack_routes([some], mask, [0])[0, :, 0, 0].tolist() == [0, 1, 0, NO_ROUTE]
    with pytest.raises(RuntimeError, match="expert 0 for all choices of 3 of 3"):
        stack_routes([np.zeros_like(some)], mask, [0])


def test_logprobs_that_are_not_finite_are_refused():
    broken = answers([routes(3), routes(3)])
    broken[1].logprobs.logprobs[0] = float("nan")
    with pytest.raises(RuntimeError, match="weight version 3 gives NaN or infinite logprobs for 1 of 2"):
        make_rollouts(
            PROMPTS,
            broken,
            pad_id=0,
            num_prompt_columns=0,
            router_layers=[],
            weight_version=3,
            device=torch.device("cpu"),
        )


@pytest.mark.parametrize("batch_size", [1, 2, 7, 128, 500, 1024, 5000])
def test_captured_sizes_reach_the_batch_and_pad_by_half_at_most(batch_size):
    sizes = capture_sizes(batch_size)
    assert sizes[-1] == batch_size
    for running in range(1, batch_size + 1):
        padded = next(size for size in sizes if size >= running)
        assert padded <= 1.5 * running
