"""Our objectives as NeMo-RL's loss: the same gradient as its own where both describe one loss, and sums that add up."""

import pickle

import nemo_rl_here  # noqa: F401
import pytest
import torch
from loss_batches import NAMES
from pydantic import TypeAdapter

# isort: split
from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn, prepare_loss_input
from nemo_rl.algorithms.loss.interfaces import LossType, MetricNormalizer
from nemo_rl.algorithms.loss.utils import prepare_packed_loss_input
from nemo_rl.algorithms.loss.wrapper import (
    SequencePackingFusionLossWrapper,
    SequencePackingLossWrapper,
    wrap_loss_fn_with_input_preparation,
)
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

from qarl_nemo.losses.config import LossConfig, TBPOConfig
from qarl_nemo.losses.nemo import PREFIX, QarlLossFn
from qarl_nemo.nemo.rl.token_metrics import token_metrics

PROMPT, VOCABULARY = 4, 11
LENGTHS = torch.tensor([24, 20, 24, 7, 16, 24, 9, 12])
# Log of each response's ratio: inside and on either side of its band, for both signs of the advantage.
DRIFT = torch.tensor([0.02, 0.002, 0.02, -0.02, 0.0, 0.002, -0.02, 0.003])
ADVANTAGES = torch.tensor([1.0, 0.5, -1.0, -0.7, 2.0, -1.2, 0.8, 0.3])
# NeMo-RL takes the least and the greatest of these, and sums all others.
EXTREMES = {"probs_ratio_min", "probs_ratio_max", "probs_ratio_clamped_min", "probs_ratio_clamped_max"}
# NeMo-RL's loop indexes these.
INDEXED = {"loss", "token_mult_prob_error", "gen_kl_error"}
BANDS = {"positive_clip_high": 0.004, "negative_clip_low": 0.003, "negative_clip_high": 0.007}


def make_batch(*, gap=0.05) -> tuple[torch.Tensor, BatchedDataDict]:
    """Next-token log-probabilities [B, S], as NeMo-RL's fused linear layer returns them, and a batch around them.

    Responses have many lengths, one does not count; learner and sampler differ by `gap` at every token.
    """
    size, longest = len(LENGTHS), int(LENGTHS.max())
    curr = -torch.rand(size, longest)
    positions = torch.arange(longest)
    prev = curr.roll(1, dims=1) - DRIFT[:, None]
    data = BatchedDataDict(
        input_ids=torch.randint(VOCABULARY, (size, longest)),
        input_lengths=LENGTHS,
        prev_logprobs=prev,
        generation_logprobs=prev - gap * torch.randn(size, longest),
        reference_policy_logprobs=prev - 0.3 * torch.randn(size, longest),
        advantages=ADVANTAGES[:, None].expand(size, longest).clone(),
        token_mask=((positions >= PROMPT) & (positions < LENGTHS[:, None])).float(),
        sample_mask=torch.tensor([1.0, 1, 1, 1, 0, 1, 1, 1]),
    )
    return curr.requires_grad_(), data


def counts(data) -> dict[str, torch.Tensor]:
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": mask.sum()}


def nemo_loss(**settings) -> ClippedPGLossFn:
    config = ClippedPGLossConfig(**{"reference_policy_kl_penalty": 0.0} | settings)
    return ClippedPGLossFn(config, use_fused_linear_logprobs=True)


def make_loss(name: str = "tbpo", *, replaced: ClippedPGLossFn | None = None, **settings) -> QarlLossFn:
    # By default it would reject every response here.
    accepting = {"mismatch_low": 0.5, "mismatch_high": 2.0} if name == "mis_gspo" else {}
    objective = TypeAdapter(LossConfig).validate_python({"objective": name, **accepting, **settings})
    return QarlLossFn(objective, replaced or nemo_loss(), token_metrics)


def run(loss_fn, curr, data, normalization=None):
    """Loss, metrics and gradient of the log-probabilities, through NeMo-RL's own preparation."""
    curr.grad = None
    loss, metrics = wrap_loss_fn_with_input_preparation(
        curr, data, loss_fn=loss_fn, prepare_fn=prepare_loss_input, **normalization or counts(data)
    )
    if loss.requires_grad:
        loss.backward()
    grad = torch.zeros_like(curr) if curr.grad is None else curr.grad.clone()
    return loss.item(), metrics, grad


def run_split(loss_fn, curr, data, *, local=False):
    """The same in micro-batches of three responses, as the worker sums them up."""
    total, sums, grad = 0.0, {}, torch.zeros_like(curr)
    for start in range(0, len(LENGTHS), 3):
        part = data.slice(start, min(start + 3, len(LENGTHS)))
        piece = curr[start : start + 3].detach().requires_grad_()
        loss, metrics, part_grad = run(loss_fn, piece, part, counts(part if local else data))
        total, grad[start : start + 3] = total + loss, part_grad
        sums = {name: sums.get(name, 0.0) + value for name, value in metrics.items()}
    return total, sums, grad


