import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from qarl_nemo.layers.install import InstallRow
from qarl_nemo.metrics.report.arms import group_by_arm, moving_mean
from qarl_nemo.metrics.runs import load_run, load_runs
from qarl_nemo.metrics.summary import growing_mismatch, smoothing_window, summarize_run


def write_records(run_dir, records):
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run_dir


def test_a_complete_run_misses_nothing(make_run):
    run = load_run(make_run("demo", num_steps=4))
    assert run.missing == ()
    assert (run.name, run.arm, run.seed) == ("demo", "aligned w4a16 tbpo", 0)
    assert run.steps.tolist() == [1, 2, 3, 4]
    assert run.setting("qarl.group_size") == 32
    assert run.setting("qarl.group_size.deeper") is None
    assert run.diagnostics.step == 4
    assert run.examples[0]["step"] == 4


def test_what_a_killed_run_did_not_write_is_listed(tmp_path):
    run = load_run(write_records(tmp_path / "killed", [{"step": 1, "reward/mean": 0.5}]))
    assert [sentence.split(":")[0] for sentence in run.missing] == ["config.yaml", "diagnostics/", "quantized.json"]
    assert run.arm == "killed"


def test_everything_that_is_not_a_run_is_named_with_what_was_looked_for(tmp_path, make_run):
    (tmp_path / "empty").mkdir()
    make_run("group/inner", num_steps=1, diagnostics=False)
    with pytest.raises(ValueError, match="not a run directory") as error:
        load_runs([tmp_path / name for name in ("absent", "empty", "group", "group/inner/metrics.jsonl")])
    absent, empty, group, file = str(error.value).splitlines()[1:]
    assert "absent: no such directory (looked for config.yaml or metrics.jsonl" in absent
    assert empty.endswith("empty: has neither config.yaml nor metrics.jsonl, nor NeMo-RL's tensorboard/")
    assert group.endswith(f"these folders in it are runs: {tmp_path / 'group' / 'inner'}")
    assert file.endswith("metrics.jsonl: is a file; name the folder of its run")
    with pytest.raises(ValueError, match="no run directories given"):
        load_runs([])


def test_the_folder_of_a_comparison_stands_for_its_runs(tmp_path, make_run):
    for name in ("ours-seed2", "ours-seed1", "tried-by-hand"):
        make_run(f"group/{name}", num_steps=1, diagnostics=False)
    for name in ("ours-seed1", "ours-seed2"):
        (tmp_path / "group" / name / "arm.yaml").touch()
    (tmp_path / "group" / "report.html").touch()
    make_run("alone", num_steps=1, diagnostics=False)
    runs = load_runs([tmp_path / "alone", tmp_path / "group"])
    assert [run.path.name for run in runs] == ["alone", "ours-seed1", "ours-seed2"]
    with pytest.raises(ValueError, match="named more than once") as error:
        load_runs([tmp_path / "group", tmp_path / "group" / "ours-seed2"])
    assert "seed1" not in str(error.value)


def test_one_run_is_not_drawn_as_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [write_records(Path(name), [{"step": 1}]) for name in ("a", "b", "c")]
    (tmp_path / "link").symlink_to(paths[1])
    with pytest.raises(ValueError, match="named more than once") as error:
        load_runs([*paths, tmp_path / "a", tmp_path / "link"])
    assert f"a (as a, {tmp_path / 'a'}); b (as b, {tmp_path / 'link'}); name each run once" in str(error.value)
    assert len(load_runs(paths)) == 3


def test_runs_of_one_name_go_by_their_directory(tmp_path):
    for folder in ("a/x", "a/y", "b/x"):
        write_records(tmp_path / folder, [{"step": 1}])
        OmegaConf.save({"run": {"name": "run"}}, tmp_path / folder / "config.yaml")
    assert [run.name for run in load_runs([tmp_path / "a/x", tmp_path / "a/y"])] == ["x", "y"]
    names = [run.name for run in load_runs([tmp_path / "a/x", tmp_path / "a/y", tmp_path / "b/x"])]
    assert names == [str(tmp_path / "a/x"), "y", str(tmp_path / "b/x")]


def test_diagnostics_and_examples_are_those_of_the_newest_steps(make_run):
    run_dir = make_run("demo", num_steps=7)
    for step in range(1, 7):
        for suffix in (".npz", ".jsonl"):
            newest = run_dir / "diagnostics" / f"step_000007{suffix}"
            newest.with_name(f"step_{step:06d}{suffix}").write_bytes(newest.read_bytes())
    run = load_run(run_dir)
    assert run.diagnostics.step == 7
    assert [example["step"] for example in run.examples] == [7, 6, 5, 4, 3]


def test_null_and_absent_values_are_nan(tmp_path):
    run = load_run(write_records(tmp_path, [{"step": 1, "a": None}, {"step": 2, "a": 0.5, "b": 1}]))
    assert np.array_equal(run.column("a"), [np.nan, 0.5], equal_nan=True)
    assert np.array_equal(run.column("b"), [np.nan, 1.0], equal_nan=True)
    assert np.array_equal(run.column("never"), [np.nan, np.nan], equal_nan=True)


