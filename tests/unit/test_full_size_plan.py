"""The time model of whole steps, and the plan that adds up its parts."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from qarl_nemo.memory import ModelSize
from qarl_nemo.metrics.results import append_results, read_results
from support.full_size import MODEL

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(autouse=True)
def harness(tools):
    tools("bench/full_size")


def rates(**changes):
    import step_time

    launched = step_time.Launched(0.0, 0.0)
    plain = step_time.Rates({32: 0.01, 128: 0.02}, 1e12, launched, launched, 0.5, 1.0)
    return replace(plain, **changes)


def test_a_line_goes_through_both_measured_sizes():
    import step_time

    line = step_time.Launched.through(0.010, 0.034)
    assert line.seconds(8192) == pytest.approx(0.010)
    assert line.seconds(32768) == pytest.approx(0.034)
    assert line.fixed == pytest.approx(0.002)


def test_figures_of_another_gpu_do_not_count(tmp_path):
    import step_time

    for name in ("vllm", "megatron", "full_size"):
        rows = read_results(RESULTS / f"{name}.json")
        others = [row.model_copy(update={"value": 1e9, "hardware": "1x NVIDIA H100 80GB HBM3"}) for row in rows]
        append_results(tmp_path / f"{name}.json", [*rows, *others])
    assert step_time.Rates.read(tmp_path, "bf16", 4) == step_time.Rates.read(RESULTS, "bf16", 4)


def test_answers_of_unequal_length_run_at_the_speed_of_those_that_are_left():
    import step_time

    # Without attention nothing is read from the cache; 80 sequences lie half-way between 32 and 128.
    model = replace(ModelSize.read(MODEL), num_kv_heads=0)
    work = step_time.Workload(1, 1, 80, 0, 100, 100, 1, 8192, 8192)
    assert step_time.phases(model, rates(), work)["rollout"] == pytest.approx(100 * 0.015, rel=1e-6)
    # Two answers of 100 and 300 tokens are as slow as 32 sequences.
    two = replace(work, responses=2, longest=300)
    assert step_time.phases(model, rates(), two)["rollout"] == pytest.approx(300 * 0.01, rel=1e-6)


def test_an_update_launches_each_layer_of_each_micro_batch():
    import step_time

    model, launched = ModelSize.read(MODEL), step_time.Launched(0.001, 0.0)
    work = step_time.Workload(2, 2, 16, 1000, 1000, 1000, 2, 4000, 8000)
    computed, free = (
        step_time.phases(model, rates(forward=cost, training=cost), work)
        for cost in (launched, step_time.Launched(0.0, 0.0))
    )
    # 8 answers of 2000 tokens a GPU: 4 an update, two micro-batches each; forward again in the backward. The log-
    # probabilities take two micro-batches.
    assert computed["update"] - free["update"] == pytest.approx(2 * 2 * 48 * 2 * 0.001)
    assert computed["prev_logprobs"] - free["prev_logprobs"] == pytest.approx(2 * 48 * 0.001)


def test_gradients_cross_the_network_only_between_nodes():
    import step_time

    model, work = ModelSize.read(MODEL), step_time.Workload(8, 8, 64, 10, 10, 10, 1, 8192, 8192)
    one, eight = (
        step_time.phases(model, rates(), replace(work, gpus=gpus, responses=8 * gpus))["update"] for gpus in (8, 64)
    )
    # 7.25 GB of a rank's experts to and from seven other nodes, 3.08 GB of everything else to and from 63 other GPUs.
    experts, others = 28.991e9 / 8 * 2, 1.5411e9 * 2
    assert eight - one == pytest.approx(2 * (experts * 7 / 8 + others * 63 / 64) / 40e9, rel=1e-3)


def test_halves_of_the_gpus_take_turns_or_work_at_once(monkeypatch):
    import plan
    import step_time

    # A token takes as long with twice the sequences; a layer of a micro-batch as long as its tokens.
    launched, model = step_time.Launched(0.0, 1e-6), replace(ModelSize.read(MODEL), num_kv_heads=0)
    monkeypatch.setattr(
        step_time.Rates, "read", lambda *_: rates(decode={1: 0.01, 512: 0.01}, forward=launched, training=launched)
    )
    work = plan.PLACED["a_1n8g"][1]
    found = {name: value for name, value, _ in plan.placed(model, work, "w4a16")}
    shared = step_time.phases(model, step_time.Rates.read(), work)
    learning = shared["prev_logprobs"] + shared["update"]
    assert found["s_colocated"] == pytest.approx(sum(shared.values()))
    assert found["s_separate"] == pytest.approx(sum(shared.values()) + learning)
    assert found["s_asynchronous"] == pytest.approx(max(shared["rollout"], 2 * learning) + shared["refit"])


def test_one_gpu_serves_and_three_learn(monkeypatch):
    import plan
    import step_time

    launched, model = step_time.Launched(0.0, 1e-6), replace(ModelSize.read(MODEL), num_kv_heads=0)
    monkeypatch.setattr(
        step_time.Rates, "read", lambda *_: rates(decode={1: 0.01, 512: 0.01}, forward=launched, training=launched)
    )
    work = plan.SPLIT["a"][1]
    found = {name: value for name, value, _ in plan.split(model, work, "w4a16")}
    # 293,248 tokens pass a third of the layers: 8 micro-batches of log-probabilities, and 8 in each of two updates.
    assert work.tokens == 293248
    third = step_time.phases(replace(model, num_layers=16), rates(forward=launched, training=launched), one_gpu(work))
    learning = (third["prev_logprobs"] + third["update"]) * (8 + 2) / 8
    assert found["s_learning"] == pytest.approx(learning)
    # The engine has all answers, whose tokens take as long here as a quarter of them.
    rollout = step_time.phases(model, step_time.Rates.read(), one_gpu(work))["rollout"]
    assert found["s_separate"] == pytest.approx(rollout + learning + 0.5 + 1.0)
    assert found["s_asynchronous"] == pytest.approx(max(rollout, learning) + 0.5)
    # A pipeline is no faster than three GPUs without one.
    apart = step_time.phases(model, step_time.Rates.read(), replace(work, gpus=3, ep=1))
    assert found["s_learning"] > apart["prev_logprobs"] + apart["update"]


def one_gpu(work):
    return replace(work, gpus=1, ep=1)


def test_the_plan_is_computed_from_the_results():
    import plan

    model = ModelSize.read(plan.MODEL)
    for work, arm in itertools.product(plan.PLANNED.values(), plan.ARMS):
        found = {name: value for name, value, _ in plan.planned(model, work, arm)}
        phases = [value for name, value in found.items() if name.startswith("phase_s_")]
        assert found["step_s"] == pytest.approx(sum(phases))
        assert all(value > 0 for value in found.values())
