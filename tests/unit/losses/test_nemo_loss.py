"""Our objectives as NeMo-RL's loss, with NeMo-RL's keys and without NeMo-RL: sums that add up, metrics by hand."""

import math
import pickle

import pytest
import torch

from qarl_nemo.losses.reference_kl import ReferenceKL
from qarl_nemo.metrics.diagnostics import DiagnosticsCollector, read_diagnostics
from qarl_nemo.nemo_rl.loss import ENTROPY_KEY, PREFIX, RESPONSE_KEY
from qarl_nemo.nemo_rl.recording import Recorder, Recording
from support.loss_batches import CONFIGS, NAMES
from support.nemo_batches import (
    DRIFT,
    EXTREMES,
    INDEXED,
    LENGTHS,
    PROMPT,
    LossType,
    Normalizer,
    Replaced,
    additive,
    counts,
    make_batch,
    make_loss,
)

WITH_KL = Replaced(reference_policy_kl_penalty=0.1)
every_objective = pytest.mark.parametrize("name", NAMES)


def run(loss_fn, curr, data, normalization=None):
    """Loss, metrics and gradient of the log-probabilities."""
    leaf = curr.detach().clone().requires_grad_()
    loss, metrics = loss_fn(
        next_token_logprobs=leaf[:, : data["input_ids"].shape[1] - 1], data=data, **normalization or counts(data)
    )
    loss.backward()
    return loss.item(), metrics, leaf.grad


def run_parts(loss_fn, curr, data, *, size=3, local=False, shorten=False):
    """The same in micro-batches of `size` responses, as the worker sums them up; shortened as packed ones are."""
    total, sums, grad = 0.0, {}, torch.zeros_like(curr)
    for start in range(0, len(LENGTHS), size):
        rows = slice(start, start + size)
        width = int(LENGTHS[rows].max()) if shorten else curr.shape[1]
        part = {key: value[rows, :width] if value.ndim > 1 else value[rows] for key, value in data.items()}
        loss, metrics, part_grad = run(loss_fn, curr[rows, :width], part, counts(part if local else data))
        total, grad[rows, :width] = total + loss, part_grad
        sums = {name: sums.get(name, 0.0) + value for name, value in metrics.items()}
    return total, sums, grad


@every_objective
@pytest.mark.parametrize("layout", [{}, {"size": 1, "shorten": True}], ids=["micro_batches", "one_by_one"])
def test_micro_batches_and_single_responses_add_up(name, layout):
    loss_fn = make_loss(name, replaced=WITH_KL)
    curr, data = make_batch()
    loss, metrics, grad = run(loss_fn, curr, data)
    part_loss, part_metrics, part_grad = run_parts(loss_fn, curr, data, **layout)
    assert part_loss == pytest.approx(loss, abs=2e-6)
    torch.testing.assert_close(part_grad, grad, rtol=1e-5, atol=1e-7)
    assert additive(part_metrics) == pytest.approx(additive(metrics), rel=1e-4, abs=2e-6)


@every_objective
def test_a_normalization_by_local_counts_does_not_add_up(name):
    curr, data = make_batch()
    loss, metrics, grad = run(make_loss(name), curr, data)
    wrong_loss, wrong, wrong_grad = run_parts(make_loss(name), curr, data, local=True)
    assert abs(wrong_loss - loss) > 1e-3
    assert (wrong_grad - grad).abs().max() > 1e-4
    assert abs(wrong[PREFIX + "abs_gap"] - metrics[PREFIX + "abs_gap"]) > 1e-3


@every_objective
def test_every_metric_says_how_it_was_normalized(name):
    loss_fn = make_loss(name, replaced=WITH_KL)
    curr, data = make_batch()
    data[ENTROPY_KEY] = torch.tensor(0.8)
    metrics = run(loss_fn, curr, data)[1]
    assert set(metrics) == set(loss_fn.metric_normalizations)
    for count, kind in {"global_valid_seqs": Normalizer.SEQUENCES, "global_valid_toks": Normalizer.TOKENS}.items():
        doubled = counts(data)
        doubled[count] = doubled[count] * 2
        changed = run(loss_fn, curr, data, doubled)[1]
        for key, value in metrics.items():
            halves = loss_fn.metric_normalizations[key] is kind
            assert changed[key] == pytest.approx(value / 2 if halves else value, rel=1e-5), key


