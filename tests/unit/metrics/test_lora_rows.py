"""Rows that runs with adapters leave behind."""

import json

import numpy as np
import pytest

from qarl_nemo.metrics.events import METRICS_FILE
from qarl_nemo.metrics.results import Figure, record_figures
from qarl_nemo.metrics.runs import load_run

SETTINGS = {"num_steps": 25, "grpo": {"max_num_steps": 25}, "diagnostics": False}
LORA = {"lora": {"rank": 8}}


def halve_gaps(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    key = "mismatch/abs_gap_mean"
    path.write_text("".join(json.dumps(row | {key: row[key] / 2}) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("num_steps", "tested"), [(12, set()), (25, {"accuracy_first", "accuracy"}), (30, {"accuracy_first"})]
)
def test_only_the_last_weights_have_a_last_accuracy(num_steps, tested, make_run, record):
    settings = SETTINGS | {"num_steps": num_steps, "grpo": {"max_num_steps": num_steps}}
    rows = record("lora_runs", make_run("local_lora/one", arm="LoRA w4a16", seed=1, policy=LORA, **settings).parent)
    assert {name for name in rows if "accuracy" in name and "seed" in name} == {
        f"lora_{kind}_w4a16_seed1" for kind in tested
    }


def test_adapters_are_held_against_all_weights_in_their_format(make_run, record):
    for seed in (1, 2):
        make_run(f"local_lora/lora{seed}", arm="LoRA w4a16, noise", seed=seed, policy=LORA, noise=True, **SETTINGS)
        whole = make_run(
            f"local_lora/whole{seed}", arm="full-parameter QaRL w4a16", seed=seed, policy={"lora": None}, **SETTINGS
        )
        halve_gaps(whole / METRICS_FILE)
    folder = make_run("local_lora/bf16", arm="LoRA BF16", alignment="none", seed=1, policy=LORA, **SETTINGS).parent
    rows = record("lora_runs", folder)
    for seed in (1, 2):
        run, whole = load_run(folder / f"lora{seed}"), load_run(folder / f"whole{seed}")
        arm = f"w4a16_noise_seed{seed}"
        gaps = [np.mean(one.column("mismatch/abs_gap_mean")) for one in (run, whole)]
        assert rows[f"lora_gap_ratio_{arm}"].value == pytest.approx(gaps[0] / gaps[1], rel=1e-4)
        assert 1.9 < rows[f"lora_gap_ratio_{arm}"].value < 2.1
        assert rows[f"lora_gap_ratio_{arm}"].goal == 1.5
        assert rows[f"lora_reward_{arm}"].value > 1.1 * rows[f"lora_reward_mean_{arm}"].value
        rewards = run.column("reward/mean")
        assert rows[f"lora_reward_first_{arm}"].value == pytest.approx(rewards[:5].mean(), rel=1e-4)
        assert rows[f"lora_accuracy_{arm}"].value == pytest.approx(run.column("validation/reward")[-1], rel=1e-4)
        assert [name for name in rows if name.startswith("lora_entropy_stage") and name.endswith(arm)] == [
            f"lora_entropy_stage{stage}_{arm}" for stage in range(5)
        ]
    # All weights have no ratio to themselves, and nothing trained them in BF16.
    ratios = {name for name in rows if "gap_ratio" in name}
    assert ratios == {f"lora_gap_ratio_w4a16_noise_seed{seed}" for seed in (1, 2)}
    assert "lora_entropy_bf16_seed1" in rows
    assert {row.command for row in rows.values()} == {"qarl train examples/configs/local_lora.yaml"}


def test_without_such_a_run_the_gap_is_held_against_recorded_rows(make_run, record, tmp_path):
    nvfp4 = {"alignment": "aligned", "format": "nvfp4", "targets": ["attention", "mlp"]}
    folder = make_run("local_lora/w4a16", arm="LoRA w4a16, noise", seed=1, policy=LORA, **SETTINGS).parent
    make_run("local_lora/w4a16_2", arm="LoRA w4a16", seed=2, policy=LORA, **SETTINGS)
    make_run("local_lora/bf16", arm="LoRA BF16", alignment="none", seed=1, policy=LORA, **SETTINGS)
    make_run("local_lora/nvfp4", arm="LoRA nvfp4", seed=1, policy=LORA, qarl=nvfp4, **SETTINGS)
    gaps = {"real_m_d_qarl_w4a16_seed1_gap": 1e-5, "real_m_d_bf16_seed1_gap": 2e-5,
            "gap_aligned_nvfp4_mlp_attention": 4e-5, "gap_aligned_w4a16": 8e-5}  # fmt: skip
    recorded = [Figure(name, value, "nats", "<=") for name, value in gaps.items()]
    record_figures(tmp_path / "real_model.json", recorded, hardware="GPU", versions={}, command="earlier")
    assert not [name for name in record("lora_runs", folder) if "gap_ratio" in name]
    rows = record("lora_runs", folder, "--full-parameter", "real_m_d")
    divided = {
        "w4a16_noise_seed1": "real_m_d_qarl_w4a16_seed1_gap",
        "bf16_seed1": "real_m_d_bf16_seed1_gap",
        "nvfp4_seed1": "gap_aligned_nvfp4_mlp_attention",
    }
    # Nothing of the second seed was recorded, and the comparison's row is of other targets.
    assert {name for name in rows if "gap_ratio" in name} == {f"lora_gap_ratio_{arm}" for arm in divided}
    for arm, row in divided.items():
        ratio = rows[f"lora_gap_ratio_{arm}"]
        assert ratio.value == pytest.approx(rows[f"lora_gap_{arm}"].value / gaps[row], rel=1e-4)
        assert (ratio.goal, ratio.command) == (1.5, f"qarl train examples/configs/local_lora.yaml  # over {row}")


def test_seeds_have_a_mean_and_its_error_wherever_they_ran(make_run, record, tmp_path):
    folders = []
    for seed, scores in ((1, (0.2, 0.3)), (2, (0.1, 0.34))):
        run = make_run(
            f"seed{seed}/local_lora/run", arm="LoRA w4a16, noise", seed=seed, policy=LORA, noise=True, **SETTINGS
        )
        records = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]
        for at, score in zip((0, -1), scores, strict=True):
            records[at]["validation/reward"] = score
        (run / METRICS_FILE).write_text("".join(json.dumps(one) + "\n" for one in records))
        folders.append(run.rename(run.with_name(f"run-seed{seed}")).parent)
    rows = record("lora_runs", folders[0])
    assert not [name for name in rows if name.endswith("_error")]
    rows = record("lora_runs", folders[1], "--figure", tmp_path / "images" / "lora.png")
    found = {name.removesuffix("_mean"): row.value for name, row in rows.items() if name.endswith("_mean")}
    assert found["lora_accuracy_first_w4a16_noise"] == pytest.approx(0.15)
    assert found["lora_accuracy_w4a16_noise"] == pytest.approx(0.32)
    # of two values, half of their distance
    assert rows["lora_accuracy_w4a16_noise_error"].value == pytest.approx(0.02)
    kinds = ("reward_first", "reward", "reward_mean", "accuracy_first", "accuracy", "entropy", "gap")
    assert set(found) == {f"lora_{kind}_w4a16_noise" for kind in kinds}
    assert (tmp_path / "images" / "lora.png").stat().st_size > 10_000
    assert len(list((tmp_path / "runs" / "local_lora").iterdir())) == 2
