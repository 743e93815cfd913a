"""Rows that arms on a real model leave behind, by the embedded engine and by NeMo-RL."""

import itertools
import json
import math

import numpy as np
import pytest
from test_nemo_rl_logs import CONFIG, write_start

from qarl_nemo.config import merge_mappings, read_yaml, write_yaml
from qarl_nemo.metrics.runs import load_run
from qarl_nemo.metrics.validations import write_validation
from support.validations import answers

STEPS, LONGEST = 25, 512
NAMES = ("--model", "m", "--data", "d")


ALIGNMENTS = {"BF16": "none", "rollout-only w4a16": "rollout_only", "QaRL w4a16": "aligned", "QaRL w4a8": "aligned",
              "QaRL w4a16, GSPO": "aligned"}  # fmt: skip
ARMS = list(ALIGNMENTS)[:-1]


@pytest.fixture
def make_arms(make_run, tmp_path):
    def make(folder, *seeds, arms=ARMS):
        for arm, seed in itertools.product(arms, seeds):
            settings = {"alignment": ALIGNMENTS[arm], "num_steps": STEPS, "grpo": {"max_num_steps": STEPS}}
            path = tmp_path / folder / "local_math_arms" / f"{arm}-seed{seed}"
            make_run(path, arm=arm, seed=seed, diagnostics=False, **settings)
        return tmp_path / folder / "local_math_arms"

    return make


@pytest.mark.filterwarnings("error")
def test_arms_have_rows_and_formats_with_all_three_a_recovery(make_arms, record):
    folder = make_arms("runs", 1, 2)
    rows = record("real_model_runs", folder, *NAMES)
    reward = load_run(folder / "QaRL w4a8-seed2").column("reward/mean")
    assert rows["real_m_d_qarl_w4a8_seed2_reward_final"].value == pytest.approx(reward[-5:].mean(), rel=1e-4)
    assert {row.command for row in rows.values()} == {"qarl train examples/configs/local_math_arms.yaml"}
    assert {row.hardware for row in rows.values()} == {"1x NVIDIA H200"}
    norm = load_run(folder / "QaRL w4a8-seed2").column("optim/grad_norm")
    found = [rows[f"real_m_d_qarl_w4a8_seed2_grad_norm_{when}"].value for when in ("first", "final")]
    np.testing.assert_allclose(found, [norm[:5].mean(), norm[-5:].mean()], rtol=1e-4)
    assert {name for name in rows if "recovery" in name} == {f"real_m_d_recovery_w4a16{end}" for end in ("", "_error")}
    lost = [
        rows[f"real_m_d_bf16_seed{seed}_test_accuracy"].value
        - rows[f"real_m_d_rollout_only_w4a16_seed{seed}_test_accuracy"].value
        for seed in (1, 2)
    ]
    # of two values, half of their distance
    expected = np.mean(lost), abs(lost[0] - lost[1]) / 2
    found = [rows[f"real_m_d_lost_w4a16_{figure}"].value for figure in ("mean", "error")]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_what_alignment_alone_wins_back_needs_no_bf16(make_arms, record):
    rows = record("real_model_runs", make_arms("runs", 1, 2, arms=["rollout-only w4a16", "QaRL w4a16, GSPO"]), *NAMES)
    gained = [
        rows[f"real_m_d_qarl_w4a16_gspo_seed{seed}_test_accuracy"].value
        - rows[f"real_m_d_rollout_only_w4a16_seed{seed}_test_accuracy"].value
        for seed in (1, 2)
    ]
    assert rows["real_m_d_aligned_w4a16_mean"].value == pytest.approx(np.mean(gained), abs=1e-4)
    assert not {name for name in rows if "recovery" in name or "lost" in name or "gained" in name}


def test_seeds_that_came_one_after_the_other_give_what_they_give_together(make_arms, record, tmp_path):
    together = record("real_model_runs", make_arms("all", 1, 2), *NAMES)
    (tmp_path / "rows.json").unlink()
    record("real_model_runs", make_arms("first", 1), *NAMES)
    rows = record("real_model_runs", make_arms("second", 2), *NAMES, "--figure", tmp_path / "arms.png")
    assert {name: row.value for name, row in rows.items()} == {name: row.value for name, row in together.items()}
    assert (tmp_path / "arms.png").stat().st_size > 10_000
    (kept,) = tmp_path.rglob("runs/local_math_arms/QaRL w4a16-seed1/metrics.jsonl")
    original = load_run(tmp_path / "first" / "local_math_arms" / "QaRL w4a16-seed1")
    small = load_run(kept.parent)
    assert (small.arm, small.seed, small.setting("qarl.alignment")) == ("QaRL w4a16", 1, "aligned")
    for name in ("reward/mean", "validation/reward", "mismatch/abs_gap_mean"):
        np.testing.assert_allclose(small.column(name), original.column(name), rtol=1e-4)


