"""NeMo-RL's training keys, and the attributes that our loss reads from NeMo-RL's own loss, without NeMo-RL."""

from dataclasses import dataclass, field
from enum import Enum

import torch

from qarl_nemo.nemo_rl.loss import QarlLossFn
from qarl_nemo.nemo_rl.token_metrics import token_metrics
from support.loss_batches import LOSS_CONFIG

PROMPT, VOCABULARY = 4, 11
LENGTHS = torch.tensor([24, 20, 24, 7, 16, 24, 9, 12])
# Log of each response's ratio: inside and on either side of its band, for both signs of the advantage.
DRIFT = torch.tensor([0.02, 0.002, 0.02, -0.02, 0.0, 0.002, -0.02, 0.003])
ADVANTAGES = torch.tensor([1.0, 0.5, -1.0, -0.7, 2.0, -1.2, 0.8, 0.3])
# NeMo-RL takes the minimum or maximum of these, and sums all others.
EXTREMES = {"probs_ratio_min", "probs_ratio_max", "probs_ratio_clamped_min", "probs_ratio_clamped_max"}
# NeMo-RL's loop requires these.
INDEXED = {"loss", "token_mult_prob_error", "gen_kl_error"}
BANDS = {"positive_clip_high": 0.004, "negative_clip_low": 0.003, "negative_clip_high": 0.007}


class InputType(Enum):
    LOGPROB = "logprob"


class LossType(Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class Normalizer(Enum):
    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


NORMALIZATIONS = dict.fromkeys(
    (
        *("loss", "kl_penalty", "probs_ratio", "probs_ratio_clamped", "token_mult_prob_error", "gen_kl_error"),
        *("policy_kl_error", "js_divergence_error", "approx_entropy", "sampling_importance_ratio"),
    ),
    Normalizer.TOKENS,
) | dict.fromkeys(("num_valid_samples", "positive_nll_loss", *EXTREMES), Normalizer.NONE)


@dataclass(frozen=True)
class Replaced:
    """NeMo-RL's defaults; `test_nemo_loss_in_nemo_rl.py` compares every field with NeMo-RL's class."""

    input_type: Enum = InputType.LOGPROB
    loss_type: Enum = LossType.TOKEN_LEVEL
    metric_normalizations: dict = field(default_factory=lambda: dict(NORMALIZATIONS))
    use_fused_linear_logprobs: bool = True
    force_on_policy_ratio: bool = False
    use_on_policy_kl_approximation: bool = False
    reference_policy_kl_penalty: float = 0.0
    reference_policy_kl_type: str = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2


def make_batch(*, gap=0.05) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Next-token log-probabilities [B, S], as NeMo-RL's fused linear layer returns them, and a batch around them.

    Responses have many lengths, one does not count; learner and sampler differ by `gap` at every token.
    """
    size, longest = len(LENGTHS), int(LENGTHS.max())
    curr = -torch.rand(size, longest)
    positions = torch.arange(longest)
    prev = curr.roll(1, dims=1) - DRIFT[:, None]
    data = {
        "input_ids": torch.randint(VOCABULARY, (size, longest)),
        "input_lengths": LENGTHS,
        "prev_logprobs": prev,
        "generation_logprobs": prev - gap * torch.randn(size, longest),
        "reference_policy_logprobs": prev - 0.3 * torch.randn(size, longest),
        "advantages": ADVANTAGES[:, None].expand(size, longest).clone(),
        "token_mask": ((positions >= PROMPT) & (positions < LENGTHS[:, None])).float(),
        "sample_mask": torch.tensor([1.0, 1, 1, 1, 0, 1, 1, 1]),
    }
    return curr.requires_grad_(), data


def counts(data) -> dict[str, torch.Tensor]:
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": mask.sum()}


def make_loss(name: str = "tbpo", *, replaced=None, **settings) -> QarlLossFn:
    # By default it would reject every response here.
    accepting = {"mismatch_low": 0.5, "mismatch_high": 2.0} if name == "mis_gspo" else {}
    objective = LOSS_CONFIG.validate_python({"objective": name, **accepting, **settings})
    return QarlLossFn(objective, replaced or Replaced(), token_metrics)


def additive(metrics):
    return {name: value for name, value in metrics.items() if name not in EXTREMES}