def run_packed(loss_fn, curr, data):
    """The same with all responses in one row, unpacked and called for one by one by NeMo-RL's wrapper."""
    packed = torch.cat([curr[row, :length] for row, length in enumerate(LENGTHS)]).unsqueeze(0)
    wrapper = SequencePackingLossWrapper(
        loss_fn, prepare_loss_input, torch.cat([torch.zeros(1, dtype=torch.long), LENGTHS.cumsum(0)])
    )
    curr.grad = None
    loss, metrics = wrapper(packed, data, **counts(data))
    loss.backward()
    return loss.item(), metrics, curr.grad.clone()


def additive(metrics):
    return {name: value for name, value in metrics.items() if name not in EXTREMES}


def oracle(**changes) -> ClippedPGLossFn:
    """NeMo-RL's sequence-level clipped loss with a dual clip: TBPO for mismatch weights of 1."""
    settings = {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "ratio_clip_min": BANDS["negative_clip_low"],
        "ratio_clip_max": BANDS["positive_clip_high"],
        "ratio_clip_c": 1 + BANDS["negative_clip_high"],
    }
    return nemo_loss(**settings | changes)


def test_tbpo_without_mismatch_has_the_gradient_of_nemo_rls_own_clipped_loss():
    curr, data = make_batch(gap=0.0)
    own_loss, _, own = run(oracle(), curr, data)
    loss, metrics, grad = run(make_loss("tbpo", **BANDS), curr, data)
    assert 0 < metrics[PREFIX + "kept_fraction"] < 1, "responses in and out of their bands"
    assert grad.abs().max() > 0
    torch.testing.assert_close(grad, own, rtol=1e-6, atol=1e-10)
    # Where the gradient is clipped away the loss keeps a constant, at the same bound on both sides.
    assert loss == pytest.approx(own_loss, abs=1e-7)


@pytest.mark.parametrize("wrong", [{"ratio_clip_c": None}, {"ratio_clip_max": 0.1}, {"ratio_clip_min": 0.1}])
def test_other_bands_have_another_gradient(wrong):
    curr, data = make_batch(gap=0.0)
    _, _, own = run(oracle(**wrong), curr, data)
    _, _, grad = run(make_loss("tbpo", **BANDS), curr, data)
    assert (grad - own).abs().max() > 1e-4


