"""NeMo-RL's log folders are runs that the report reads like the embedded engine's."""

import inspect
import json
import math
import re

import numpy as np
import pytest
import torch
import yaml
from torch.utils.tensorboard import SummaryWriter

from qarl_nemo.metrics import nemo_rl_dumps, nemo_rl_logs
from qarl_nemo.metrics.diagnostics import DiagnosticsCollector
from qarl_nemo.metrics.error_tokens import error_token_mask
from qarl_nemo.metrics.report import write_report
from qarl_nemo.metrics.report.timings import phase_seconds
from qarl_nemo.metrics.runs import load_run, load_runs
from qarl_nemo.metrics.summary import summarize_run

PROMPTS, GENERATIONS = 4, 2
CONFIG = {
    "policy": {
        "model_name": "Qwen/Qwen3-30B-A3B",
        "qarl": {"alignment": "aligned", "format": "w4a16", "objective": {"objective": "tbpo"}},
    },
    "grpo": {"seed": 3, "num_prompts_per_step": PROMPTS, "num_generations_per_prompt": GENERATIONS},
}


def write_start(folder, steps, *, reward=0.5, gap=2e-3, slower=1.0, config=CONFIG, entropy=None, more=None):
    """What one start of a run leaves behind, by the writer that NeMo-RL's TensorBoard logger uses.

    `more` are further scalars of single steps: step -> tag -> value.
    """
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    writer = SummaryWriter(log_dir=str(folder / "tensorboard"))
    writer.add_hparams({"policy.precision": "bfloat16"}, {})
    writer.add_scalar("timing/setup/total_setup_time_s", 30.0, 0)
    for step in steps:
        scalars = {
            "train/reward": reward + 0.01 * step,
            "train/mean_gen_tokens_per_sample": 50.0,
            "train/gen_kl_error": 1e-4,
            "train/truncation_rate": 0.25,
            "train/approx_entropy": 0.7,
            "train/qarl/skipped_steps": 1.0,
            "train/qarl/memory/update_allocated_gib": 90.0,
            "train/qarl/abs_gap": gap,
            "train/qarl/kept_fraction": 0.9,
            "train/qarl/fraction_positive": 0.5,
            "train/qarl/in_band_fraction_positive": 0.25,
            "train/qarl/error_tokens": 0.01,
            "train/qarl/error_tokens_negative": 0.008,
            "train/qarl/tokens_negative": 0.4,
            "train/qarl/error_tokens_positive": 0.0,
            "train/qarl/tokens_positive": 0.0,
            "timing/train/total_step_time": 10.0,
            "timing/train/generation": 4.0,
            "timing/train/prepare_for_generation/total": 1.0,
            "timing/train/prepare_for_generation/transfer_and_update_weights": 0.5,
            "timing/train/policy_training": 3.0,
            "refit/total_s": 0.3,
        }
        if entropy and step in entropy:
            scalars["train/qarl/entropy"] = entropy[step]
        for tag, value in (scalars | (more or {}).get(step, {})).items():
            writer.add_scalar(tag, value * (slower if tag.startswith("timing/") else 1.0), step)
    writer.close()
    return folder


