"""The harness of whole steps: memory is given to the phase that held it, and a plan adds up what parts take."""

import csv
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from qarl_nemo.memory import ModelSize
from qarl_nemo.metrics.runs import load_run

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "models" / "qwen3-30b-a3b"
# Refit, rollout, rewards, log-probabilities and update, as NeMo-RL times them.
SECONDS = {
    "prepare_for_generation/total": 2,
    "generation": 10,
    "reward_calculation": 0,
    "logprob_inference_prep": 1,
    "policy_and_reference_logprobs": 3,
    "training_prep": 0,
    "policy_training": 6,
}


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools" / "bench" / "full_size")
    import phase_memory
    import plan
    import step_time

    yield phase_memory, plan, step_time
    for name in ("phase_memory", "plan", "step_time", "record", "phase_bars"):
        sys.modules.pop(name, None)


def write_run(folder, *, ends):
    """Steps of 22 s that end at these times; the GPU holds as many GiB as the second of the step."""
    start = folder / "logs" / "exp_001"
    writer = SummaryWriter(log_dir=str(start / "tensorboard"))
    for step, end in enumerate(ends, start=1):
        writer.add_scalar("train/loss", 0.0, step, walltime=end)
        writer.add_scalar("timing/train/total_step_time", 22.0, step, walltime=end)
        for phase, seconds in SECONDS.items():
            writer.add_scalar(f"timing/train/{phase}", seconds, step, walltime=end)
        writer.add_scalar("train/qarl/memory/update_reserved_gib", 90.0 + step, step, walltime=end)
    writer.close()
    with (folder / "memory.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["time_s", "host_gib", "gpu0_gib", "gpu1_gib"])
        for second in np.arange(ends[0] - 22, ends[-1] + 5):
            rows.writerow([second, 40.0, 1.0, (second - ends[0]) % 22])


def test_memory_is_given_to_the_phase_that_held_it(harness, tmp_path):
    phase_memory, _, _ = harness
    write_run(tmp_path, ends=[1000.0, 1022.0, 1044.0])
    run = load_run(tmp_path / "logs")
    found = phase_memory.memory_figures(tmp_path, run, [2, 3], MODEL / "config.json")
    # Seconds 0 and 1 of a step are the refit's, 2 to 11 the rollout's, 13 to 15 those of log-probabilities, 16 to 21
    # the update's.
    ends = {"refit": 1.0, "rollout": 11.0, "prev_logprobs": 15.0, "update": 21.0}
    assert {phase: found[f"full_memory_gib_{phase}"][0] for phase in ends} == ends
    assert found["full_memory_host_gib_rollout"] == (40.0, "GiB", "<=")
    assert found["full_memory_reserved_gib_update"][0] == 93.0
    # Nothing is said about the first step, nor an error without what was allocated.
    assert "full_memory_error" not in found


def rates(step_time, **changes):
    launched = step_time.Launched(0.0, 0.0)
    plain = step_time.Rates({32: 0.01, 128: 0.02}, 1e12, launched, launched, 0.5, 1.0)
    return replace(plain, **changes)


def test_a_line_goes_through_both_measured_sizes(harness):
    _, _, step_time = harness
    line = step_time.Launched.through(0.010, 0.034)
    assert line.seconds(8192) == pytest.approx(0.010)
    assert line.seconds(32768) == pytest.approx(0.034)
    assert line.fixed == pytest.approx(0.002)


def test_answers_of_unequal_length_run_at_the_speed_of_those_that_are_left(harness):
    _, _, step_time = harness
    # Without attention nothing is read from the cache; 80 sequences lie half-way between 32 and 128.
    model = replace(ModelSize.read(MODEL), num_kv_heads=0)
    work = step_time.Workload(1, 1, 80, 0, 100, 100, 1, 8192, 8192)
    assert step_time.phases(model, rates(step_time), work)["rollout"] == pytest.approx(100 * 0.015, rel=1e-6)
    # Two answers of 100 and 300 tokens are as slow as 32 sequences.
    two = replace(work, responses=2, longest=300)
    assert step_time.phases(model, rates(step_time), two)["rollout"] == pytest.approx(300 * 0.01, rel=1e-6)


def test_arms_are_compared_by_their_median_step(harness, tmp_path):
    import phase_bars
    import record

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, ends=(100.0, 122.0, 144.0))
    run = load_run(tmp_path / "one" / "logs")
    assert record.ratios(run, [f"two={tmp_path / 'two'}"], skip=[1]) == {"full_step_over_two": (1.0, "", "<=")}
    phase_memory, _, _ = harness
    # The first row of memory.csv is written a second after the command, 22 s before the first step's end.
    assert phase_memory.start_seconds(tmp_path / "one", run) == pytest.approx(1.0)
    figures = record.figures(run, [2, 3], tokens=1.0, gpus=1)
    # A run of NeMo-RL's own launcher says nothing of our gap, so that it has no such row.
    assert "full_gap" not in figures
    rows = {f"{name}_w4a16_a": value for name, (value, _, _) in figures.items()}
    assert phase_bars.phase_bars(rows, "a") == {
        "w4a16": {"refit": 2.0, "rollout": 10.0, "prev_logprobs": 3.0, "update": 6.0, "rest": 1.0}
    }


def test_an_update_launches_each_layer_of_each_micro_batch(harness):
    _, _, step_time = harness
    model, launched = ModelSize.read(MODEL), step_time.Launched(0.001, 0.0)
    work = step_time.Workload(2, 2, 16, 1000, 1000, 1000, 2, 4000, 8000)
    computed, free = (
        step_time.phases(model, rates(step_time, forward=cost, training=cost), work)
        for cost in (launched, step_time.Launched(0.0, 0.0))
    )
    # 8 answers of 2000 tokens a GPU: 4 an update, two micro-batches each; forward again in the backward. The log-
    # probabilities take two micro-batches.
    assert computed["update"] - free["update"] == pytest.approx(2 * 2 * 48 * 2 * 0.001)
    assert computed["prev_logprobs"] - free["prev_logprobs"] == pytest.approx(2 * 48 * 0.001)


def test_gradients_cross_the_network_only_between_nodes(harness):
    _, _, step_time = harness
    model, work = ModelSize.read(MODEL), step_time.Workload(8, 8, 64, 10, 10, 10, 1, 8192, 8192)
    one, eight = (
        step_time.phases(model, rates(step_time), replace(work, gpus=gpus, responses=8 * gpus))["update"]
        for gpus in (8, 64)
    )
    # 7.25 GB of a rank's experts to and from seven other nodes, 3.08 GB of everything else to and from 63 other GPUs.
    experts, others = 28.991e9 / 8 * 2, 1.5411e9 * 2
    assert eight - one == pytest.approx(2 * (experts * 7 / 8 + others * 63 / 64) / 40e9, rel=1e-3)


def test_the_plan_is_computed_from_the_results(harness):
    _, plan, _ = harness
    model = ModelSize.read(plan.MODEL)
    for work, arm in itertools.product(plan.PLANNED.values(), plan.ARMS):
        found = {name: value for name, value, _ in plan.planned(model, work, arm)}
        phases = [value for name, value in found.items() if name.startswith("phase_s_")]
        assert found["step_s"] == pytest.approx(sum(phases))
        assert all(value > 0 for value in found.values())