def test_what_later_runs_do_not_change_keeps_the_machine_that_it_came_from(make_arms, record):
    record("real_model_runs", make_arms("first", 1, 2, arms=["BF16", "rollout-only w4a16"]), *NAMES)
    later = make_arms("second", 1, arms=["QaRL w4a16"])
    facts = {"hardware": "1x NVIDIA H100", "versions": {}}
    (later / "QaRL w4a16-seed1" / "run.json").write_text(json.dumps(facts))
    rows = record("real_model_runs", later, *NAMES)
    assert rows["real_m_d_lost_w4a16_mean"].hardware == "1x NVIDIA H200"
    assert rows["real_m_d_gained_w4a16_mean"].hardware == "1x NVIDIA H100"


def test_arms_that_kept_their_answers_are_paired_with_rollout_only(make_arms, record):
    folder = make_arms("runs", 1, 2)
    right = {"BF16": [1, 1, 1, 1], "rollout-only w4a16": [1, 0, 0, 0], "QaRL w4a16": [1, 1, 0, 0], "QaRL w4a8": [1] * 4}
    for arm, rewards in right.items():
        # Another set's answers are no part of the difference.
        write_validation(folder / f"{arm}-seed1", STEPS, answers(rewards) + answers([0, 0], dataset="MATH-500"))
    other = folder / "QaRL w4a8-seed1" / "config.yaml"
    write_yaml(other, merge_mappings(read_yaml(other), {"qarl": {"format": "w4a8"}}))
    write_validation(folder / "QaRL w4a16-seed1", STEPS + 1, answers([0, 0, 0, 0]))
    rows = record("real_model_runs", folder, *NAMES)
    found = {name.removeprefix("real_m_d_"): row.value for name, row in rows.items() if "_ahead_of_" in name}
    assert found == pytest.approx(
        {
            "bf16_seed1_ahead_of_rollout_only_w4a16": 0.75,
            "bf16_seed1_ahead_of_rollout_only_w4a16_error": 0.25,
            "qarl_w4a16_seed1_ahead_of_rollout_only_w4a16": 0.25,
            "qarl_w4a16_seed1_ahead_of_rollout_only_w4a16_error": 0.25,
        }
    )


def test_arms_stand_against_the_one_that_is_named(make_arms, record, capsys):
    folder = make_arms("all", 1, arms=["BF16", "QaRL w4a16"])
    for arm, rewards in {"BF16": [1, 1, 0, 0], "QaRL w4a16": [1, 0, 0, 0]}.items():
        write_validation(folder / f"{arm}-seed1", STEPS, answers(rewards))
    rows = record("real_model_runs", folder, *NAMES, "--over", "QaRL w4a16")
    found = {name.removeprefix("real_m_d_"): row.value for name, row in rows.items() if "_ahead_of_" in name}
    assert found == {"bf16_seed1_ahead_of_qarl_w4a16": 0.25, "bf16_seed1_ahead_of_qarl_w4a16_error": 0.25}
    with pytest.raises(SystemExit, match="2"):
        record("real_model_runs", folder, *NAMES, "--over", "TBPO")
    assert "'TBPO': no such arm among BF16, QaRL w4a16" in capsys.readouterr().err


