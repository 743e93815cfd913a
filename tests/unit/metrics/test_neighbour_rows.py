"""Rows that a comparison with the paper's neighbours leaves behind."""

import numpy as np
import pytest

from qarl_nemo.metrics.runs import load_run


def test_every_seed_of_an_arm_has_its_rows(make_run, record, tmp_path, capsys):
    folder = tmp_path / "local_progressive"
    settings = {"num_steps": 25, "grpo": {"max_num_steps": 25}, "diagnostics": False}
    for seed in (1, 2):
        make_run(folder / f"narrow{seed}", arm="2 bits, clipped_range", seed=seed, **settings)
    make_run(folder / "short", arm="4 bits", seed=1, **settings | {"num_steps": 24})
    rows = record("neighbour_runs", folder, "--figure", tmp_path / "images" / "progressive.png")
    assert (tmp_path / "images" / "progressive.png").stat().st_size > 10_000
    assert "short: left out, 24 of 25 steps" in capsys.readouterr().out
    assert not [name for name in rows if "4_bits" in name]
    for seed in (1, 2):
        run, arm = load_run(folder / f"narrow{seed}"), f"progressive_2_bits_clipped_range_seed{seed}"
        # Rows have five digits; the final reward, which is another, differs in the first.
        assert rows[f"{arm}_reward_mean"].value == pytest.approx(np.mean(run.column("reward/mean")), rel=1e-4)
        assert rows[f"{arm}_reward_final"].value > 1.1 * rows[f"{arm}_reward_mean"].value
        assert rows[f"{arm}_test_accuracy"].value == pytest.approx(run.column("validation/reward")[-1], rel=1e-4)
        # 0.01 / step, on average over 25 steps.
        assert rows[f"flips_{arm}_codes"].value == pytest.approx(
            0.01 * sum(1 / step for step in range(1, 26)) / 25, rel=1e-4
        )
        assert f"flips_{arm}_codes_in" not in rows
    for kind in ("test_accuracy", "reward_mean"):
        values = [rows[f"progressive_2_bits_clipped_range_seed{seed}_{kind}"].value for seed in (1, 2)]
        name = f"progressive_2_bits_clipped_range_{kind}"
        assert rows[f"{name}_mean"].value == pytest.approx(sum(values) / 2, rel=1e-4)
        # of two values, half of their distance
        assert rows[f"{name}_error"].value == pytest.approx(abs(values[0] - values[1]) / 2, rel=1e-2)
    assert "flips_progressive_2_bits_clipped_range_codes_mean" in rows
    assert {row.command for row in rows.values()} == {"qarl train examples/configs/local_progressive.yaml"}


def test_every_stage_has_its_gap(make_run, record):
    settings = {"num_steps": 25, "grpo": {"max_num_steps": 25}, "diagnostics": False}
    run = load_run(
        make_run("local_gsm8k_progressive/run", arm="8, 4 bits", seed=1, grids=[8] * 20 + [4] * 5, **settings)
    )
    rows = record("neighbour_runs", run.path.parent)
    gaps = run.column("mismatch/abs_gap_mean")
    assert gaps[20:].mean() != pytest.approx(gaps[:20].mean(), rel=1e-3)
    for bits, stage in ((8, gaps[:20]), (4, gaps[20:])):
        name = f"progressive_gsm8k_8_4_bits_seed1_gap_{bits}_bits"
        assert rows[name].value == pytest.approx(stage.mean(), rel=1e-4)
    # 0.01 / step in the 20 and the 5 steps of the stages.
    for bits, steps in ((8, range(1, 21)), (4, range(21, 26))):
        flips = rows[f"flips_progressive_gsm8k_8_4_bits_seed1_codes_{bits}_bits"].value
        assert flips == pytest.approx(0.01 * sum(1 / step for step in steps) / len(steps), rel=1e-4)


def test_a_folder_that_is_no_comparison_is_refused(record, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        record("neighbour_runs", tmp_path / "local_demo")
    assert "local_gsm8k_qurl, local_progressive, local_nested" in capsys.readouterr().err
