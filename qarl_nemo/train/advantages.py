"""Group-relative advantages: how much better a response is than the others of its prompt."""

from torch import Tensor


def group_advantages(rewards: Tensor, group: int, *, normalize: bool) -> Tensor:
    """Return A = (reward - group mean) / (group std + 1e-6), the division optional.

    Args:
        rewards: [B] FP32, the responses of a prompt adjacent.
        group: num_generations_per_prompt.
        normalize: divide by the group's standard deviation.

    Returns:
        [B] FP32; zero for a group whose rewards are all equal.

    Source: arXiv 2402.03300 (GRPO), section 4.1.
    """
    grouped = rewards.view(-1, group)
    # The mean of equal numbers is rounded, and their standard deviation with it; AdamW makes whole steps of the rest.
    equal = (grouped == grouped[:, :1]).all(-1, keepdim=True)
    centred = (grouped - grouped.mean(-1, keepdim=True)).masked_fill(equal, 0.0)
    if normalize:
        centred = centred / (grouped.std(-1, keepdim=True) + 1e-6)
    return centred.reshape(-1)