def test_arms_are_paired_with_answers_of_an_earlier_machine_which_keep_their_rows(make_arms, record):
    arms = {"rollout-only w4a16": [1, 0, 0, 0], "QaRL w4a16, GSPO": [1, 1, 0, 0], "QaRL w4a16": [1, 1, 1, 0]}
    earlier = make_arms("first", 1, arms=list(arms)[:2])
    later = make_arms("second", 1, arms=list(arms)[2:])
    for folder, arm in ((earlier, "rollout-only w4a16"), (earlier, "QaRL w4a16, GSPO"), (later, "QaRL w4a16")):
        write_validation(folder / f"{arm}-seed1", STEPS, answers(arms[arm]))
    record("real_model_runs", earlier, *NAMES)
    (later / "QaRL w4a16-seed1" / "run.json").write_text(json.dumps({"hardware": "1x NVIDIA H100", "versions": {}}))
    rows = record("real_model_runs", later, *NAMES, "--beside", earlier, "--over", "rollout-only w4a16")
    ahead = {
        name: (row.value, row.hardware) for name, row in rows.items() if name.endswith("_ahead_of_rollout_only_w4a16")
    }
    assert ahead == {
        "real_m_d_qarl_w4a16_gspo_seed1_ahead_of_rollout_only_w4a16": (0.25, "1x NVIDIA H200"),
        "real_m_d_qarl_w4a16_seed1_ahead_of_rollout_only_w4a16": (0.5, "1x NVIDIA H100"),
    }
    accuracy = rows["real_m_d_rollout_only_w4a16_seed1_test_accuracy"]
    assert accuracy.hardware == "1x NVIDIA H200"


def test_kept_rewards_are_neither_whole_runs_nor_answers_to_pair_with(make_arms, record):
    whole, kept = make_arms("whole", 1, arms=["BF16"]), make_arms("kept", 1, arms=["BF16"])
    config = kept / "BF16-seed1" / "config.yaml"
    write_yaml(config, {key: value for key, value in read_yaml(config).items() if key != "grpo"})
    with pytest.raises(SystemExit, match=r"BF16-seed1: its config has no grpo\.max_num_steps, .*set --steps"):
        record("real_model_runs", kept, *NAMES)
    with pytest.raises(SystemExit, match="none of its runs kept its answers"):
        record("real_model_runs", whole, *NAMES, "--beside", kept)


def test_runs_that_were_stopped_are_recorded_to_a_step_that_all_reached(make_arms, record, tmp_path):
    folder = make_arms("runs", 1, arms=["BF16", "rollout-only w4a16"])
    for path in folder.iterdir():
        config = path / "config.yaml"
        write_yaml(config, merge_mappings(read_yaml(config), {"grpo": {"max_num_steps": 99}}))
        write_validation(path, 15, answers([1, 1] if path.name.startswith("BF16") else [1, 0]))
        write_validation(path, 20, answers([0, 0]))
    with pytest.raises(SystemExit, match="none did all of its steps"):
        record("real_model_runs", folder, *NAMES)
    with pytest.raises(SystemExit) as refused:
        record("real_model_runs", folder, *NAMES, "--steps", "0")
    assert refused.value.code == 2
    rows = record("real_model_runs", folder, *NAMES, "--steps", "15")
    reward = load_run(folder / "BF16-seed1").column("reward/mean")[:15]
    assert rows["real_m_d_bf16_seed1_steps"].value == 15
    assert rows["real_m_d_bf16_seed1_reward_final"].value == pytest.approx(reward[-3:].mean(), rel=1e-4)
    assert rows["real_m_d_bf16_seed1_ahead_of_rollout_only_w4a16"].value == 0.5
    assert {len(load_run(path.parent).steps) for path in tmp_path.rglob("runs/local_math_arms/*/metrics.jsonl")} >= {15}


def test_of_a_run_all_steps_stay_kept_when_its_first_are_recorded_beside_shorter_ones(make_arms, record, tmp_path):
    folder = make_arms("whole", 1, arms=["BF16"])
    record("real_model_runs", folder, *NAMES)
    kept = tmp_path / "runs" / "local_math_arms" / "BF16-seed1"
    record("real_model_runs", folder, "--model", "m", "--data", "d_15", "--steps", "15")
    assert len(load_run(kept).steps) == STEPS
    # Another run of this arm and seed takes its place all the same.
    file = folder / "BF16-seed1" / "metrics.jsonl"
    first, *others = file.read_text().splitlines(keepends=True)
    file.write_text("".join([json.dumps(json.loads(first) | {"reward/mean": 0.0}) + "\n", *others]))
    record("real_model_runs", folder, *NAMES, "--steps", "15")
    assert len(load_run(kept).steps) == 15