def test_the_entropies_of_calls_add_up_to_the_mean_over_all_their_tokens():
    curr, data = make_batch()
    entropy = torch.rand(curr.shape)
    mask = data["token_mask"] * data["sample_mask"][:, None]
    total = 0.0
    for rows in (slice(0, 5), slice(5, 8)):
        part = {key: value[rows] for key, value in data.items()}
        part[ENTROPY_KEY] = (mask * entropy)[rows].sum() / mask[rows].sum()
        total += run(make_loss(), curr[rows], part, counts(data))[1][PREFIX + "entropy"]
    assert total == pytest.approx(float((mask * entropy).sum() / mask.sum()), rel=1e-5)
    assert PREFIX + "entropy" not in run(make_loss(), curr, data)[1], "an estimate does not stand in for it"


@every_objective
def test_metrics_are_what_nemo_rls_loop_indexes_and_can_sum(name):
    loss_fn = pickle.loads(pickle.dumps(make_loss(name)))
    _, metrics, _ = run(loss_fn, *make_batch())
    assert metrics.keys() >= INDEXED | EXTREMES
    assert {type(value) for value in metrics.values()} == {float}
    # The worker divides by the number of minibatches unless a name holds one of these.
    assert not [key for key in metrics if ("_min" in key or "_max" in key) and key not in EXTREMES]


@every_objective
def test_the_loss_is_averaged_over_what_it_says(name):
    by_response = CONFIGS[name].averages == "response"
    loss_fn = make_loss(name)
    assert loss_fn.loss_type is (LossType.SEQUENCE_LEVEL if by_response else LossType.TOKEN_LEVEL)
    assert loss_fn.input_type is Replaced().input_type
    assert loss_fn.use_fused_linear_logprobs


def test_a_response_that_does_not_count_has_no_gradient_whatever_it_holds():
    curr, data = make_batch()
    loss_fn = make_loss(replaced=WITH_KL)
    clean = run(loss_fn, curr, data)[2]
    for key in ("generation_logprobs", "prev_logprobs", "reference_policy_logprobs"):
        data[key][4] = -torch.inf if key == "generation_logprobs" else torch.nan
    _, metrics, grad = run(loss_fn, curr, data)
    assert not grad[4].any()
    assert torch.equal(grad, clean)
    assert metrics[PREFIX + "num_nonfinite_tokens"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert loss_fn.nonfinite == []


def test_without_previous_logprobs_the_ratio_is_one():
    curr, data = make_batch()
    data["prev_logprobs"] = torch.zeros_like(data["prev_logprobs"])
    _, metrics, grad = run(make_loss(replaced=Replaced(force_on_policy_ratio=True)), curr, data)
    assert metrics[PREFIX + "prox_ratio_mean"] == pytest.approx(1.0)
    assert metrics["probs_ratio"] == pytest.approx(1.0)
    assert metrics[PREFIX + "kept_fraction"] == pytest.approx(1.0)
    assert grad.abs().max() > 0


def test_without_previous_logprobs_one_update_is_the_same():
    curr, data = make_batch()
    data["prev_logprobs"] = curr.detach().roll(1, dims=1)
    loss, metrics, grad = run(make_loss(), curr, data)
    data["prev_logprobs"] = torch.zeros_like(data["prev_logprobs"])
    without = run(make_loss(replaced=Replaced(force_on_policy_ratio=True)), curr, data)
    assert without[0] == loss
    assert without[1] == metrics
    assert metrics[PREFIX + "mismatch_weight_mean"] != pytest.approx(1.0)
    assert torch.equal(without[2], grad)


def by_hand(values, curr, data, *, by_response=False) -> float:
    """The mean of `values(curr, prev, generation, reference)` over tokens or responses' means, in plain Python."""
    curr, terms = curr.detach(), []
    for row, weight in enumerate(data["sample_mask"].tolist()):
        valid = [t for t in range(1, data["token_mask"].shape[1]) if data["token_mask"][row, t]]
        names = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
        terms.append(
            (weight, [values(float(curr[row, t - 1]), *(float(data[name][row, t]) for name in names)) for t in valid])
        )
    if by_response:
        return sum(w * sum(row) / len(row) for w, row in terms) / sum(w for w, _ in terms)
    return sum(w * sum(row) for w, row in terms) / sum(w * len(row) for w, row in terms)


def k3(log_ratio):
    return math.exp(log_ratio) - 1 - log_ratio


def half_divergence(p, q):
    return k3(p - math.log((math.exp(p) + math.exp(q)) / 2)) / 2


HAND_DERIVED = {
    "token_mult_prob_error": lambda curr, prev, generation, reference: math.exp(abs(prev - generation)),
    "gen_kl_error": lambda curr, prev, generation, reference: k3(prev - generation),
    "policy_kl_error": lambda curr, prev, generation, reference: k3(generation - prev),
    "js_divergence_error": lambda curr, prev, generation, reference: (
        half_divergence(prev, generation) + half_divergence(generation, prev)
    ),
    "sampling_importance_ratio": lambda curr, prev, generation, reference: math.exp(prev - generation),
    "approx_entropy": lambda curr, prev, generation, reference: -math.exp(curr - generation) * curr,
    "probs_ratio": lambda curr, prev, generation, reference: math.exp(curr - prev),
    "probs_ratio_clamped": lambda curr, prev, generation, reference: min(1.01, max(0.99, math.exp(curr - prev))),
}


def test_nemo_rls_metrics_are_their_definitions():
    curr, data = make_batch()
    _, metrics, _ = run(make_loss(replaced=Replaced(ratio_clip_min=0.01, ratio_clip_max=0.01)), curr, data)
    for name, values in HAND_DERIVED.items():
        assert metrics[name] == pytest.approx(by_hand(values, curr, data), rel=1e-4, abs=1e-6), name
    valid = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).bool()
    ratios = [math.exp(float(drift)) for drift in (curr.detach()[:, :-1] - data["prev_logprobs"][:, 1:])[valid]]
    assert (metrics["probs_ratio_min"], metrics["probs_ratio_max"]) == pytest.approx((min(ratios), max(ratios)))
    assert metrics["probs_ratio_clamped_max"] == pytest.approx(1.01)
    assert metrics["num_valid_samples"] == 7
    assert metrics["positive_nll_loss"] == 0


