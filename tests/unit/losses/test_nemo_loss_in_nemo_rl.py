"""Our objectives in NeMo-RL's own wrappers: the gradient and the metrics of its loss where both describe one loss."""

from types import SimpleNamespace

import pytest
import torch

from support.loss_batches import NAMES
from support.nemo_batches import BANDS, LENGTHS, NORMALIZATIONS, VOCABULARY, Replaced, additive, counts, make_loss
from support.nemo_batches import make_batch as make_plain_batch
from support.nemo_rl import installed  # noqa: F401

# isort: split
from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn, prepare_loss_input
from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType, MetricNormalizer
from nemo_rl.algorithms.loss.utils import prepare_packed_loss_input
from nemo_rl.algorithms.loss.wrapper import (
    SequencePackingFusionLossWrapper,
    SequencePackingLossWrapper,
    wrap_loss_fn_with_input_preparation,
)
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

from qarl_nemo.losses.config import TBPOConfig
from qarl_nemo.nemo_rl.entropy import entropy_of_logits
from qarl_nemo.nemo_rl.loss import PREFIX, RESPONSE_KEY, QarlLossFn
from qarl_nemo.nemo_rl.token_metrics import token_metrics


def make_batch(*, gap=0.05) -> tuple[torch.Tensor, BatchedDataDict]:
    curr, data = make_plain_batch(gap=gap)
    return curr, BatchedDataDict(**data, **{RESPONSE_KEY: torch.arange(len(LENGTHS))})


def nemo_loss(**settings) -> ClippedPGLossFn:
    config = ClippedPGLossConfig(**{"reference_policy_kl_penalty": 0.0} | settings)
    return ClippedPGLossFn(config, use_fused_linear_logprobs=True)


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
    loss, metrics, grad = run(make_loss("tbpo", replaced=nemo_loss(), **BANDS), curr, data)
    assert 0 < metrics[PREFIX + "kept_fraction"] < 1, "responses in and out of their bands"
    assert grad.abs().max() > 0
    torch.testing.assert_close(grad, own, rtol=1e-5, atol=1e-9)
    # Where the gradient is clipped away the loss keeps a constant, at the same bound on both sides.
    assert loss == pytest.approx(own_loss, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("wrong", [{"ratio_clip_c": None}, {"ratio_clip_max": 0.1}, {"ratio_clip_min": 0.1}])
def test_other_bands_have_another_gradient(wrong):
    curr, data = make_batch(gap=0.0)
    _, _, own = run(oracle(**wrong), curr, data)
    _, _, grad = run(make_loss("tbpo", replaced=nemo_loss(), **BANDS), curr, data)
    assert (grad - own).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["tbpo", "grpo_tis"])
@pytest.mark.parametrize("settings", [{}, {"reference_policy_kl_type": "k2"}, {"use_on_policy_kl_approximation": True}])
def test_the_reference_kl_is_nemo_rls(name, settings):
    curr, data = make_batch()
    averaged = {"token_level_loss": make_loss(name, replaced=nemo_loss()).loss_type is LossType.TOKEN_LEVEL}
    with_kl = nemo_loss(reference_policy_kl_penalty=0.1, **settings, **averaged)
    own, own_metrics, own_grad = run(with_kl, curr, data)
    bare, _, bare_grad = run(nemo_loss(**averaged), curr, data)
    ours, metrics, grad = run(make_loss(name, replaced=with_kl), curr, data)
    alone, _, alone_grad = run(make_loss(name, replaced=nemo_loss()), curr, data)
    assert (own_grad - bare_grad).abs().max() > 1e-4
    torch.testing.assert_close(grad - alone_grad, own_grad - bare_grad, rtol=1e-4, atol=1e-6)
    assert ours - alone == pytest.approx(own - bare, abs=1e-6)
    assert metrics["kl_penalty"] == pytest.approx(own_metrics["kl_penalty"], abs=1e-6)


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