def test_band_shares_are_within_a_sign(tmp_path):
    records = [
        {"step": 1, "loss/fraction_positive": 0.4, "loss/in_band_fraction_positive": 0.3},
        {"step": 2, "loss/fraction_positive": 0.0, "loss/in_band_fraction_positive": 0.0},
    ]
    share = load_run(write_records(tmp_path, records)).column("band_share/in_band_positive")
    # 0.3 of 0.4 at step 1; at step 2 no response has the sign
    assert np.allclose(share, [0.75, np.nan], equal_nan=True)


@pytest.mark.parametrize(("num_steps", "window"), [(0, 1), (9, 1), (10, 2), (49, 9), (50, 10), (1000, 10)])
def test_window_is_a_fifth_of_the_run_up_to_ten_steps(num_steps, window):
    assert smoothing_window(num_steps) == window


def test_summary_compares_the_last_window_with_the_first(tmp_path):
    # ten steps, so the window is 2: first (0.1 + 0.3) / 2, final (0.7 + 0.9) / 2
    rewards = [0.1, 0.3, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.7, 0.9]
    records = [{"step": i, "reward/mean": reward, "time_s": 2.0 * i} for i, reward in enumerate(rewards)]
    summary = summarize_run(load_run(write_records(tmp_path, records)))
    assert summary["reward_first"] == pytest.approx(0.2)
    assert summary["reward_final"] == pytest.approx(0.8)
    assert summary["reward_ratio"] == pytest.approx(4.0)
    assert summary["time_s"] == 18.0
    assert np.isnan(summary["abs_gap_mean"])


def test_rewards_that_begin_below_zero_have_no_ratio(tmp_path):
    records = [{"step": i, "reward/mean": reward} for i, reward in enumerate([-0.5, 0.5])]
    assert np.isnan(summarize_run(load_run(write_records(tmp_path, records)))["reward_ratio"])


def test_a_summary_counts_every_skip_and_the_error_tokens_of_the_end(tmp_path):
    skips, rates = [1, 0, 0, 2, None, 0, 0, 0, 1, 0], [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.1, 0.3]
    columns = enumerate(zip(skips, rates, strict=True))
    records = [{"step": i, "optim/skipped_steps": skip, "error_tokens/rate": rate} for i, (skip, rate) in columns]
    summary = summarize_run(load_run(write_records(tmp_path, records)))
    assert summary["skipped_steps"] == 4
    assert summary["error_token_rate"] == pytest.approx(0.2)


def test_the_scores_of_several_sets_stand_for_themselves_and_their_mean_is_left_out(tmp_path):
    one = load_run(write_records(tmp_path / "one", [{"step": 1, "validation/reward": 0.5}]))
    assert one.score_columns() == {"": "validation/reward"}
    scores = {"validation/reward": 0.5, "validation/reward_a": 0.4, "validation/reward_b": 0.6}
    several = load_run(write_records(tmp_path / "several", [{"step": 1} | scores]))
    assert several.score_columns() == {"a": "validation/reward_a", "b": "validation/reward_b"}


def test_a_summary_averages_the_gap_over_all_steps(tmp_path):
    records = [{"step": i, "mismatch/abs_gap_mean": gap} for i, gap in enumerate([0.1, 0.2, None, 0.6])]
    assert summarize_run(load_run(write_records(tmp_path, records)))["abs_gap_mean"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("first", "last", "grows"),
    [
        (1e-3, 1.3e-3, True),
        (2e-3, 2.5e-3, True),
        # less than a fifth more, though large
        (2e-3, 2.3e-3, False),
        # many times as much, though small
        (1e-5, 9e-4, False),
        (3e-3, 2e-3, False),
    ],
)
def test_a_mismatch_grows_if_it_is_large_and_a_fifth_above_the_first(tmp_path, first, last, grows):
    # ten steps, so each window is 2
    values = [first * 0.5, first * 1.5, *[1.0] * 6, last * 1.5, last * 0.5]
    records = [{"step": i, "mismatch/kl_k3": value} for i, value in enumerate(values)]
    found = growing_mismatch(load_run(write_records(tmp_path, records)))
    assert found == (pytest.approx((first, last)) if grows else None)


def test_a_mismatch_that_was_not_recorded_at_first_does_not_grow(tmp_path):
    records = [{"step": i, "mismatch/kl_k3": None if i < 4 else 2e-3} for i in range(10)]
    assert growing_mismatch(load_run(write_records(tmp_path, records))) is None


def test_moving_mean_looks_back_over_the_window():
    # window 2 for ten values
    assert moving_mean(np.array([1.0, 3, 5, 7, 9, 9, 9, 9, 9, 1])).tolist() == [1, 2, 4, 6, 8, 9, 9, 9, 9, 5]
    spike = np.full(100, 0.7)
    spike[20] = 3e17
    np.testing.assert_allclose(moving_mean(spike)[40:], 0.7)