@pytest.mark.parametrize("way", [run_split, run_packed])
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_and_packed_sequences_add_up(name, way):
    loss_fn = make_loss(name, replaced=nemo_loss(reference_policy_kl_penalty=0.1))
    curr, data = make_batch()
    loss, metrics, grad = run(loss_fn, curr, data)
    part_loss, part_metrics, part_grad = way(loss_fn, curr, data)
    assert part_loss == pytest.approx(loss, abs=2e-6)
    torch.testing.assert_close(part_grad, grad, rtol=0, atol=1e-8)
    assert additive(part_metrics) == pytest.approx(additive(metrics), rel=1e-4, abs=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_normalization_by_local_counts_does_not_add_up(name):
    curr, data = make_batch()
    loss, metrics, grad = run(make_loss(name), curr, data)
    wrong_loss, wrong, wrong_grad = run_split(make_loss(name), curr, data, local=True)
    assert abs(wrong_loss - loss) > 1e-3
    assert (wrong_grad - grad).abs().max() > 1e-4
    assert abs(wrong[PREFIX + "abs_gap"] - metrics[PREFIX + "abs_gap"]) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_says_how_it_was_normalized(name):
    loss_fn = make_loss(name)
    curr, data = make_batch()
    metrics = run(loss_fn, curr, data)[1]
    assert set(metrics) <= set(loss_fn.metric_normalizations)
    by_count = {"global_valid_seqs": MetricNormalizer.SEQUENCES, "global_valid_toks": MetricNormalizer.TOKENS}
    for count, kind in by_count.items():
        doubled = counts(data)
        doubled[count] = doubled[count] * 2
        changed = run(loss_fn, curr, data, doubled)[1]
        halved = {key for key in metrics if metrics[key] and changed[key] == pytest.approx(metrics[key] / 2, rel=1e-5)}
        same = {key for key in metrics if changed[key] == pytest.approx(metrics[key], rel=1e-5)}
        for key in metrics:
            expected = halved if loss_fn.metric_normalizations[key] is kind and metrics[key] else same
            assert key in expected, key


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_what_nemo_rls_loop_indexes_and_can_sum(name):
    loss_fn = pickle.loads(pickle.dumps(make_loss(name)))
    _, metrics, _ = run(loss_fn, *make_batch())
    assert metrics.keys() >= INDEXED | EXTREMES
    assert {type(value) for value in metrics.values()} <= {float, int}
    # The worker divides by the number of minibatches unless a name holds one of these.
    assert not [key for key in metrics if ("_min" in key or "_max" in key) and key not in EXTREMES]


def test_a_response_that_does_not_count_has_no_gradient_whatever_it_holds():
    curr, data = make_batch()
    clean = run(make_loss(), curr, data)[2]
    data["generation_logprobs"][4] = -torch.inf
    data["prev_logprobs"][4] = torch.nan
    _, metrics, grad = run(make_loss(), curr, data)
    assert not grad[4].any()
    assert torch.equal(grad, clean)
    assert metrics[PREFIX + "num_nonfinite_tokens"] == 0


@pytest.mark.parametrize("name", ["tbpo", "grpo_tis"])
@pytest.mark.parametrize("settings", [{}, {"reference_policy_kl_type": "k2"}, {"use_on_policy_kl_approximation": True}])
def test_the_reference_kl_is_nemo_rls(name, settings):
    curr, data = make_batch()
    averaged = {"token_level_loss": make_loss(name).loss_type is LossType.TOKEN_LEVEL}
    with_kl = nemo_loss(reference_policy_kl_penalty=0.1, **settings, **averaged)
    own, own_metrics, own_grad = run(with_kl, curr, data)
    bare, _, bare_grad = run(nemo_loss(**averaged), curr, data)
    ours, metrics, grad = run(make_loss(name, replaced=with_kl), curr, data)
    alone, _, alone_grad = run(make_loss(name), curr, data)
    assert (own_grad - bare_grad).abs().max() > 1e-4
    torch.testing.assert_close(grad - alone_grad, own_grad - bare_grad, rtol=0, atol=1e-7)
    assert ours - alone == pytest.approx(own - bare, abs=1e-6)
    assert metrics["kl_penalty"] == pytest.approx(own_metrics["kl_penalty"], abs=1e-6)


def test_kl_in_the_reward_is_not_in_the_loss():
    curr, data = make_batch()
    rewarded = nemo_loss(reference_policy_kl_penalty=0.1, use_kl_in_reward=True)
    assert run(make_loss(replaced=rewarded), curr, data)[0] == run(make_loss(), curr, data)[0]


def test_without_previous_logprobs_the_ratio_is_one():
    curr, data = make_batch()
    data["prev_logprobs"] = torch.zeros_like(data["prev_logprobs"])
    _, metrics, grad = run(make_loss(replaced=nemo_loss(force_on_policy_ratio=True)), curr, data)
    valid = counts(data)["global_valid_seqs"] / len(LENGTHS)
    assert metrics[PREFIX + "prox_ratio_mean"] == pytest.approx(1.0)
    assert valid < 1
    assert metrics[PREFIX + "kept_fraction"] == pytest.approx(1.0)
    assert grad.abs().max() > 0


def test_metrics_agree_with_nemo_rls_where_both_have_them():
    curr, data = make_batch()
    own = run(nemo_loss(), curr, data)[1]
    metrics = run(QarlLossFn(TBPOConfig(), nemo_loss()), curr, data)[1]
    shared = {key: value for key, value in own.items() if key != "loss"}
    assert {key: metrics[key] for key in shared} == shared
    assert metrics[PREFIX + "mismatch_kl_k3"] == pytest.approx(own["policy_kl_error"], rel=0.2)


def run_logits(wrapper, prepare_fn, loss_fn, logits, data, group):
    """The same from logits of all responses in one row."""
    ends = torch.cat([torch.zeros(1, dtype=torch.long), LENGTHS.cumsum(0)])
    parallel = {"vocab_parallel_rank": 0, "vocab_parallel_group": group}
    logits.grad = None
    loss, metrics = wrapper(loss_fn, prepare_fn, ends, ends, **parallel)(logits, data.copy(), **counts(data))
    loss.backward()
    return loss.item(), metrics, logits.grad.clone()


def test_fused_packing_gives_the_loss_of_one_response_after_another(tmp_path):
    _, data = make_batch()
    logits = torch.randn(1, int(LENGTHS.sum()), VOCABULARY, requires_grad=True)
    loss_fn = QarlLossFn(TBPOConfig(positive_clip_high=2.0, negative_clip_high=2.0), ClippedPGLossFn(
        ClippedPGLossConfig(reference_policy_kl_penalty=0.1)), token_metrics)  # fmt: skip
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        loss, metrics, grad = run_logits(SequencePackingLossWrapper, prepare_loss_input, loss_fn, logits, data, group)
        fusion = SequencePackingFusionLossWrapper, prepare_packed_loss_input, loss_fn, logits
        fused = run_logits(*fusion, data, group)
        data["advantages"] = 1.1 * data["advantages"]
        wrong = run_logits(*fusion, data, group)
    finally:
        torch.distributed.destroy_process_group()
    assert grad.abs().max() > 1e-3
    assert fused[0] == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(fused[2], grad, rtol=1e-5, atol=1e-8)
    assert additive(fused[1]) == pytest.approx(additive(metrics), rel=1e-5, abs=1e-7)
    assert (wrong[2] - grad).abs().max() > 1e-4