def test_a_run_that_was_cut_before_its_last_test_has_no_last_accuracy(make_arms, record):
    folder = make_arms("runs", 1, arms=["BF16", "rollout-only w4a16"])
    for path in folder.iterdir():
        write_validation(path, 1, answers([1, 1] if path.name.startswith("BF16") else [1, 0]))
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        records = [records[0] | {"validation/reward": 0.2}, *(one | {"validation/reward": None} for one in records[1:])]
        (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    rows = record("real_model_runs", folder, *NAMES, "--steps", "20")
    told = {name.removeprefix("real_m_d_") for name in rows if "accuracy" in name or "ahead" in name or "lost" in name}
    assert told == {"bf16_seed1_test_accuracy_first", "rollout_only_w4a16_seed1_test_accuracy_first"}


def test_tokens_of_the_last_diagnostics_say_what_the_learner_doubts(make_run, record, tmp_path):
    for arm in ("rollout-only w4a16", "QaRL w4a16"):
        path = tmp_path / "runs" / "local_math_arms" / f"{arm}-seed1"
        settings = {"alignment": ALIGNMENTS[arm], "num_steps": STEPS, "grpo": {"max_num_steps": STEPS}}
        make_run(path, arm=arm, seed=1, **settings)
        (file,) = path.glob("diagnostics/*.npz")
        tokens = {"generation": [0.95, 0.95, 0.95, 0.5], "prev": [0.95, 0.05, 0.95, 0.05]}
        if arm.startswith("QaRL"):
            tokens["prev"] = tokens["generation"]
        with np.load(file) as found:
            arrays = dict(found) | {"token_advantage": np.float32([1, -1, 0, 1])}
        of_tokens = {f"token_{policy}_logprob": np.log(np.float32(values)) for policy, values in tokens.items()}
        np.savez(file, **arrays | of_tokens | {"token_curr_logprob": of_tokens["token_prev_logprob"]})
    rows = record("real_model_runs", path.parent, *NAMES, "--scatter", tmp_path / "tokens.png")
    prefix = "real_m_d_rollout_only_w4a16_seed1"
    found = [
        rows[f"{prefix}_{kind}"].value for kind in ("doubted_tokens", "below_engine_negative", "below_engine_positive")
    ]
    np.testing.assert_allclose(found, [1 / 3, np.log(0.95 / 0.05), np.log(10) / 2], rtol=1e-4)
    assert rows["real_m_d_qarl_w4a16_seed1_doubted_tokens"].value == 0
    assert (tmp_path / "tokens.png").stat().st_size > 10_000


def test_each_validation_set_has_its_accuracy_and_the_first_is_the_test(make_arms, record, tmp_path):
    folder = make_arms("runs", 1, arms=["BF16"])
    file = folder / "BF16-seed1" / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for at, gsm8k, math500 in ((0, 0.2, 0.1), (-1, 0.3, 0.15)):
        sets = {"validation/reward_gsm8k": gsm8k, "validation/reward_MATH-500": math500}
        records[at] |= {"validation/reward": (gsm8k + math500) / 2} | sets
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    rows = record("real_model_runs", folder, *NAMES)
    prefix = "real_m_d_bf16_seed1"
    found = {name: row.value for name, row in rows.items() if "accuracy" in name}
    assert found == {
        f"{prefix}_test_accuracy_first": 0.2,
        f"{prefix}_test_accuracy": 0.3,
        f"{prefix}_math_500_accuracy_first": 0.1,
        f"{prefix}_math_500_accuracy": 0.15,
    }
    (kept,) = tmp_path.rglob("runs/local_math_arms/BF16-seed1/metrics.jsonl")
    assert load_run(kept.parent).column("validation/reward")[-1] == 0.3


def test_a_command_that_names_no_config_is_not_recorded(make_arms, record):
    folder = make_arms("runs", 1, arms=["BF16"])
    folder = folder.rename(folder.with_name("local_math_longer"))
    with pytest.raises(SystemExit, match=r"no config is called local_math_longer\.yaml"):
        record("real_model_runs", folder, *NAMES)
    rows = record("real_model_runs", folder, *NAMES, "--command", "qarl train other.yaml")
    assert {row.command for row in rows.values()} == {"qarl train other.yaml"}


def test_runs_of_two_machines_are_not_recorded_as_one(make_arms, record):
    folder = make_arms("runs", 1)
    (folder / "BF16-seed1" / "run.json").write_text(json.dumps({"hardware": "1x NVIDIA H100", "versions": {}}))
    with pytest.raises(SystemExit, match="NVIDIA H100"):
        record("real_model_runs", folder, *NAMES)


@pytest.fixture
def logs(tmp_path):
    settings = {"grpo": CONFIG["grpo"] | {"max_num_steps": STEPS}}
    settings["policy"] = CONFIG["policy"] | {"generation": {"max_new_tokens": LONGEST}}
    start = write_start(tmp_path / "logs" / "exp_001", range(1, STEPS + 1), gap=2e-3, config=settings)
    facts = {"command": "python run", "hardware": "2x NVIDIA H200", "versions": {"vllm": "0.25.1"}, "start_s": 139.5}
    (start / "run.json").write_text(json.dumps(facts))
    return start.parent


def test_a_step_that_a_run_died_in_takes_no_part_in_its_phases(record, tmp_path):
    # The first three steps warm up, so that this one would be all that counts.
    names = ("total_step_time", "generation", "prepare_for_generation/total", "policy_training")
    died = {4: {f"timing/train/{name}": math.nan for name in names}}
    start = write_start(tmp_path / "logs" / "exp_001", range(1, 5), more=died)
    (start / "run.json").write_text(json.dumps({"command": "python run", "hardware": "GPU", "versions": {}}))
    rows = {name: row.value for name, row in record("nemo_rl_runs", f"--run=w4a16={start.parent}").items()}
    found = [rows[f"{name}_w4a16"] for name in ("run_steps", "step_s", "phase_s_rollout", "phase_s_update")]
    assert found == [3, 10.0, 4.0, 3.0]


def evaluation(folder, **changes):
    asked = {"benchmark": "gsm8k", "num_problems": 1319, "temperature": 0.0, "max_new_tokens": LONGEST}
    rows = [
        asked | {"model": name, "avg": {"value": value}} | changes for name, value in (("before", 0.2), ("after", 0.3))
    ]
    path = folder / "eval.json"
    path.write_text(json.dumps({"results": rows}))
    return path


def test_a_nemo_rl_run_has_the_embedded_engines_rows(record, logs, tmp_path):
    options = ["--arm", "QaRL w4a16, Megatron", "--evaluation", evaluation(tmp_path)]
    rows = record("real_model_nemo_rl", logs, *options, *NAMES)
    prefix = "real_m_d_qarl_w4a16_megatron_seed3"
    # The reward of step n is 0.5 + n / 100; the last five steps are 21 to 25.
    expected = {"steps": STEPS, "reward_first": 0.53, "reward_final": 0.73, "test_accuracy_first": 0.2,
                "test_accuracy": 0.3, "gap": 2e-3, "error_tokens": 0.01, "kl_first": 1e-4, "kl_final": 1e-4,
                "kept_first": 0.9, "kept_final": 0.9, "step_s": 10.0, "start_s": 139.5}  # fmt: skip
    assert {name.removeprefix(f"{prefix}_"): row.value for name, row in rows.items()} == pytest.approx(
        expected, rel=1e-4
    )
    assert {(row.command, row.hardware) for row in rows.values()} == {("python run", "2x NVIDIA H200")}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"temperature": 0.6}, "before: temperature=0.6, here 0.0; after: temperature=0.6, here 0.0"),
        ({"num_problems": 100}, "before: num_problems=100, here 1319"),
        ({"max_new_tokens": 16384}, "before: max_new_tokens=16384, here 512"),
    ],
)
def test_accuracies_of_another_kind_are_refused(changes, problem, record, logs, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        record("real_model_nemo_rl", logs, *NAMES, "--arm", "a", "--evaluation", evaluation(tmp_path, **changes))
    assert problem in capsys.readouterr().err.replace("\n", "")


def test_an_unfinished_nemo_rl_run_is_refused(record, logs, tmp_path, capsys):
    (logs / "exp_001" / "config.yaml").write_text(
        (logs / "exp_001" / "config.yaml").read_text().replace("max_num_steps: 25", "max_num_steps: 26")
    )
    with pytest.raises(SystemExit, match="2"):
        record("real_model_nemo_rl", logs, *NAMES, "--arm", "a", "--evaluation", evaluation(tmp_path))
    assert "25 of 26 steps" in capsys.readouterr().err
