"""Rows that runs with adapters leave behind."""

import json

import numpy as np
import pytest

from qarl_nemo.metrics.events import METRICS_FILE
from qarl_nemo.metrics.runs import load_run

SETTINGS = {"num_steps": 25, "grpo": {"max_num_steps": 25}, "diagnostics": False}
LORA = {"lora": {"rank": 8}}


def halve_gaps(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    key = "mismatch/abs_gap_mean"
    path.write_text("".join(json.dumps(row | {key: row[key] / 2}) + "\n" for row in rows))


def test_adapters_are_held_against_all_weights_in_their_format(make_run, record):
    for seed in (1, 2):
        make_run(f"runs/lora{seed}", arm="LoRA w4a16, noise", seed=seed, policy=LORA, noise=True, **SETTINGS)
        whole = make_run(
            f"runs/whole{seed}", arm="full-parameter QaRL w4a16", seed=seed, policy={"lora": None}, **SETTINGS
        )
        halve_gaps(whole / METRICS_FILE)
    folder = make_run("runs/bf16", arm="LoRA BF16", alignment="none", seed=1, policy=LORA, **SETTINGS).parent
    rows = record("lora_runs", folder)
    for seed in (1, 2):
        run, whole = load_run(folder / f"lora{seed}"), load_run(folder / f"whole{seed}")
        arm = f"w4a16_noise_seed{seed}"
        gaps = [np.mean(one.column("mismatch/abs_gap_mean")) for one in (run, whole)]
        assert rows[f"lora_gap_ratio_{arm}"].value == pytest.approx(gaps[0] / gaps[1], rel=1e-4)
        assert 1.9 < rows[f"lora_gap_ratio_{arm}"].value < 2.1
        assert rows[f"lora_gap_ratio_{arm}"].goal == 1.5
        assert rows[f"lora_reward_{arm}"].value > 1.1 * rows[f"lora_reward_mean_{arm}"].value
        assert rows[f"lora_accuracy_{arm}"].value == pytest.approx(run.column("validation/reward")[-1], rel=1e-4)
        assert [name for name in rows if name.startswith("lora_entropy_stage") and name.endswith(arm)] == [
            f"lora_entropy_stage{stage}_{arm}" for stage in range(5)
        ]
    # All weights have no ratio to themselves, and nothing trained them in BF16.
    ratios = {name for name in rows if "gap_ratio" in name}
    assert ratios == {f"lora_gap_ratio_w4a16_noise_seed{seed}" for seed in (1, 2)}
    assert "lora_entropy_bf16_seed1" in rows
    assert {row.command for row in rows.values()} == {"qarl train examples/configs/runs.yaml"}
