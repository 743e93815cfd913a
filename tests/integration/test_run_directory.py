"""A tiny run in every alignment and format writes its whole folder and shows the gap it should."""

import json
import sys
from statistics import fmean

import numpy as np
import pytest
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from qarl_nemo.metrics.recorded import read_lines
from qarl_nemo.metrics.validations import read_rewards, validation_files
from support.files import write_jsonl
from support.runs import QARL, STEPS, make_config, read_metrics, train

CASES = [
    *[pytest.param(qarl | {"alignment": "aligned"}, id=name) for name, qarl in QARL.items() if name != "bf16"],
    *[
        pytest.param(QARL[name] | {"alignment": "rollout_only"}, id=f"{name}-rollout_only")
        for name in ("w4a16", "w4a8")
    ],
    pytest.param(QARL["bf16"], id="bf16"),
]
PER_STEP = {
    "": "step time_s weight_version truncated_fraction",
    "reward/": "mean std",
    "response_length_tokens/": "mean",
    "loss/": "total kl_k3 entropy kept_fraction in_band_fraction_positive in_band_fraction_negative num_valid_seqs",
    "prox_ratio/": "p01 p50 p99",
    "mismatch/": "abs_gap_mean abs_gap_max kl_k3 weight_p01 weight_p50 weight_p99",
    "error_tokens/": "rate rate_positive rate_negative",
    "optim/": "grad_norm lr skipped_steps",
    "timing/": "rollout_s reward_s prev_logprobs_s update_s refit_s step_s",
    "throughput/": "rollout_tokens_s prev_logprobs_tokens_s update_tokens_s",
    "refit/": "bytes",
    "memory/": "process_peak_bytes",
}
FLIPS = [f"refit/flipped_{name}" for name in ("codes", "codes_in", "codes_out", "scales")]
KEYS = [prefix + name for prefix, names in PER_STEP.items() for name in names.split()]
DIAGNOSTICS = {
    "seq_prox_ratio",
    "seq_mismatch_weight",
    "seq_advantage",
    "seq_kept",
    "token_prev_logprob",
    "token_curr_logprob",
    "token_generation_logprob",
    "token_advantage",
    "position_tokens",
    "position_error_tokens",
}


@pytest.mark.parametrize("qarl", CASES)
def test_every_file_of_a_run_is_written(qarl, tmp_path):
    train(tmp_path, qarl=qarl)
    records = read_metrics(tmp_path)
    check_metrics(records)
    check_flips(records, qarl["format"])
    check_gap(records, qarl["alignment"])
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml")) == make_config(
        tmp_path, qarl=qarl
    ).model_dump(mode="json", exclude={"compare"})
    check_quantized(json.loads((tmp_path / "quantized.json").read_text()), qarl)
    ran_on = json.loads((tmp_path / "run.json").read_text())
    assert " cores of " in ran_on["hardware"]
    assert {"python", "torch", "transformers"} <= set(ran_on["versions"])
    check_diagnostics(tmp_path / "diagnostics")
    check_validations(tmp_path, records)
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "step_000004" / "model")
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def check_metrics(records):
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert [key for key in KEYS if key not in record] == []
    assert [record["step"] for record in records if "validation/reward" in record] == [1, 2, 4]
    # two minibatches a step, each one version
    assert [record["weight_version"] for record in records] == [2, 4, 6, 8]
    assert all(record["optim/skipped_steps"] == 0 for record in records)
    # 32 responses a step, of which the run learns something
    assert {record["loss/num_valid_seqs"] for record in records} == {32}
    assert any(record["optim/grad_norm"] > 0 for record in records)
    assert any(0 < record["reward/mean"] < 1 for record in records)


def check_flips(records, name):
    for key in FLIPS:
        shares = [record.get(key) for record in records]
        assert shares == [None] * STEPS if name == "bf16" else 0 < max(shares) < 1


def check_gap(records, alignment):
    gaps = [record["mismatch/abs_gap_mean"] for record in records]
    if alignment == "rollout_only":
        assert min(gaps) > 1e-3
    else:
        assert max(gaps) < 1e-4


def check_quantized(rows, qarl):
    quantized = {row["kind"] for row in rows if row["quantized"]}
    if qarl["alignment"] == "aligned":
        assert quantized == set(qarl.get("targets", ["experts"]))
        assert {row["format"] for row in rows if row["quantized"]} == {qarl["format"]}
    else:  # the learner executes BF16
        assert quantized == set()
    assert all(row["reason"] for row in rows if not row["quantized"])


def check_validations(folder, records):
    recorded = {record["step"]: record["validation/reward"] for record in records if "validation/reward" in record}
    answers = {step: read_lines(file) for step, file in validation_files(folder).items()}
    assert {step: fmean(answer["reward"] for answer in kept) for step, kept in answers.items()} == recorded
    assert {len(kept) for kept in answers.values()} == {16}
    assert all(answer["prompt"].endswith("=") and answer["response"].isascii() for answer in answers[STEPS])
    # Generated problems recur, and count once where arms are paired.
    assert len(read_rewards(validation_files(folder)[STEPS])) == len({answer["prompt"] for answer in answers[STEPS]})


def test_a_run_keeps_no_answers_if_told_so(tmp_path):
    train(tmp_path, grpo={"max_num_steps": 1}, logger={"validation_answers": False})
    assert validation_files(tmp_path) == {}


def check_diagnostics(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_000001.jsonl",
        "step_000001.npz",
        "step_000003.jsonl",
        "step_000003.npz",
    ]
    with np.load(folder / "step_000003.npz") as arrays:
        assert set(arrays) >= DIAGNOSTICS
        assert len(arrays["seq_prox_ratio"]) == 32
        assert np.isfinite(arrays["token_curr_logprob"]).all()
    examples = [json.loads(line) for line in (folder / "step_000003.jsonl").read_text().splitlines()]
    assert examples
    assert {"prompt", "response", "answer", "reward", "advantage", "error_tokens"} <= set(examples[0])
    assert examples[0]["prompt"].endswith("=")


def test_a_run_that_goes_on_with_another_reward_function_says_so(tmp_path, monkeypatch, capsys):
    write_jsonl(tmp_path / "problems.jsonl", [{"problem": f"{n}+1=", "answer": str(n + 1)} for n in range(8)])
    monkeypatch.syspath_prepend(tmp_path)
    one = {"data_path": str(tmp_path / "problems.jsonl"), "reward_function": "changing_rewards:score"}

    def go_on(reward, steps):
        (tmp_path / "changing_rewards.py").write_text(f"def score(response, answer): return {reward} * len(response)\n")
        monkeypatch.delitem(sys.modules, "changing_rewards", raising=False)
        data = {"_override_": True, "source": "datasets", "train": one}
        train(tmp_path / "run", data=data, grpo={"max_num_steps": steps})
        return "reward function changing_rewards:score changed since step 1 of this run" in capsys.readouterr().err

    assert not go_on(1.0, 1)
    assert go_on(-10.0, 2)
    assert [record["reward/mean"] > 0 for record in read_metrics(tmp_path / "run")] == [True, False]
