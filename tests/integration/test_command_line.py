"""`qarl train` as a user starts it: from a YAML, with overrides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qarl_nemo.files import exclusive
from support.runs import read_metrics, write_config

REPOSITORY = Path(__file__).parents[2]


def test_a_run_that_is_no_other_commands_input_is_named_with_what_is(qarl, tmp_path):
    config = write_config(tmp_path / "run.yaml", tmp_path / "runs" / "a")
    code, printed = qarl("train", config, "grpo.max_num_steps=1")
    assert code == 0, printed
    run = tmp_path / "runs" / "a"
    model = run / "checkpoints" / "step_000001" / "model"
    for arguments, said in (
        (("convert", run, tmp_path / "out", "--hf-model", model), f"qarl quantize {model} DESTINATION"),
        (("compare", model, "--adapter", run), "the run trained no adapters (policy.lora)"),
        (("export", tmp_path / "runs", tmp_path / "out"), f"it holds 1 runs: name one of {run}"),
        (("report", tmp_path / "runs"), f"these folders in it are runs: {run}"),
    ):
        code, printed = qarl(*arguments)
        assert code == 2
        assert said in printed, printed


def test_train_runs_a_config_with_overrides_and_reports(qarl, tmp_path):
    config = write_config(tmp_path / "run.yaml", tmp_path / "run")
    code, printed = qarl("train", config, "grpo.max_num_steps=2", "qarl.targets=[experts,attention]")
    assert code == 0, printed
    assert len(read_metrics(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "run" / "summary.png").exists()
    # progress with reward, gap and time left, and where the report is
    assert all(word in printed for word in ("reward", "gap", "ETA"))
    assert str(tmp_path / "run" / "report.html") in printed.replace("\n", "")


@pytest.mark.slow
def test_train_compares_arms_and_seeds_in_one_report(qarl, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")]))
    arms = {"ours": {}, "rollout only": {"qarl": {"alignment": "rollout_only"}}}
    blocks = {"grpo": {"max_num_steps": 1}, "compare": {"seeds": [1], "arms": arms}}
    config = write_config(tmp_path / "compare.yaml", tmp_path / "runs", **blocks)
    # Two commands at a time, each with an arm of its own.
    other = subprocess.Popen([sys.executable, "-m", "qarl_nemo.cli", "train", str(config), "--arm", "rollout only"])
    code, printed = qarl("train", config, "--arm", "ours")
    assert (code, other.wait()) == (0, 0), printed
    ours, rollout_only = (
        read_metrics(tmp_path / "runs" / f"{name}-seed1")[-1]["mismatch/abs_gap_mean"]
        for name in ("ours", "rollout-only")
    )
    assert ours < 1e-4 < 1e-3 < rollout_only
    report = (tmp_path / "runs" / "report.html").read_text()
    assert all(arm in report for arm in arms)


def test_a_check_says_what_would_run_and_starts_nothing(qarl, tmp_path):
    arms = {"ours": {}, "BF16, too": {"qarl": {"alignment": "none", "format": "bf16", "group_size": None}}}
    config = write_config(tmp_path / "compare.yaml", tmp_path / "runs", compare={"seeds": [1, 2], "arms": arms})
    code, printed = qarl("train", config, "--check")
    assert code == 0, printed
    assert "rollouts    w4a16" in printed
    assert "\nours       w4a16, aligned, tbpo, 4 steps: 2 new\nBF16, too  bf16, none, tbpo, 4 steps: 2 new\n" in printed
    assert "checked, nothing was started: 2 arms x 2 seeds = 4 runs\n" in printed
    assert "started: 1 arm x 2 seeds = 2 runs\n" in qarl("train", config, "--check", "--arm", "ours")[1]
    assert not (tmp_path / "runs").exists()


def test_a_check_looks_into_the_runs_folder(qarl, tmp_path):
    config = write_config(tmp_path / "run.yaml", tmp_path / "run", grpo={"max_num_steps": 1, "val_period": 0})
    assert "checked, nothing was started: run, new\n" in qarl("train", config, "--check")[1]
    assert qarl("train", config)[0] == 0
    code, printed = qarl("train", config, "--check")
    assert code == 0
    assert f"nothing was started: run, already complete, nothing is left to do in {tmp_path / 'run'}\n" in printed
    code, printed = qarl("train", config, "--check", "grpo.max_num_steps=2")
    assert code == 0
    assert "run         run, resumed from step 1, to step 2" in printed
    assert "checked, nothing was started: run, resumed from step 1\n" in printed
    code, printed = qarl("train", config, "--check", "seed=9", "grpo.max_num_steps=2")
    assert code == 2
    assert "holds a run with another config" in printed
    assert "\n  seed: there 3, now 9" in printed


def test_a_check_refuses_a_folder_in_use_as_a_start_does(qarl, tmp_path):
    folder = tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", folder)
    folder.mkdir()
    with exclusive(folder / ".lock", "run folder"):
        (code, checked), (_, started) = qarl("train", config, "--check"), qarl("train", config)
        assert [path.name for path in folder.iterdir()] == [".lock"]
    assert code == 2
    refusal = f"run folder {folder} is in use by process {os.getpid()} on "
    assert refusal in checked
    assert refusal in started
    # A lock file that a killed run has left guards nothing.
    (folder / ".lock").write_text("process 1")
    assert "checked, nothing was started: run, new\n" in qarl("train", config, "--check")[1]
    assert (folder / ".lock").read_text() == "process 1"


def test_a_check_lists_what_is_wrong_with_machine_data_and_each_arm(qarl, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train = {"dataset_name": "gsm8k", "data_path": str(tmp_path / "train.jsonl")}
    data = {"_override_": True, "source": "datasets", "train": train}
    arms = {"ours": {}, "another target": {"qarl": {"targets": ["mlp"]}}}
    blocks = {"device": "cuda", "data": data, "compare": {"seeds": [1], "arms": arms}}
    config = write_config(tmp_path / "compare.yaml", tmp_path / "runs", **blocks)
    code, printed = qarl("train", config, "--check")
    assert code == 2
    assert "3 problem(s), nothing was started:" in printed
    assert "\n  device=cuda, but torch sees no CUDA device" in printed
    assert "train.jsonl" in printed
    assert "\n  another target: " in printed
    assert not (tmp_path / "runs").exists()


def test_a_check_without_the_model_still_lists_what_is_wrong_with_the_data(qarl, tmp_path):
    """As of an example that is started before model and data have been put in their places."""
    paths = {"policy.model_path": "model", "data.train.data_path": "a.jsonl", "data.validation.data_path": "b.jsonl"}
    overrides = [f"{key}={tmp_path / name}" for key, name in paths.items()]
    engine = ("device=cpu", "rollout.engine=packed", "policy.precision=float32")
    code, printed = qarl("train", "gsm8k", "--check", *engine, *overrides, f"run_dir={tmp_path / 'run'}")
    assert "3 problem(s), nothing was started:" in printed
    assert code == 2
    assert all(f"{tmp_path / name}" in printed for name in paths.values())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.max_num_setps=2", "unknown key 'grpo.max_num_setps': did you mean 'max_num_steps'?"),
        ("seed", "overrides must look like a.b=c"),
        ("run_dir=runs/b\udce9d", "overrides whose text is not UTF-8, which no config can hold: 'run_dir'"),
        ("policy.model_path=nowhere", "set exactly one of model_path"),
        ("qarl.format=w4a8", "cannot take group_size=32 (legal for w4a8: 128); null, in a config, takes the default"),
        ("device=cuda", "torch sees no CUDA device"),
    ],
)
def test_what_a_user_gets_wrong_is_one_message_and_no_folder(qarl, override, message, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, printed = qarl("train", write_config(tmp_path / "run.yaml", tmp_path / "run"), override)
    assert code == 2
    assert message in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [("demo", "--steps", "10"), ("demo", "--steps=10"), ("--steps", "10", "demo")])
def test_settings_with_dashes_are_answered_with_how_they_are_written(qarl, arguments):
    code, printed = qarl("train", *arguments)
    assert code == 2
    assert "no such option --steps: legal here: --arm, --parallel, --check, --help\n" in printed
    assert "Settings of a run are overrides without dashes, after the config: grpo.max_num_steps=10" in printed


@pytest.mark.parametrize(
    ("option", "meant", "is_setting"),
    [("--chek", "--check", False), ("--hlep", "--help", False), ("--lr=3", None, True), ("--check.arm=3", None, True)],
)
def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(qarl, option, meant, is_setting):
    code, printed = qarl("train", "demo", option)
    assert code == 2
    assert f"no such option {option.partition('=')[0]}: {f'did you mean {meant!r}? ' * bool(meant)}legal" in printed
    assert ("overrides without dashes" in printed) == is_setting


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("qarl-paper", "is a recipe for NeMo-RL; start it with examples/run_qarl_grpo.py --config"),
        ("megatron", "torch sees no CUDA device"),
    ],
)
def test_a_shipped_config_that_cannot_run_here_says_why_before_it_starts(qarl, config, message, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, printed = qarl("train", config, f"run_dir={tmp_path / 'run'}")
    assert code == 2
    assert message in printed
    assert not (tmp_path / "run").exists()


def test_help_and_config_errors_come_without_torch(tmp_path):
    config = write_config(tmp_path / "run.yaml", tmp_path / "run", sede=1)
    code = (
        "import sys\nfrom qarl_nemo.cli import app\n"
        f"for arguments in (['--help'], ['train', '--help'], ['train', {str(config)!r}]):\n"
        "    try:\n        app(arguments, standalone_mode=False)\n"
        "    except SystemExit as end:\n        assert end.code == 2\n"
        "print('loaded:', sorted({'torch', 'transformers', 'matplotlib', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "train" in done.stdout
    assert "did you mean 'seed'?" in done.stderr
    assert done.stdout.rstrip().endswith("loaded: []")
