"""Workloads of whole steps with other prompts and answers, and what is composed of an arm before it runs."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from qarl_nemo.config import merge_mappings
from qarl_nemo.nemo_rl.lookup import look_up
from support.full_size import MODEL, write_run
from support.nemo_rl.recipes import BELOW, own_settings

ROOT = Path(__file__).parents[2]
HARNESS = ROOT / "tools" / "bench" / "full_size"


@pytest.fixture(autouse=True)
def harness(tools):
    tools("bench/full_size")


@pytest.fixture
def nemo_rl(tmp_path):
    """As much of NeMo-RL as recipes need below them, in two files."""
    import arms

    recipe = tmp_path / "nemo_rl" / arms.OWN_RECIPE
    recipe.parent.mkdir(parents=True)
    # As NeMo-RL writes it: a product of other keys.
    packing = {"train_mb_tokens": "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}"}
    (recipe.parent / "below.yaml").write_text(yaml.safe_dump({"policy": {"sequence_packing": packing}}))
    optimizer = {"policy": {"megatron_cfg": {"optimizer": {"optimizer": "adam"}}, "max_total_sequence_length": 4096}}
    recipe.write_text(yaml.safe_dump({"defaults": "below.yaml"} | merge_mappings(BELOW, optimizer)))
    return tmp_path / "nemo_rl"


@pytest.fixture
def command(monkeypatch, tmp_path, capsys, nemo_rl):
    """Call run.py on a host of eight GPUs, whose launcher does nothing; returns what it refuses or prints."""
    import refusals
    import run

    monkeypatch.setattr(refusals, "num_gpus", lambda: 8)
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))

    def call(*words):
        monkeypatch.setattr(
            sys, "argv", ["run.py", str(tmp_path / "work"), "--nemo-rl", str(nemo_rl), *map(str, words)]
        )
        try:
            assert run.main() == 0
        except SystemExit as ended:
            return str(ended.code) + capsys.readouterr().err
        return capsys.readouterr().out

    return call


def facts(tmp_path, workload, arm="w4a16"):
    return json.loads((tmp_path / "work" / "check" / workload / arm / "facts.json").read_text())


def test_a_changed_workload_has_a_name_and_facts_of_its_own(command, tmp_path):
    words = ["--answers", 64, "--tokens", 1024, "--prompt-tokens", 600, "--label", "short"]
    assert "w4a16: ended with 0" in command("--check", "--workload", "a", *words)
    said = facts(tmp_path, "a_short")
    assert (said["arm"], said["workload"]) == ("w4a16", "a_short")
    assert (said["work"]["answers"], said["work"]["longest"], said["work"]["prompt_tokens"]) == (64, 1024, 600)
    for word in words:
        assert str(word) in said["command"].split()
    config = yaml.safe_load((tmp_path / "work" / "check" / "a_short" / "w4a16" / "config.yaml").read_text())
    # NeMo-RL would cut prompts of more than 512 tokens.
    asked = {"grpo.num_prompts_per_step": 8, "policy.generation.max_new_tokens": 1024, "data.max_input_seq_length": 600}
    assert {key: look_up(config, key) for key in asked} == asked
    assert look_up(config, "policy.max_total_sequence_length") == 2048
    # Without such an option the label ends the arm's name, as before.
    assert command("--check", "--workload", "a", "--label", "other") != ""
    assert facts(tmp_path, "a", "w4a16_other")["workload"] == "a"


def test_lengths_of_a_file_are_every_steps(command, tmp_path):
    from workloads import WORKLOADS, Workload

    (tmp_path / "lengths.json").write_text("[400, 100, 300, 200]")
    command("--check", "--workload", "a", "--lengths", tmp_path / "lengths.json", "--label", "measured")
    said = facts(tmp_path, "a_measured")
    work = Workload.parse(said["work"])
    assert work == replace(WORKLOADS["a"], longest=400, measured=(400, 100, 300, 200))
    assert asdict(work) == said["work"] | {"measured": work.measured}
    first, second = work.lengths(2)
    assert sorted(first) == sorted(second) == sorted([100, 200, 300, 400] * 32)
    assert first != second
    # Cut where answers have to end, and in place of lengths that the workload draws.
    cut = ["--lengths", tmp_path / "lengths.json", "--tokens", 250, "--label", "cut"]
    command("--check", "--workload", "b", *cut)
    assert set(Workload.parse(facts(tmp_path, "b_cut")["work"]).lengths(1)[0]) == {100, 200, 250}
    # Answers that are all as long are no longer drawn.
    command("--check", "--workload", "b", "--tokens", 512, "--label", "equal")
    assert set(Workload.parse(facts(tmp_path, "b_equal")["work"]).lengths(1)[0]) == {512}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--answers", 64, "--tokens", 9], "--answers --tokens: rows of another workload need a --label"),
        (["--answers", 64, "--label", "even"], "--label even: rows would end as those of workload a_even"),
        (["--tokens", 64, "--label", "x_b24"], "--label x_b24: rows would end as those of workload b24"),
        (["--answers", 12, "--label", "x"], "--answers 12: legal are multiples of 8"),
        (["--answers", 0, "--label", "x"], "--answers 0: legal are multiples of 8"),
        (["--workload", "8gpu", "--answers", 96, "--label", "x"], "--answers 96: legal are multiples of 64"),
        (["--tokens", 0, "--label", "x"], "--tokens 0: legal is 1 or more"),
        (["--prompt-tokens", 3, "--label", "x"], "--prompt-tokens 3: legal is more than 3"),
        (["--tokens", 18300, "--label", "x"], "answers of up to 18300 tokens: a micro-batch has at most 18432"),
        (["--lengths", "nowhere.json", "--label", "x"], "nowhere.json: expected a JSON list of answers' tokens"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(command, tmp_path, words, said):
    assert said in command("--check", *words)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "is empty; legal: one or more whole numbers"),
        ('[12, 0, "9", 1.5, true]', 'holds 0, "9", 1.5, true; legal: one or more whole numbers'),
        ('{"lengths": [4]}', "expected a JSON list of answers' tokens"),
    ],
)
def test_a_file_of_lengths_is_read_strictly(command, tmp_path, content, said):
    (tmp_path / "lengths.json").write_text(content)
    assert said in command("--check", "--lengths", tmp_path / "lengths.json", "--label", "x")


def test_answers_are_no_longer_than_recipes_hold():
    from own_workload import MOST_TOKENS

    tuned = yaml.safe_load((HARNESS / "tuned.yaml").read_text())
    assert look_up(tuned, "policy.sequence_packing.train_mb_tokens") == MOST_TOKENS
    shipped = own_settings(ROOT / "examples" / "configs" / "qarl-paper.yaml")
    assert look_up(shipped, "policy.max_total_sequence_length") == MOST_TOKENS


def test_rows_count_the_work_that_was_asked_for(tmp_path):
    import record
    from workloads import WORKLOADS

    work = asdict(replace(WORKLOADS["a"], answers=64, prompt_tokens=600))
    write_run(tmp_path / "ran", ends=(100.0, 122.0), workload="a_short", work=work)
    timed = record.Timed.read(tmp_path / "ran")
    # 64 answers of 100 tokens to prompts of 600, on four GPUs in 22 s; such rows have none of `a`'s goals.
    assert record.figures(timed, [1])["full_tokens_s_gpu"][0] == pytest.approx(64 * 700 / 4 / 22)
    assert record.goal_of("full_refit_s", timed.arm, timed.workload) is None
    write_run(tmp_path / "wrong", ends=(100.0, 122.0), workload="a_short", work=work | {"cards": 4})
    with pytest.raises(ValueError, match=r"facts\.json: work is none that run\.py writes: .*cards"):
        record.Timed.read(tmp_path / "wrong")


def test_muon_needs_its_package(command, monkeypatch, tmp_path):
    import refusals

    monkeypatch.setattr(refusals, "_MUON", "no_such_package")
    said = command("--workload", "8gpu", "--arm", "w4a16", "--arm", "nemo_rl")
    # NeMo-RL's own recipe has Adam.
    assert "error: --arm w4a16 (dist_muon): Megatron's Muon needs no_such_package" in said
    assert not (tmp_path / "work").exists()
    # Who trains with Adam does without it, and so does a check.
    for words in (
        ["--workload", "8gpu", "--set", "policy.megatron_cfg.optimizer.optimizer=adam"],
        ["--workload", "a"],
        ["--workload", "8gpu", "--check"],
    ):
        assert "Muon" not in command(*words)
    # Nor does anything stand in the way where the package is there.
    monkeypatch.setattr(refusals, "_MUON", "json")
    assert "Muon" not in command("--workload", "8gpu")


@pytest.mark.parametrize(
    ("workload", "arm", "words", "gib"),
    [
        ("8gpu", "w4a16", ["++qarl.gpu_memory_gib=79"], 291),
        ("8gpu", "bf16", ["++qarl.gpu_memory_gib=79"], 291),
        # NeMo-RL's own engines copy their weights.
        ("8gpu", "nemo_rl", [], 618),
        # Its learner parts with its parameters wherever the optimizer is.
        ("a", "nemo_rl_best", [], 267),
    ],
)
def test_a_host_that_is_too_small_is_told(monkeypatch, tmp_path, nemo_rl, workload, arm, words, gib):
    import arms
    import composing
    from workloads import WORKLOADS

    (tmp_path / "config.json").write_text((MODEL / "config.json").read_text())
    config = merge_mappings(
        arms.settings(arm, "colocated", WORKLOADS[workload], nemo_rl), {"policy": {"model_name": str(tmp_path)}}
    )
    ours = arms.ARMS[arm].recipe is not None
    monkeypatch.setattr(composing, "first_host_gib", lambda: gib - 1.0)
    assert f"{gib} GiB are computed for the host's memory, and this machine has {gib - 1}" in composing.host_hint(
        config, nemo_rl, words, ours=ours
    )
    for enough in (gib + 1.0, None):
        monkeypatch.setattr(composing, "first_host_gib", lambda enough=enough: enough)
        assert composing.host_hint(config, nemo_rl, words, ours=ours) == ""
    # What the launcher will refuse is not said here.
    monkeypatch.setattr(composing, "first_host_gib", lambda: 1.0)
    wrong = [*words, "++qarl.formt=w4a16", "policy.generation.vllm_cfg.tensor_parallel_size={"]
    assert not ours or composing.host_hint(config, nemo_rl, wrong, ours=ours) == ""