def write_dump(folder, step, gap, *, without=(), last_prev=-2.0, computed=True):
    """One line a response, every value in a list of one, as NeMo-RL writes them."""
    rows = []
    for index, advantage in enumerate((1.0, -1.0, 0.5)):
        prev = [0.0, 0.0, -1.0, last_prev]
        row = {
            "content": [["user: 1+1?", f"answer {index}", "Environment: correct"]],
            "rewards": [1.0],
            "token_ids": [[1, 2, 3, 4]],
            "token_loss_mask": [[0, 0, 1, 1]],
            "sample_loss_mask": [0.0 if index == 2 else 1.0],
            "advantages": [[advantage] * 4],
            "generation_logprobs": [[0.0, 0.0, -1.0 - gap, last_prev - gap]],
            "prev_logprobs": [prev if computed else [0.0] * 4],
            "idx": index,
        }
        rows.append({key: value for key, value in row.items() if key not in without})
    (folder / f"train_data_step{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_columns_carry_the_embedded_engines_names(tmp_path):
    run = load_run(write_start(tmp_path / "exp_001", range(1, 6)))
    assert run.steps.tolist() == [1, 2, 3, 4, 5]
    assert run.column("reward/mean") == pytest.approx([0.51, 0.52, 0.53, 0.54, 0.55])
    assert run.column("mismatch/abs_gap_mean") == pytest.approx([2e-3] * 5)
    assert run.column("mismatch/kl_k3") == pytest.approx([1e-4] * 5)
    assert run.column("truncated_fraction") == pytest.approx([0.25] * 5)
    assert run.column("loss/approx_entropy") == pytest.approx([0.7] * 5)
    assert np.isnan(run.column("loss/entropy")).all(), "an estimate is not under the exact one's name"
    exact = write_start(tmp_path / "exp_002", range(1, 6), entropy={4: 0.6})
    assert load_run(exact).column("loss/entropy")[3] == pytest.approx(0.6)
    assert run.column("optim/skipped_steps") == pytest.approx([1.0] * 5)
    assert run.column("memory/update_allocated_gib") == pytest.approx([90.0] * 5)
    assert run.column("error_tokens/rate_negative") == pytest.approx([0.02] * 5)
    assert np.isnan(run.column("error_tokens/rate_positive")).all(), "no token has a positive advantage"
    assert run.column("band_share/in_band_positive") == pytest.approx([0.5] * 5)
    assert run.column("timing/rollout_s") == pytest.approx([4.0] * 5)
    assert run.column("timing/refit_s") == pytest.approx([1.0] * 5), "inner timers are not counted twice"
    assert run.column("throughput/rollout_tokens_s") == pytest.approx([PROMPTS * GENERATIONS * 50 / 4] * 5)
    assert run.column("time_s")[-1] == pytest.approx(50.0)
    assert (run.arm, run.seed, run.setting("qarl.format")) == ("aligned w4a16 tbpo", 3, "w4a16")


def test_a_validations_seconds_are_a_phase_of_its_step(tmp_path):
    """NeMo-RL logs them apart from the step's own timers, whose total they are part of."""
    run = load_run(
        write_start(tmp_path / "exp_001", range(1, 3), more={2: {"timing/validation/total_validation_time": 1.5}})
    )
    phases = phase_seconds(run)
    assert phases["validation"] == pytest.approx([0.0, 1.5])
    assert phases["other"] == pytest.approx([2.0, 0.5])


def test_a_resumed_run_is_one_run_and_its_later_start_wins(tmp_path):
    write_start(tmp_path / "exp_999", range(1, 8), reward=0.1)
    write_start(tmp_path / "exp_1000", range(6, 11), reward=0.5)
    write_start(tmp_path / "exp_1000_copy", range(6, 12), reward=0.9)
    run = load_run(tmp_path)
    assert run.steps.tolist() == list(range(1, 11))
    assert run.column("reward/mean")[4:6] == pytest.approx([0.15, 0.56])
    assert summarize_run(run)["num_steps"] == 10


def test_the_newest_dump_gives_weights_and_tokens_of_responses_that_count(tmp_path):
    folder = write_start(tmp_path / "exp_001", [9, 10])
    write_dump(folder, 9, gap=5.0)
    write_dump(folder, 10, gap=0.1)
    diagnostics = load_run(folder).diagnostics
    assert diagnostics.step == 10
    assert diagnostics.arrays["seq_mismatch_weight"] == pytest.approx([math.exp(0.1)] * 2)
    assert diagnostics.arrays["seq_advantage"].tolist() == [1.0, -1.0]
    assert diagnostics.arrays["token_prev_logprob"].tolist() == [-1.0, -2.0, -1.0, -2.0]
    first = diagnostics.examples[0]
    assert (first["prompt"], first["response"]) == ("user: 1+1?", "answer 0"), "as NeMo-RL's messages tell them apart"
    write_dump(folder, 10, gap=0.1, last_prev=math.nan)
    assert len(load_run(folder).diagnostics.arrays["seq_mismatch_weight"]) == 0, "one broken token spoils a response"


def test_what_an_abandoned_start_dumped_is_no_part_of_the_run(tmp_path):
    first, second = write_start(tmp_path / "exp_001", range(1, 31)), write_start(tmp_path / "exp_002", range(21, 26))
    for step in (20, 30):
        write_dump(first, step, gap=5.0)
        DiagnosticsCollector(step).write(first)
    diagnostics = load_run(tmp_path).diagnostics
    assert (diagnostics.step, diagnostics.examples != []) == (20, True)
    DiagnosticsCollector(25).write(second)
    assert load_run(tmp_path).diagnostics.step == 25


def test_a_step_that_the_loss_recorded_comes_with_examples_of_the_newest_dump(tmp_path):
    first, second = write_start(tmp_path / "exp_001", range(1, 9)), write_start(tmp_path / "exp_002", range(7, 11))
    write_dump(second, 10, 0.1)
    for start, step, ratio in ((first, 4, 1.5), (first, 8, 2.0), (second, 8, 3.0)):
        collector = DiagnosticsCollector(step)
        values = {"prox_ratio": [ratio], "mismatch_weight": [1.0], "advantage": [1.0], "kept": [True], "valid": [True]}
        tokens = {"prev_logprobs": [[-1.0]], "curr_logprobs": [[-0.5]], "generation_logprobs": [[-1.1]]}
        collector.add(values, **tokens, advantages=[[1.0]], token_mask=[[True]], error_mask=[[True]])
        collector.write(start)
    diagnostics = load_run(tmp_path).diagnostics
    assert (diagnostics.step, len(diagnostics.examples)) == (8, 2)
    assert diagnostics.arrays["seq_prox_ratio"].tolist() == [3.0]
    assert diagnostics.arrays["token_curr_logprob"].tolist() == [-0.5]
    assert diagnostics.arrays["position_error_tokens"].tolist() == [1.0]


def shown_examples(html):
    rows = html[html.index("<h3>Examples</h3>") :].split("</table>")[0].split("<tr>")[2:]
    return [re.findall(r'<td class="num">(.*?)</td>', row) for row in rows]


def test_examples_keep_their_own_step_and_their_error_tokens_are_counted(tmp_path):
    folder = write_start(tmp_path / "exp_001", range(1, 6))
    DiagnosticsCollector(1).write(folder)
    # The last token of each has a probability of exp(-9) = 1.2e-4 under both policies.
    write_dump(folder, 5, gap=0.1, last_prev=-9.0)
    html = write_report([folder], tmp_path / "report.html").read_text()
    # step, reward, errors
    assert shown_examples(html) == [["5", "1.00", "1"]] * 2
    assert "counted but not marked" in html
    write_dump(folder, 5, gap=0.1)
    html = write_report([folder], tmp_path / "report.html").read_text()
    assert [row[2] for row in shown_examples(html)] == ["0", "0"]
    assert "counted but not marked" not in html


def test_dumps_alone_give_error_tokens_by_position_and_nobody_counts_without_tokens(tmp_path):
    folder = write_start(tmp_path / "exp_001", range(1, 6), config=None)
    write_dump(folder, 5, gap=0.1, last_prev=-9.0)
    arrays = load_run(folder).diagnostics.arrays
    assert arrays["position_tokens"].tolist() == [2, 2], "the third response does not count"
    assert arrays["position_error_tokens"].tolist() == [0, 2]
    assert '<img src="data:' in (page := write_report([folder], tmp_path / "report.html").read_text())
    assert 'alt="Error tokens by position' in page
    write_dump(folder, 5, gap=0.1, last_prev=-9.0, without=["token_ids"])
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert [row[2] for row in shown_examples(page)] == ["-", "-"]
    assert 'alt="Error tokens by position' not in page


def test_under_dynamic_sampling_a_response_has_its_own_reward(tmp_path):
    """There NeMo-RL dumps beside it, as `rewards`, those of all that were sampled, in another order."""
    folder = write_start(tmp_path / "exp_001", [1])
    write_dump(folder, 1, gap=0.1)
    file = folder / "train_data_step1.jsonl"
    rows = [json.loads(line) | {"rewards": [1.0], "filtered_rewards": [0.0]} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [example["reward"] for example in load_run(folder).diagnostics.examples] == [0.0, 0.0]


def test_log_probabilities_that_nobody_computed_are_no_figures(tmp_path):
    """With `force_on_policy_ratio` NeMo-RL dumps zeros in their place."""
    folder = write_start(tmp_path / "exp_001", range(1, 6), config=None)
    write_dump(folder, 5, gap=0.1, last_prev=-9.0, computed=False)
    arrays = load_run(folder).diagnostics.arrays
    assert [len(arrays[key]) for key in ("seq_mismatch_weight", "token_prev_logprob")] == [0, 0]
    assert "position_error_tokens" not in arrays
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert [row[2] for row in shown_examples(page)] == ["-", "-"]


def test_rollouts_speed_counts_all_batches_that_a_step_sampled():
    """Dynamic sampling asks until enough groups of answers differ; NeMo-RL's timer goes on, and so must the count."""
    values = {
        "train/mean_gen_tokens_per_sample": 50.0,
        "train/dynamic_sampling_num_gen_batches": 3.0,
        "timing/train/generation": 4.0,
        "timing/train/policy_training": 2.0,
    }
    config = nemo_rl_logs.report_config({**CONFIG, "grpo": {**CONFIG["grpo"], "batch_multiplier": 1.5}})
    record = nemo_rl_logs.step_record(values, config)
    assert record["throughput/rollout_tokens_s"] == pytest.approx(PROMPTS * 1.5 * GENERATIONS * 50 * 3 / 4)
    assert record["throughput/update_tokens_s"] == pytest.approx(PROMPTS * GENERATIONS * 50 / 2)


def test_rollouts_beside_training_have_no_speed():
    """NeMo-RL's asynchronous loop only times how long training waits for them."""
    values = {"train/mean_gen_tokens_per_sample": 50.0, "timing/train/exposed_generation": 0.01}
    record = nemo_rl_logs.step_record(values, nemo_rl_logs.report_config(CONFIG))
    assert record["timing/rollout_s"] == pytest.approx(0.01)
    assert "throughput/rollout_tokens_s" not in record


def test_our_estimate_of_the_mismatch_goes_before_nemo_rls():
    theirs = {"train/gen_kl_error": -2e-3}
    assert nemo_rl_logs.step_record(theirs, {})["mismatch/kl_k3"] == -2e-3
    record = nemo_rl_logs.step_record(theirs | {"train/qarl/mismatch_kl_k3": 5e-4}, {})
    assert record["mismatch/kl_k3"] == 5e-4
    assert "loss/mismatch_kl_k3" not in record


def test_error_tokens_of_dumps_are_those_of_the_engines():
    options = inspect.signature(error_token_mask).parameters
    names = ("max_prob", "max_ngram", "min_repeats", "min_run_tokens")
    assert [options[name].default for name in names] == [getattr(nemo_rl_dumps, name.upper()) for name in names]
    rng = np.random.default_rng(0)
    marked = 0
    for case in range(300):
        # Repetitions of units up to one token longer than counts, of about the least length, between other tokens.
        unit, copies = rng.integers(0, 3, rng.integers(1, 10)), rng.integers(2, 7)
        ids = np.concatenate([rng.integers(0, 3, 6), np.tile(unit, copies), rng.integers(0, 3, rng.integers(1, 12))])
        prev, generation = rng.uniform(-9.0, 0.0, (2, len(ids)))
        mask = np.arange(len(ids)) >= rng.integers(0, 12)
        mask[rng.integers(0, len(ids))] &= case % 2 == 0
        found = nemo_rl_dumps.response_error_mask(prev, generation, ids, mask)
        wanted = error_token_mask(*(torch.tensor(values)[None] for values in (prev, generation, ids, mask)))[0]
        assert found.tolist() == wanted.tolist(), case
        marked += (found & ~((prev < math.log(1e-3)) & (generation < math.log(1e-3)))).sum()
    assert marked > 300, "repetitions are among them"


def test_the_report_shows_it_beside_a_run_of_nemo_rl_alone(tmp_path):
    ours = write_start(tmp_path / "ours" / "exp_001", range(1, 6))
    write_dump(ours, 5, gap=0.1)
    plain = write_start(tmp_path / "plain" / "exp_001", range(1, 6), config=None)
    html = write_report([ours, plain], tmp_path / "report.html").read_text()
    assert "aligned w4a16 tbpo" in html
    assert "plain/exp_001" in html
    assert "not started by examples/run_qarl_grpo.py" in html
    assert "<h3>Approximate entropy</h3>" in html
    assert "<h3>Entropy</h3>" not in html
    assert "exact, over the whole vocabulary" not in html


def test_the_page_shows_config_and_examples_and_outlives_what_is_no_number(tmp_path):
    folder = write_start(tmp_path / "logs" / "exp_001", [1])
    write_dump(folder, 1, gap=math.nan)
    html = write_report([tmp_path / "logs"], tmp_path / "report.html").read_text()
    assert "num_generations_per_prompt: 2" in html
    assert "answer 0" in html


def test_a_folder_without_scalars_says_what_to_set(tmp_path):
    folder = tmp_path / "exp_001"
    folder.mkdir()
    write_dump(folder, 1, gap=0.1)
    (run,) = load_runs([folder])
    assert any("logger.tensorboard_enabled=true" in sentence for sentence in run.missing)


def test_recorded_figures_are_over_the_bf16_run(record, tmp_path):
    folders = {}
    for name, slower, gap in (("bf16", 2.0, 1e-3), ("w4a16", 1.0, 2e-3)):
        folders[name] = write_start(tmp_path / name, range(1, 11), slower=slower, gap=gap)
        facts = {"command": "python run", "hardware": "1x NVIDIA H200", "versions": {"vllm": "0.25.1"}}
        (folders[name] / "run.json").write_text(json.dumps(facts))
    runs = (f"--run={name}={path}" for name, path in folders.items())
    rows = {name: row.value for name, row in record("nemo_rl_runs", *runs).items()}
    assert rows["run_steps_w4a16"] == 10
    assert rows["step_speedup_w4a16"] == pytest.approx(2.0)
    assert rows["gap_ratio_w4a16"] == pytest.approx(2.0)
    assert rows["refit_s_w4a16"] == pytest.approx(0.3)
    assert rows["phase_s_rollout_bf16"] == pytest.approx(8.0)
    assert "step_speedup_bf16" not in rows


PRINTED = """
(Worker pid=1) ========================= Step 1/100 =========================
  \u2022 Loss: -0.0186
  \u2022 Generation KL Error: 0.0000
  \u2022 Avg Reward: 0.1641
  \u2022 Total step time: 26.12s
  \u2022 generation: 6.69s (25.6%)
  \u2022 prepare_for_generation/total: 8.54s (32.7%)
  \u2022 prepare_for_generation/transfer_and_update_weights: 4.39s (16.8%)
  \u2022 Mean Total Tokens per Sample: 26.46
========================= Step 2/100 =========================
  \u2022 Avg Reward: 0.2000
"""


def test_what_was_printed_of_finished_steps_stands_in_for_a_lost_log_folder(record, tmp_path):
    driver, facts = tmp_path / "driver.txt", tmp_path / "run.json"
    driver.write_text(PRINTED)
    facts.write_text(json.dumps({"command": "elsewhere", "hardware": "1x NVIDIA H200", "versions": {"vllm": "0.25.1"}}))
    rows = record("nemo_rl_runs", f"--run=w4a16={driver}", f"--facts={facts}", "--command=python again")
    assert (rows["run_steps_w4a16"].value, rows["run_steps_w4a16"].met) == (1, False)
    assert rows["step_s_w4a16"].value == pytest.approx(26.12)
    assert rows["phase_s_rollout_w4a16"].value == pytest.approx(6.69)
    assert rows["refit_s_w4a16"].value == pytest.approx(4.39)
    assert {row.command for row in rows.values()} == {"python again"}


def test_of_a_step_that_was_printed_twice_the_later_start_counts(record, tmp_path):
    driver, facts = tmp_path / "driver.txt", tmp_path / "run.json"
    facts.write_text(json.dumps({"command": "elsewhere", "hardware": "1x NVIDIA H200", "versions": {}}))
    step = "=== Step {}/100 ===\n  \u2022 Avg Reward: {}\n  \u2022 Total step time: {}s\n"
    # The second start goes on from step 1, and is killed in its third.
    starts = (step.format(*values) for values in ((1, 0.1, 10), (2, 0.2, 20), (3, 0.3, 30), (2, 0.4, 40)))
    driver.write_text("".join(starts) + "=== Step 3/100 ===\n  \u2022 Avg Reward: 0.5\n")
    rows = record("nemo_rl_runs", f"--run=w4a16={driver}", f"--facts={facts}")
    assert rows["run_steps_w4a16"].value == 2
    assert rows["step_s_w4a16"].value == pytest.approx(25)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", "policy: 5", r"config.yaml is damaged, or not a run's: policy"),
        ("config.yaml", "grpo: {seed: one}", r"config.yaml is damaged, or not a run's: grpo.seed"),
        ("train_data_step5.jsonl", "5\n", r"train_data_step5.jsonl, line 1: expected a JSON object"),
        ("train_data_step5.jsonl", '{"idx": 1}\n', r"step5.jsonl, line 1 is damaged: expected a response .* KeyError"),
        ("train_data_step5.jsonl", '{"token_loss_mask": []}\n', r"line 1 is damaged: .* IndexError"),
        (
            "train_data_step5.jsonl",
            '{"token_loss_mask": [[1]], "sample_loss_mask": [1], "prev_logprobs": [[1, 2]],'
            ' "generation_logprobs": [[1]], "advantages": [[1]]}\n',
            r"line 1 is damaged: .* ValueError shapes",
        ),
        (
            "train_data_step5.jsonl",
            '{"token_loss_mask": [[1]], "sample_loss_mask": [1], "prev_logprobs": [[1]],'
            ' "generation_logprobs": [[1]], "advantages": [[1]], "token_ids": [[7, 8]]}\n',
            r"line 1 is damaged: .*and in token_ids.* ValueError shapes",
        ),
    ],
)
def test_a_damaged_log_folder_names_file_place_and_what_was_expected(tmp_path, name, content, message):
    folder = write_start(tmp_path / "exp_001", [1])
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_run(folder)
