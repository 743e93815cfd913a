import pytest
import torch

from qarl_nemo.train.advantages import group_advantages

# two groups of four: means 0.5 and 0.25
REWARDS = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0])


def test_centred_advantages_by_hand():
    expected = [0.5, -0.5, 0.5, -0.5, 0.75, -0.25, -0.25, -0.25]
    assert group_advantages(REWARDS, 4, normalize=False).tolist() == expected
    # the mean over the whole batch, 3/8, gives something else
    assert (REWARDS - REWARDS.mean()).tolist() != expected


def test_normalized_advantages_by_hand():
    # std with n - 1: group 1 sqrt(4 * .25 / 3) = .57735, group 2 sqrt((.5625 + 3 * .0625) / 3) = .5
    expected = [0.5 / 0.57735, -0.5 / 0.57735] * 2 + [1.5, -0.5, -0.5, -0.5]
    advantages = group_advantages(REWARDS, 4, normalize=True)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5)
    # with n in place of n - 1 the first would be 1.0
    assert advantages[0].item() != pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("group", [3, 6, 7, 8, 12, 32])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.3, -0.4, 10.1, 1000.3])
def test_a_group_of_equal_rewards_teaches_nothing(normalize, value, group):
    assert group_advantages(torch.full((2 * group,), value), group, normalize=normalize).tolist() == [0.0] * 2 * group


def test_groups_do_not_see_each_other():
    alone = group_advantages(REWARDS[:4], 4, normalize=True)
    assert torch.equal(group_advantages(REWARDS, 4, normalize=True)[:4], alone)
