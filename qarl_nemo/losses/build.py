"""From a checked config to the loss it describes."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from qarl_nemo.losses.config import LossConfig
from qarl_nemo.losses.dual_clip_grpo import dual_clip_grpo_loss
from qarl_nemo.losses.grpo_tis import grpo_tis_loss
from qarl_nemo.losses.gspo import gspo_loss
from qarl_nemo.losses.mis_gspo import mis_gspo_loss
from qarl_nemo.losses.on_policy_grpo import on_policy_grpo_loss
from qarl_nemo.losses.positive_grpo import positive_grpo_loss
from qarl_nemo.losses.qurl_acr import qurl_acr_loss
from qarl_nemo.losses.ratios import LossData, LossOutput
from qarl_nemo.losses.sapo import sapo_loss
from qarl_nemo.losses.tbpo import tbpo_loss

LossFn = Callable[[Tensor, LossData], LossOutput]

OBJECTIVES: dict[str, Callable[..., LossOutput]] = {
    "tbpo": tbpo_loss,
    "grpo_tis": grpo_tis_loss,
    "gspo": gspo_loss,
    "mis_gspo": mis_gspo_loss,
    "positive_grpo": positive_grpo_loss,
    "on_policy_grpo": on_policy_grpo_loss,
    "dual_clip_grpo": dual_clip_grpo_loss,
    "sapo": sapo_loss,
    "qurl_acr": qurl_acr_loss,
}


def build_loss(config: LossConfig) -> LossFn:
    """Bind `config` to its objective: loss(curr_logprobs, data) -> LossOutput; Ray can pickle the result."""
    return partial(OBJECTIVES[config.objective], config=config)