@pytest.mark.parametrize(("kind", "estimate"), [("k1", lambda x: -x), ("k2", lambda x: x * x / 2)])
def test_both_mismatch_kls_take_the_estimator_of_the_settings(kind, estimate):
    curr, data = make_batch()
    _, metrics, _ = run(make_loss(replaced=Replaced(reference_policy_kl_type=kind)), curr, data)
    sampler = by_hand(lambda curr, prev, generation, reference: estimate(prev - generation), curr, data)
    learner = by_hand(lambda curr, prev, generation, reference: estimate(generation - prev), curr, data)
    assert metrics["gen_kl_error"] == pytest.approx(sampler, rel=1e-4, abs=1e-6)
    assert metrics["policy_kl_error"] == pytest.approx(learner, rel=1e-4, abs=1e-6)


def test_a_token_that_the_sampler_calls_impossible_leaves_the_importance_ratio_finite():
    curr, data = make_batch()
    clean = run(make_loss(), curr, data)[1]["sampling_importance_ratio"]
    gap = float(data["prev_logprobs"][6, PROMPT + 2] - data["generation_logprobs"][6, PROMPT + 2])
    data["generation_logprobs"][6, PROMPT + 2] = -math.inf
    found = run(make_loss(), curr, data)[1]["sampling_importance_ratio"]
    assert found == pytest.approx(clean - math.exp(gap) / float(counts(data)["global_valid_toks"]), rel=1e-4)


def test_the_probability_error_of_a_token_that_counts_half_is_its_root():
    # As NeMo-RL computes it: mean of exp(|gap| * mask), weighed by the mask.
    curr, data = make_batch(gap=0.5)
    data["sample_mask"] = torch.tensor([0.5, 1.0, 0.25, 0.0, 2.0, 0.125, 1.0, 0.75])
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    gaps = (data["prev_logprobs"] - data["generation_logprobs"])[:, 1:].abs()
    expected = float(((gaps * mask).exp() * mask).sum() / mask.sum())
    assert run(make_loss(), curr, data)[1]["token_mult_prob_error"] == pytest.approx(expected, rel=1e-5)