def test_nemo_rls_preparations_hand_on_the_exact_entropy(tmp_path):
    _, data = make_batch()
    logits = torch.randn(1, int(LENGTHS.sum()), VOCABULARY, requires_grad=True)
    loss_fn = make_loss(replaced=nemo_loss())
    loss_fn.use_fused_linear_logprobs = False
    module = SimpleNamespace(prepare_loss_input=prepare_loss_input, prepare_packed_loss_input=prepare_packed_loss_input)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        with entropy_of_logits(module):
            one_by_one = SequencePackingLossWrapper, module.prepare_loss_input, loss_fn, logits
            fused = SequencePackingFusionLossWrapper, module.prepare_packed_loss_input, loss_fn, logits
            found = [run_logits(*one, data, group)[1][PREFIX + "entropy"] for one in (one_by_one, fused)]
    finally:
        torch.distributed.destroy_process_group()
    rows = [row[:length] for row, length in zip(data["token_mask"], LENGTHS, strict=True)]
    following = torch.cat([torch.nn.functional.pad(row[1:], (0, 1)) for row in rows])
    counted = following * data["sample_mask"].repeat_interleave(LENGTHS)
    entropies = torch.distributions.Categorical(logits=logits[0].detach()).entropy()
    assert found == pytest.approx([float((counted * entropies).sum() / counted.sum())] * 2, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_add_up(name):
    loss_fn = make_loss(name, replaced=nemo_loss(reference_policy_kl_penalty=0.1))
    curr, data = make_batch()
    loss, metrics, grad = run(loss_fn, curr, data)
    part_loss, part_metrics, part_grad = run_packed(loss_fn, curr, data)
    assert part_loss == pytest.approx(loss, abs=2e-6)
    torch.testing.assert_close(part_grad, grad, rtol=1e-5, atol=1e-7)
    assert additive(part_metrics) == pytest.approx(additive(metrics), rel=1e-4, abs=2e-6)


def test_kl_in_the_reward_is_not_in_the_loss():
    curr, data = make_batch()
    rewarded = nemo_loss(reference_policy_kl_penalty=0.1, use_kl_in_reward=True)
    without = run(make_loss(replaced=nemo_loss()), curr, data)[0]
    assert run(make_loss(replaced=rewarded), curr, data)[0] == without


@pytest.mark.parametrize(
    "sample_mask", [None, [0.5, 1.0, 0.25, 0.0, 2.0, 0.125, 1.0, 0.75], [0.0, 0.125, 0, 0, 0, 0, 0, 0]]
)
@pytest.mark.parametrize("settings", [{}, {"reference_policy_kl_type": "k2"}, {"force_on_policy_ratio": True}])
def test_metrics_are_nemo_rls_where_both_have_them(settings, sample_mask):
    curr, data = make_batch()
    if sample_mask:
        data["sample_mask"] = torch.tensor(sample_mask)
    own = run(nemo_loss(**settings), curr, data)[1]
    metrics = run(QarlLossFn(TBPOConfig(), nemo_loss(**settings)), curr, data)[1]
    shared = {key: value for key, value in own.items() if key != "loss"}
    assert {key: metrics[key] for key in shared} == pytest.approx(shared, rel=2e-5, abs=2e-7)


@pytest.mark.parametrize("sample_mask", [[0.5, 1.0, 0.25, 0.0, 2.0, 0.125, 1.0, 0.75], [0.0, 0.125, 0, 0, 0, 0, 0, 0]])
def test_a_fraction_of_a_response_weighs_what_it_weighs_in_nemo_rls_loss(sample_mask):
    curr, data = make_batch(gap=0.0)
    data["sample_mask"] = torch.tensor(sample_mask)
    own_loss, _, own = run(oracle(), curr, data)
    loss, _, grad = run(make_loss("tbpo", replaced=nemo_loss(), **BANDS), curr, data)
    assert grad.abs().max() > 0
    torch.testing.assert_close(grad, own, rtol=1e-5, atol=1e-9)
    assert loss == pytest.approx(own_loss, rel=1e-5, abs=1e-6)


def test_what_is_read_of_nemo_rls_loss_is_what_the_tests_without_it_have():
    theirs, ours = nemo_loss(), Replaced()
    for name in Replaced.__dataclass_fields__:
        value, own = getattr(theirs, name), getattr(ours, name)
        if name == "metric_normalizations":
            assert {key: kind.value for key, kind in value.items()} == {k: kind.value for k, kind in own.items()}
        else:
            assert getattr(value, "value", value) == getattr(own, "value", own), name
    loss_fn = make_loss("tbpo", replaced=theirs)
    assert loss_fn.input_type is LossInputType.LOGPROB
    assert loss_fn.loss_type is LossType.SEQUENCE_LEVEL
    assert make_loss("grpo_tis", replaced=theirs).loss_type is LossType.TOKEN_LEVEL
    assert {type(kind) for kind in loss_fn.metric_normalizations.values()} == {MetricNormalizer}
    assert loss_fn.metric_normalizations[PREFIX + "kept_fraction"] is MetricNormalizer.SEQUENCES
    assert NORMALIZATIONS.keys() <= loss_fn.metric_normalizations.keys()
