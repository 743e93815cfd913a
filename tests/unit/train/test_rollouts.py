"""The rollout record: left padding, positions, and cutting, widening and joining batches."""

from dataclasses import fields

import pytest
import torch

from qarl_nemo.layers.router import NO_ROUTE
from qarl_nemo.train.rollouts import Rollouts, columns_from_first_token, pad_left, positions, require_finite
from support.asserts import assert_bitwise_equal

CPU = torch.device("cpu")


def rollouts(lengths: list[int], *, prompt_columns=2, response_columns=3, routers=2, version=7) -> Rollouts:
    """Responses of these lengths behind full prompts; every number is distinct."""
    rows, columns = len(lengths), prompt_columns + response_columns
    mask = torch.arange(response_columns) < torch.tensor(lengths)[:, None]
    routes = torch.arange(rows * columns * routers * 2).view(rows, columns, routers, 2).to(torch.int16)
    return Rollouts(
        input_ids=100 * version + torch.arange(rows * columns).view(rows, columns),
        attention_mask=torch.cat([torch.ones(rows, prompt_columns, dtype=torch.bool), mask], dim=-1),
        response_mask=mask,
        generation_logprobs=-torch.rand(rows, response_columns) * mask,
        routes=routes if routers else None,
        truncated=torch.tensor([length == response_columns for length in lengths]),
        weight_version=version,
    )


def test_prompts_are_padded_on_the_left_to_the_longest_or_wider():
    ids, mask = pad_left([[5, 6, 7], [8]], 0, CPU)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]
    assert pad_left([[5], [6, 7]], 9, CPU, width=3)[0].tolist() == [[9, 9, 5], [9, 6, 7]]
    assert pad_left([[5, 6, 7]], 9, CPU, width=2)[0].tolist() == [[5, 6, 7]]
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)


def test_positions_count_from_the_first_real_token():
    mask = torch.tensor([[False, False, True, True, True], [True, True, True, False, False]])
    # padding before the first token sits at 0; padding after the last one repeats its position
    assert positions(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


def test_select_takes_the_rows_of_every_tensor():
    batch = rollouts([1, 3, 2])
    for rows in (torch.tensor([2, 0]), slice(1, 3)):
        part = batch.select(rows)
        for field in fields(Rollouts):
            value, whole = getattr(part, field.name), getattr(batch, field.name)
            assert torch.equal(value, whole[rows]) if isinstance(whole, torch.Tensor) else value == whole


def test_widen_appends_columns_that_no_mask_counts():
    batch = rollouts([1, 3])
    wide = batch.widen(5, pad_id=9)
    assert (wide.num_prompt_columns, wide.response_mask.shape) == (2, (2, 5))
    assert_bitwise_equal(wide.select(slice(None)).input_ids[:, :5], batch.input_ids)
    assert wide.input_ids[:, 5:].tolist() == [[9, 9], [9, 9]]
    assert not wide.attention_mask[:, 5:].any()
    assert not wide.response_mask[:, 3:].any()
    assert wide.generation_logprobs[:, 3:].tolist() == [[0.0, 0.0]] * 2
    assert bool((wide.routes[:, 5:] == NO_ROUTE).all())
    for name in (field.name for field in fields(Rollouts)):
        assert getattr(getattr(wide, name), "dtype", None) == getattr(getattr(batch, name), "dtype", None), name


@pytest.mark.parametrize("routers", [2, 0])
def test_concatenate_widens_the_shorter_batches(routers):
    short, long = (
        rollouts([1, 2], response_columns=2, routers=routers),
        rollouts([4], response_columns=4, routers=routers),
    )
    joined = Rollouts.concatenate([short, long], pad_id=0)
    assert joined.response_mask.sum(-1).tolist() == [1, 2, 4]
    assert joined.truncated.tolist() == [False, True, True]
    assert joined.weight_version == 7
    assert_bitwise_equal(joined.select(slice(2, 3)).input_ids, long.input_ids)
    assert_bitwise_equal(joined.input_ids[:2, :4], short.input_ids)
    assert (joined.routes is None) == (routers == 0)


@pytest.mark.parametrize("other", [{"version": 8}, {"prompt_columns": 3}])
def test_batches_of_different_versions_or_prompts_do_not_join(other):
    with pytest.raises(AssertionError):
        Rollouts.concatenate([rollouts([1]), rollouts([1], **other)], pad_id=0)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_policy_that_diverged_on_any_token_is_named_with_its_version(broken):
    values = torch.zeros(3, 4)
    require_finite(values, "logprobs", 7)
    values[0, 2] = values[2, 0] = values[2, 1] = broken
    with pytest.raises(RuntimeError, match="weight version 7 gives NaN or infinite logprobs for 2 of 3 prompts"):
        require_finite(values, "logprobs", 7)


def test_a_sequence_can_be_read_from_its_first_token_on_and_put_back():
    ids, mask = pad_left([[5, 6], [7, 8, 9], [4]], 0, CPU)
    ids, mask = (
        torch.cat([ids, torch.tensor([[1], [2], [0]])], -1),
        torch.cat([mask, torch.tensor([[1], [1], [0]])], -1),
    )
    columns = columns_from_first_token(mask)
    assert ids.gather(1, columns).tolist() == [[5, 6, 1, 0], [7, 8, 9, 2], [4, 0, 0, 0]]
    assert torch.equal(ids.gather(1, columns).gather(1, columns.argsort(-1)), ids)