def test_metrics_of_tokens_weigh_a_fraction_of_a_response():
    curr, data = make_batch()
    data["sample_mask"] = torch.tensor([0.5, 1.0, 0.25, 0.0, 2.0, 0.125, 1.0, 0.75])
    _, metrics, _ = run(make_loss(), curr, data)
    gap = by_hand(lambda curr, prev, generation, reference: abs(prev - generation), curr, data)
    assert metrics[PREFIX + "abs_gap"] == pytest.approx(gap, rel=1e-5)
    data["sample_mask"] = data["sample_mask"].sign()
    counted = by_hand(lambda curr, prev, generation, reference: abs(prev - generation), curr, data)
    assert abs(counted - gap) > 1e-4
    signs = metrics[PREFIX + "tokens_positive"] + metrics[PREFIX + "tokens_negative"]
    assert signs == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["tbpo", "grpo_tis"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("from_sampler", [False, True])
def test_the_reference_kl_is_its_definition(name, kind, from_sampler):
    curr, data = make_batch()
    data["reference_policy_logprobs"][0, 6] += 3.0  # held at 2 on the way in
    data["reference_policy_logprobs"][1, 6] -= 1.9  # k2 and k3 held at .5 on the way out
    estimate = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": k3}[kind]

    def per_token(curr, prev, generation, reference):
        weight = math.exp(curr - generation) if from_sampler else 1.0
        return max(-0.5, min(0.5, weight * estimate(max(-2.0, min(2.0, reference - curr)))))

    replaced = Replaced(
        reference_policy_kl_penalty=0.1,
        reference_policy_kl_type=kind,
        kl_input_clamp_value=2.0,
        kl_output_clamp_value=0.5,
        use_on_policy_kl_approximation=from_sampler,
    )
    with_kl, metrics, grad = run(make_loss(name, replaced=replaced), curr, data)
    alone, _, alone_grad = run(make_loss(name), curr, data)
    expected = by_hand(per_token, curr, data, by_response=name == "tbpo")
    assert metrics["kl_penalty"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert with_kl - alone == pytest.approx(0.1 * expected, abs=1e-6)
    assert (grad - alone_grad).abs().max() > 1e-4


def test_the_gradient_of_the_reference_kl_goes_through_estimate_and_weight():
    curr, data = make_batch()
    replaced = Replaced(reference_policy_kl_penalty=0.1)
    grad = run(make_loss("grpo_tis", replaced=replaced), curr, data)[2]
    alone = run(make_loss("grpo_tis"), curr, data)[2]
    # x = reference - curr: d k3 / d curr = 1 - e^x from the estimate, k3 from the weight
    x = float(data["reference_policy_logprobs"][0, 6] - curr.detach()[0, 5])
    expected = 0.1 * (1 - math.exp(x) + k3(x)) / float(counts(data)["global_valid_toks"])
    assert float(grad[0, 5] - alone[0, 5]) == pytest.approx(expected, rel=1e-3, abs=1e-7)
    # held, neither has one
    data["reference_policy_logprobs"][0, 6] = curr[0, 5].item() + 30.0
    held = run(make_loss("grpo_tis", replaced=replaced), curr, data)[2]
    assert float(held[0, 5]) == pytest.approx(float(alone[0, 5]), abs=1e-9)


@pytest.mark.parametrize("from_sampler", [False, True])
def test_a_log_ratio_held_on_the_way_in_has_no_gradient_also_where_the_estimate_is_not_held(from_sampler):
    kl = ReferenceKL(penalty=0.5, kind="k1", input_clamp=2.0, output_clamp=None, from_sampler=from_sampler)
    curr = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    kl.per_token(curr, torch.tensor([[-0.5, -4.0]]), torch.tensor([[-1.0, -1.0]])).sum().backward()
    # k1 = -x with x = .5: d/dcurr is 1 from the estimate and -x from the weight; x = -3 is held
    assert curr.grad.tolist() == [[0.5 * (1 - 0.5), 0.0]]


def test_a_weight_of_the_reference_kl_that_is_not_finite_counts_nothing():
    kl = ReferenceKL(penalty=1.0, kind="k3", input_clamp=20.0, output_clamp=10.0, from_sampler=True)
    curr = torch.tensor([[-1.0]], requires_grad=True)
    estimate = kl.per_token(curr, torch.tensor([[-2.0]]), torch.tensor([[-200.0]]))
    estimate.sum().backward()
    assert (estimate.item(), curr.grad.item()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reference_policy_kl_type": "k4"}, "reference_policy_kl_type='k4'; legal: k1, k2, k3"),
        ({"reference_policy_kl_penalty": -0.1}, "reference_policy_kl_penalty=-0.1; legal: 0 or more"),
        ({"kl_input_clamp_value": 0.0}, "kl_input_clamp_value=0.0; legal: more than 0, or null"),
        ({"kl_output_clamp_value": -1.0}, "kl_output_clamp_value=-1.0; legal: more than 0, or null"),
    ],
)
def test_a_kl_term_that_is_none_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        make_loss(replaced=Replaced(**{"reference_policy_kl_penalty": 0.1} | settings))


def test_bounds_of_a_kl_term_that_is_off_are_not_read():
    make_loss(replaced=Replaced(reference_policy_kl_penalty=0.0, kl_input_clamp_value=0.0))


FAULTS = {
    "prev_logprobs": math.nan,
    "generation_logprobs": -math.inf,
    "advantages": math.inf,
    "reference_policy_logprobs": -math.inf,
}


@every_objective
@pytest.mark.parametrize("where", FAULTS)
def test_a_number_that_is_not_finite_makes_the_loss_none_and_is_named(name, where):
    curr, data = make_batch()
    data[where][6, PROMPT + 2] = FAULTS[where]
    data[where][6, PROMPT + 4] = FAULTS[where]  # the first one is named
    data[where][3, PROMPT - 1] = FAULTS[where]  # of a prompt
    data[RESPONSE_KEY] = torch.tensor([40, 11, 12, 13, 14, 15, 16, 17])
    loss_fn = make_loss(name, replaced=WITH_KL)
    loss, _, grad = run(loss_fn, curr, data)
    assert math.isnan(loss)
    assert grad.isnan().any(dim=-1).tolist() == [row == 6 for row in range(8)]
    (found,) = loss_fn.nonfinite
    assert str(found) == f"response 16, response token 2: {where} is {FAULTS[where]}"


def test_the_learners_own_log_probability_is_named_and_the_first_response_wins():
    curr, data = make_batch()
    broken = curr.detach().clone()
    broken[5, 8], broken[2, 10] = math.nan, math.inf
    data[RESPONSE_KEY] = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])
    loss_fn = make_loss()
    assert math.isnan(run(loss_fn, broken, data)[0])
    # row 5 is response 2, row 2 response 5; column 8 predicts token 9, the sixth after a prompt of 4
    assert [str(found) for found in loss_fn.nonfinite] == ["response 2, response token 5: curr_logprobs is nan"]