def test_seeds_of_an_arm_are_one_curve_with_a_range(tmp_path):
    for seed, values in ((1, [1.0, 3.0]), (2, [3.0, 9.0, 5.0])):
        run_dir = write_records(tmp_path / str(seed), [{"step": i, "a": value} for i, value in enumerate(values)])
        OmegaConf.save({"seed": seed, "run": {"arm": "x"}, "qarl": {"alignment": "aligned"}}, run_dir / "config.yaml")
    (arm,) = group_by_arm(load_runs([tmp_path / "1", tmp_path / "2"]))
    steps, mean, low, high = arm.curve("a")
    assert (steps.tolist(), mean.tolist()) == ([0, 1, 2], [2, 6, 5])
    assert (low.tolist(), high.tolist()) == ([1, 3, 5], [3, 9, 5])


def test_arms_have_their_own_colours_and_equal_seeds_are_not_repetitions(make_run):
    runs = load_runs(
        [
            make_run("a", alignment="aligned", seed=1, num_steps=1, diagnostics=False),
            make_run("b", alignment="aligned", seed=1, num_steps=1, diagnostics=False, optimizer={"lr": 1e-4}),
            make_run("c", alignment="none", seed=1, num_steps=1, diagnostics=False),
            make_run("d", alignment="none", seed=2, num_steps=1, diagnostics=False),
        ]
    )
    arms = group_by_arm(runs)
    assert [(arm.name, len(arm.runs)) for arm in arms] == [("a", 1), ("b", 1), ("BF16 gspo", 2)]
    assert len({arm.color for arm in arms}) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("quantized.json", b"{}", "quantized.json: expected a JSON list of objects, a list, but it holds {}"),
        ("quantized.json", b"[[1]]", "quantized.json, row 0 is damaged"),
        (
            "quantized.json",
            b'[{"name": "a"}]',
            "quantized.json, row 0 is damaged, or not a run's: kind: Field required",
        ),
        (
            "metrics.jsonl",
            b'{"step": 1}\n{"stop": 2}\n',
            "metrics.jsonl, line 2 is damaged, or not a run's: step: Field",
        ),
        (
            "metrics.jsonl",
            b'{"step": 1, "a": "high"}\n',
            "line 1 is damaged, or not a run's: a: Input should be a valid",
        ),
        ("metrics.jsonl", b'{"step": 1, "a": 1e300}\n', "a: Input should be less than or equal to"),
        (
            "metrics.jsonl",
            b'{"step": 1, "a": ' + b"9" * 5000 + b"}\n",
            "line 1: expected a JSON object, but it is not JSON",
        ),
        ("metrics.jsonl", b"\xff\xfe", "metrics.jsonl, line 1: expected one JSON object a line, but it is not UTF-8"),
        ("config.yaml", b"run: 5", "config.yaml is damaged, or not a run's: run"),
        ("config.yaml", b"qarl: {alignment: [aligned]}", "config.yaml is damaged, or not a run's: qarl.alignment"),
        ("config.yaml", b"seed: one", "config.yaml is damaged, or not a run's: seed"),
        ("diagnostics/step_000004.npz", b"PK", "step_000004.npz is damaged: expected an archive"),
        ("diagnostics/step_000004.jsonl", b'{"prompt": "1+1="}\n', "step_000004.jsonl, line 1 is damaged"),
    ],
)
def test_a_damaged_run_names_file_place_and_what_was_expected(make_run, name, content, message):
    path = make_run("demo", num_steps=4)
    (path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_runs([path])
    assert str(path) in str(error.value)


def test_diagnostics_hold_every_array_in_one_length(make_run):
    path = make_run("demo", num_steps=4)
    file = path / "diagnostics" / "step_000004.npz"
    with np.load(file) as archive:
        arrays = dict(archive)
    for wrong in (arrays["seq_kept"][:-1], arrays["seq_kept"][None], np.array(["yes"] * len(arrays["seq_kept"]))):
        np.savez(file, **(arrays | {"seq_kept": wrong}))
        with pytest.raises(
            ValueError, match=r"step_000004.npz is damaged: expected numbers, as many in each of seq_prox"
        ):
            load_runs([path])
    np.savez(file, **(arrays | {"position_tokens": arrays["position_tokens"][1:]}))
    with pytest.raises(ValueError, match=r"as many in each of position_tokens, position_error_tokens"):
        load_runs([path])
    # As runs were recorded before positions were.
    np.savez(file, **{name: array for name, array in arrays.items() if not name.startswith("position_")})
    assert len(load_runs([path])) == 1


def test_a_pipe_in_a_run_is_refused(make_run):
    path = make_run("demo", num_steps=1)
    (path / "metrics.jsonl").unlink()
    os.mkfifo(path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics.jsonl: .* not a regular file"):
        load_runs([path])


def test_modules_are_read_as_the_trainer_writes_them(make_run):
    path = make_run("demo", num_steps=1, diagnostics=False)
    row = asdict(InstallRow("lm_head", "linear", "[32, 128]", "bf16", False, "stays BF16"))
    (path / "quantized.json").write_text(json.dumps([row]))
    assert load_run(path).quantized == [row]
