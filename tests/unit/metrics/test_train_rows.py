"""Rows that runs of the shipped examples leave behind."""

import json

import numpy as np
import pytest

from qarl_nemo.metrics.recorded import FACTS_FILE
from qarl_nemo.metrics.runs import load_run


def test_the_demo_says_what_it_ran_on(make_run, record):
    rows = record("train_runs", make_run("local_demo", diagnostics=False), "--command", "make demo")
    assert rows["demo_train_s"].goal == 180
    assert rows["refit_s"].value > 0
    assert {(row.hardware, row.command) for row in rows.values()} == {("1x NVIDIA H200", "make demo")}


def test_a_comparison_has_every_seed_and_each_arms_gap(make_run, record):
    for seed in (1, 2):
        make_run(f"local_compare/aligned{seed}", arm="QaRL w4a16", seed=seed, diagnostics=False)
    folder = make_run("local_compare/plain", alignment="none", arm="BF16", seed=1, diagnostics=False).parent
    rows = record("train_runs", folder)
    gaps = [np.mean(load_run(folder / f"aligned{seed}").column("mismatch/abs_gap_mean")) for seed in (1, 2)]
    assert rows["aligned_gap_w4a16"].value == pytest.approx(np.mean(gaps), rel=1e-4)
    assert {"compare_qarl_w4a16_seed1", "compare_qarl_w4a16_seed2", "compare_bf16_seed1", "none_gap_bf16"} <= {*rows}
    assert {row.command for row in rows.values()} == {"qarl train examples/configs/local_compare.yaml"}


def test_arms_of_megatron_are_compared_over_the_steps_that_all_have(make_run, record):
    short = make_run("local_megatron/bf16", alignment="none", arm="BF16", num_steps=5, diagnostics=False)
    long = make_run("local_megatron/w4a16", arm="QaRL w4a16", num_steps=12, diagnostics=False)
    rows = record("train_runs", long.parent)
    assert rows["megatron_qarl_w4a16_steps"].value == 12
    gaps = load_run(long).column("mismatch/abs_gap_mean")
    assert rows["megatron_qarl_w4a16_gap"].value == pytest.approx(gaps[:5].mean(), rel=1e-4)
    assert rows["megatron_qarl_w4a16_gap"].value != pytest.approx(gaps.mean(), rel=1e-3)
    assert "megatron_bf16_rollout_s" in rows
    for run in (short, long):
        (run / FACTS_FILE).write_text(json.dumps({"hardware": "2 cores of AMD EPYC", "versions": {}}))
    assert not [
        name for name in record("train_runs", long.parent) if name.startswith("megatron_cpu") and name.endswith("_s")
    ]
    assert "megatron_cpu_bf16_gap" in record("train_runs", long.parent)


def test_a_run_with_vllm_has_phases_and_an_arm_of_several_has_none(make_run, record):
    rows = record("train_runs", make_run("local_vllm_gpu", diagnostics=False))
    assert rows["vllm_gpu_steps"].value == 12
    assert "vllm_gpu_update_s" in rows
    arm = make_run("local_vllm_gpu_formats/w4a8", arm="QaRL w4a8", diagnostics=False)
    rows = record("train_runs", arm.parent, "--command", "other")
    assert [name for name in rows if "qarl_w4a8" in name] == [
        f"vllm_gpu_formats_qarl_w4a8_{figure}" for figure in ("reward_first", "reward_final", "gap")
    ]