def test_a_recorded_step_keeps_the_ratios_and_log_probabilities_that_the_loss_saw(tmp_path):
    curr, data = make_batch()
    data["input_ids"][0] = 1  # a loop from the prompt to the end
    loss_fn = make_loss()
    expected = run_parts(loss_fn, curr, data)
    loss_fn.recording = Recording(tmp_path, DiagnosticsCollector(7))
    # As a worker gets it.
    loss_fn = pickle.loads(pickle.dumps(loss_fn))
    assert run_parts(loss_fn, curr, data)[:2] == expected[:2]
    loss_fn.recording.write()
    arrays = read_diagnostics(tmp_path, 7).arrays
    counted = data["sample_mask"].bool()
    torch.testing.assert_close(torch.from_numpy(arrays["seq_prox_ratio"]), DRIFT[counted].exp(), rtol=1e-4, atol=0)
    drift = torch.from_numpy(arrays["token_curr_logprob"] - arrays["token_prev_logprob"])
    assert len(drift) == int(data["token_mask"][counted][:, 1:].sum())
    assert drift.abs().max() <= DRIFT.abs().max() + 1e-5
    assert set(arrays["seq_kept"].tolist()) == {True, False}
    assert arrays["position_tokens"].sum() == len(drift)
    assert arrays["position_error_tokens"].tolist() == [1.0] * (24 - PROMPT)


def test_the_first_step_of_a_start_and_every_period_are_recorded(tmp_path):
    recorder = Recorder(tmp_path, period=4, step=2)
    assert [step for step in range(3, 13) if recorder.begin_step()] == [3, 4, 8, 12]


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path, capsys):
    (tmp_path / "diagnostics").write_text("in the way")
    Recording(tmp_path, DiagnosticsCollector(1)).write()
    assert "every node needs logger.log_dir" in capsys.readouterr().out
    # A disk that is full says so no sooner than when a file is written.
    (tmp_path / "full" / "diagnostics" / "step_000001.jsonl").mkdir(parents=True)
    Recording(tmp_path / "full", DiagnosticsCollector(1)).write()
    assert "diagnostics are not written" in capsys.readouterr().out
