"""The harness of whole steps: what its runs measured, what is held against it, and what they are made of."""

import csv
import json
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from qarl_nemo.config import read_yaml
from qarl_nemo.memory import ModelSize
from qarl_nemo.metrics.runs import load_run
from qarl_nemo.nemo_rl.config import apply_qarl
from support.full_size import MODEL, SECONDS, composed, write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def harness(tools):
    tools("bench/full_size")


def test_memory_is_given_to_the_phase_that_held_it(tmp_path):
    import phase_memory

    write_run(tmp_path, ends=[1000.0, 1022.0, 1044.0])
    run = load_run(tmp_path / "logs")
    found = phase_memory.memory_figures(tmp_path, run, [2, 3])
    # Seconds 0 and 1 of a step are the refit's, 2 to 11 the rollout's, 13 to 15 those of log-probabilities, 16 to 21
    # the update's.
    ends = {"refit": 1.0, "rollout": 11.0, "prev_logprobs": 15.0, "update": 21.0}
    assert {phase: found[f"full_memory_gib_{phase}"][0] for phase in ends} == ends
    assert found["full_memory_host_gib_rollout"] == (40.0, "GiB", "<=")
    assert found["full_memory_host_anonymous_gib_rollout"] == (9.0, "GiB", "<=")
    assert found["full_memory_reserved_gib_update"][0] == 93.0
    # Nothing is said about the first step, nor an error without what was allocated.
    assert "full_memory_error" not in found
    # Where phases overlap only the learner's ranks know what they held in each.
    overlapping = phase_memory.memory_figures(tmp_path, run, [2, 3], asynchronous=True)
    assert set(overlapping) == {"full_memory_reserved_gib_update"}


def test_a_hosts_memory_is_recorded_in_parts(tmp_path, monkeypatch):
    import host_memory

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=(handle + 1) * 2**30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    file = tmp_path / "memory.csv"
    with host_memory.recorded_memory(file, 2):
        while not file.is_file() or len(file.read_text().splitlines()) < 2:
            threading.Event().wait(0.05)
    with file.open(newline="") as rows:
        row = next(csv.DictReader(rows))
    assert list(row) == ["time_s", "host_gib", "host_anonymous_gib", "host_shared_gib", "gpu0_gib", "gpu1_gib"]
    assert (row["gpu0_gib"], row["gpu1_gib"]) == ("1.0", "2.0")
    # What this process holds is a part of what all hold.
    assert 0 < float(row["host_anonymous_gib"]) <= float(row["host_gib"]) + float(row["host_shared_gib"])


def test_memory_is_held_against_what_is_computed(tmp_path):
    import phase_memory
    import record

    write_run(tmp_path / "w4a16", ends=[1000.0, 1022.0], allocated=90.0)
    values = composed("a24", "w4a16", "colocated", 140.0, (), tmp_path)
    apply_qarl(values)
    # Logs are read where the model's folder is another one.
    values["policy"]["model_name"] = "elsewhere"
    (tmp_path / "w4a16" / "logs" / "exp_001" / "config.yaml").write_text(yaml.safe_dump(values))
    timed = record.Timed.read(tmp_path / "w4a16")
    found = phase_memory.memory_figures(timed.folder, timed.run, [2])
    # As the page says: 94.4 GiB on the GPU, where optimizer and parameters stay; engines copy little to the host.
    assert found["full_memory_computed_gib"][0] == pytest.approx(94.43, abs=0.01)
    assert found["full_memory_error"][0] == pytest.approx(4.43 / 90, rel=1e-2)
    assert found["full_memory_host_computed_gib"][0] == pytest.approx(20.34, abs=0.01)
    assert found["full_memory_host_error"][0] == pytest.approx(19.66 / 40, rel=1e-2)
    # Ranks that parted with their parameters said so.
    (tmp_path / "w4a16" / "driver.txt").write_text("qarl: rank 1: parameters leave while the engine runs\n")
    left = phase_memory.memory_figures(timed.folder, timed.run, [2])
    assert left["full_memory_host_computed_gib"][0] == pytest.approx(20.34 + 2 * (16 + 4), abs=0.01)


def test_arms_are_compared_by_their_median_and_their_fastest_step(tmp_path):
    import phase_bars
    import phase_memory
    import record

    def timed(name, ends, **facts):
        write_run(tmp_path / name, ends=ends, **facts)
        return record.Timed.read(tmp_path / name)

    one = timed("one", (100.0, 122.0, 144.0))
    slowing = {"ends": (100.0, 144.0, 188.0), "seconds": (22.0, 44.0, 66.0)}
    others = [
        timed("nemo_rl", (100.0, 122.0, 144.0), arm="nemo_rl"),
        timed("bf16", **slowing, arm="bf16"),
        timed("nemo_rl_best", (100.0, 122.0, 144.0), arm="nemo_rl_best"),
    ]
    assert record.ratios(one, others, skip=[1]) == {
        "full_step_ratio": (1.0, "", "<="),
        "full_step_ratio_fastest": (1.0, "", "<="),
        "full_step_over_own_bf16": (pytest.approx(22 / 55), "", "<="),
        "full_step_over_own_bf16_fastest": (pytest.approx(0.5), "", "<="),
        "full_step_over_nemo_rl_best": (1.0, "", "<="),
        "full_step_over_nemo_rl_best_fastest": (1.0, "", "<="),
    }
    assert record.figures(others[1], [1])["full_step_spread"] == (pytest.approx(22 / 55), "", "<=")
    assert record.figures(others[1], [1])["full_step_fastest_s"] == (44.0, "s", "<=")
    # The first row of memory.csv is written a second after the command, 22 s before the first step's end.
    assert phase_memory.start_seconds(tmp_path / "one", one.run) == pytest.approx(1.0)
    figures = record.figures(one, [1])
    # A run of NeMo-RL's own launcher says nothing of our gap, so that it has no such row.
    assert "full_gap" not in figures
    rows = {f"{name}_w4a16_a": value for name, (value, _, _) in figures.items()}
    assert phase_bars.phase_bars(rows, "a") == {
        "w4a16": {"refit": 2.0, "rollout": 10.0, "prev_logprobs": 3.0, "update": 6.0, "rest": 1.0}
    }
    # A row of `a12_8gpu` is none of `8gpu`.
    eight = {name.replace("_a", "_a12_8gpu"): value for name, value in rows.items()}
    assert phase_bars.phase_bars(eight, "8gpu") == {}
    twice = rows | {name.replace("_a", "_a24"): value for name, value in rows.items()}
    assert list(phase_bars.labelled(twice, ["a", "a24"])) == ["qarl_nemo, w4a16, a", "qarl_nemo, w4a16, a24"]
    assert phase_bars.labelled(twice, ["a", "a24"], without=["w4a16"]) == {}


@pytest.mark.parametrize("seconds", [None, 0.0, 0.05])
def test_a_step_that_scored_nothing_has_no_rows_of_it(tmp_path, seconds):
    import phase_bars
    import phase_memory
    import record

    skipped = ("policy_and_reference_logprobs", "logprob_inference_prep")
    phases = {phase: took for phase, took in SECONDS.items() if phase not in skipped}
    # NeMo-RL times what skipping takes, too.
    phases |= {} if seconds is None else {skipped[0]: seconds}
    write_run(tmp_path, ends=(100.0, 122.0, 144.0), phases=phases)
    timed = record.Timed.read(tmp_path)
    figures = record.figures(timed, [1])
    assert not [name for name in figures if "logprob" in name]
    # Of 22 s 10 are rollout and 6 update.
    assert figures["full_other_share"][0] == pytest.approx(6 / 22)
    rows = {f"{name}_w4a16_a": value for name, (value, _, _) in figures.items()}
    assert phase_bars.phase_bars(rows, "a") == {
        "w4a16": {"refit": 2.0, "rollout": 10.0, "prev_logprobs": 0.0, "update": 6.0, "rest": 4.0}
    }
    assert {"full_memory_gib_rollout", "full_memory_gib_refit"} <= {
        *phase_memory.memory_figures(tmp_path, timed.run, [2, 3])
    }


def test_a_refits_parts_have_rows(tmp_path):
    import record

    parts = {"publish": 0.4, "wake_weights": 0.5}
    write_run(tmp_path / "ours", ends=(100.0, 122.0), refit=parts)
    write_run(tmp_path / "theirs", ends=(100.0, 122.0), arm="nemo_rl_best")

    def rows(name):
        figures = record.figures(record.Timed.read(tmp_path / name), [1])
        return {figure: value for figure, value in figures.items() if figure.startswith("full_refit_s_")}

    assert rows("ours") == {f"full_refit_s_{part}": (pytest.approx(s), "s", "<=") for part, s in parts.items()}
    # NeMo-RL's own refit is in one piece.
    assert rows("theirs") == {}
    # What our synchronizer and the push to engines time has a row each.
    source = "".join((ROOT / "qarl_nemo" / file).read_text() for file in ("nemo_rl/synchronizer.py", "refit/push.py"))
    assert {*re.findall(r'_timed\(\w+, "(\w+)"\)', source), "publish"} == {*record.REFIT_PARTS, "wait"}


@pytest.mark.parametrize(
    ("figure", "arm", "workload", "goal"),
    [
        ("full_step_over_nemo_rl_best", "w4a16", "a", 0.67),
        ("full_step_over_nemo_rl_best", "fp8_block", "a", 0.70),
        ("full_step_over_own_bf16", "fp8_block", "b", 0.70),
        ("full_step_ratio", "w4a16", "b", 0.40),
        ("full_step_s", "w4a16", "a", 30.0),
        ("full_other_share", "bf16", "a", 0.12),
        ("full_memory_error", "bf16", "a24", 0.05),
        # No other format was promised int4's or FP8's share of a BF16 step, and half of a model nothing.
        ("full_step_over_nemo_rl_best", "bf16", "a", None),
        ("full_step_over_nemo_rl_best", "w4a16_experts", "a", None),
        ("full_step_over_own_bf16", "fp8_channel", "a", None),
        ("full_step_ratio", "fp8_block", "a", None),
        ("full_step_over_own_bf16", "w4a16", "a24", None),
        ("full_step_s", "bf16", "a", None),
    ],
)
def test_a_goal_is_of_the_arms_that_were_promised_it(figure, arm, workload, goal):
    import record

    assert record.goal_of(figure, arm, workload) == goal


def test_a_learner_of_its_own_is_as_fast_as_its_gpus(tmp_path):
    import record

    write_run(tmp_path, ends=(100.0, 122.0), workload="a12_2gpu", placement="separate_1_1")
    figures = record.figures(record.Timed.read(tmp_path), [1])
    # 64 answers of 100 tokens to prompts of 243, on two GPUs in 22 s and on the learner's one in 6 s.
    assert figures["full_tokens_s_gpu"][0] == pytest.approx(64 * 343 / 2 / 22)
    assert figures["full_update_tokens_s_gpu"][0] == pytest.approx(64 * 343 / 6)


def test_what_is_not_the_same_work_is_not_compared(tmp_path):
    import record

    def timed(workload, **facts):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write_run(folder, ends=(100.0, 122.0), workload=workload, **facts)
        return record.Timed.read(folder)

    one, two, half = timed("a12_1gpu"), timed("a12_2gpu"), timed("a24")
    assert record.scaling(two, one, [1]) == {"full_scaling_efficiency_from_1gpu": (1.0, "", ">=")}
    for wrong in (half, timed("a12_4gpu", arm="bf16")):
        with pytest.raises(ValueError, match="not the same on fewer GPUs with as much work"):
            record.scaling(wrong, one, [1])
    with pytest.raises(ValueError, match="another workload"):
        record.ratios(two, [half], [1])
    here, there, unknown = (timed("a24", arm=f"arm_{host}", host=host) for host in ("here", "there", ""))
    with pytest.raises(ValueError, match="ran on another host than"):
        record.ratios(here, [there], [1])
    assert record.ratios(here, [unknown], [1])
    with pytest.raises(ValueError, match=r"it has steps \[1, 2\], and --skip leaves none"):
        half.steps([1, 2])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "++grpo.num_prompts_per_step=4"], "--set grpo.num_prompts_per_step: other options say it"),
        (["--label", "EP 8"], "--label 'EP 8': rows end in it"),
        (["--steps", "1"], "--steps 1: the first one compiles and does not count"),
        (["--check", "--config", "nothing.json"], "nothing.json: expected a model's config.json"),
        ([], "--workload a runs on 4 GPU(s), and this machine has 2; --check says what would run"),
    ],
)
def test_what_could_not_run_or_be_recorded_is_refused(monkeypatch, capsys, tmp_path, words, said):
    import arms
    import refusals
    import run

    recipe = tmp_path / "nemo_rl" / arms.OWN_RECIPE
    recipe.parent.mkdir(parents=True)
    recipe.touch()
    monkeypatch.setattr(refusals, "num_gpus", lambda: 2)
    work = tmp_path / "work"
    monkeypatch.setattr(sys, "argv", ["run.py", str(work), "--nemo-rl", str(tmp_path / "nemo_rl"), *words])
    with pytest.raises(SystemExit):
        run.main()
    assert said in capsys.readouterr().err
    assert not work.exists()


def test_other_settings_have_a_name_of_their_own():
    from arms import row_name

    assert row_name("w4a16", "colocated") == "w4a16"
    assert row_name("w4a16", "separate_4_4", "141gb") == "w4a16_separate_4_4_141gb"


def test_drawn_answers_are_the_same_work_in_every_step():
    from workloads import WORKLOADS

    for name in ("b", "b24", "b12"):
        work = WORKLOADS[name]
        first, second = work.lengths(2)
        assert sorted(first) == sorted(second)
        assert first != second
        assert (max(first), np.mean(first)) == (4096, pytest.approx(2979, rel=0.01))
    assert WORKLOADS["a"].lengths(1) == [[2048] * 128]


class Batch(dict):
    """Two prompts."""

    size = 2

    def copy(self):
        return Batch(self)


def test_each_answer_gets_the_next_length(tmp_path, monkeypatch):
    import answer_lengths

    engines, batch = type("Engines", (), {})(), Batch(input_ids=None)
    assert answer_lengths.with_lengths(engines, batch) is batch
    (tmp_path / "lengths.json").write_text("[[5, 6, 7], [8, 9, 10]]")
    monkeypatch.setenv(answer_lengths.FILE, str(tmp_path / "lengths.json"))
    given = [answer_lengths.with_lengths(engines, batch)[answer_lengths.KEY].tolist() for _ in range(4)]
    assert given == [[5, 6], [7, 8], [9, 10], [5, 6]]
    assert set(batch) == {"input_ids"}


def test_steps_that_are_under_way_together_keep_their_lengths(tmp_path, monkeypatch):
    import answer_lengths

    (tmp_path / "lengths.json").write_text("[[1, 2, 3, 4], [5, 6, 7, 8]]")
    monkeypatch.setenv(answer_lengths.FILE, str(tmp_path / "lengths.json"))
    engines, given, turn = type("Engines", (), {})(), {}, threading.Barrier(2, timeout=30)

    def ask(step):
        for _ in range(2):
            turn.wait()
            sized = answer_lengths.with_lengths(engines, Batch())
            given.setdefault(step, []).extend(sized[answer_lengths.KEY].tolist())

    threads = [threading.Thread(target=ask, args=(step,)) for step in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given.values()) == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.slow
def test_a_model_has_every_weight_and_prompts_of_one_length(tmp_path):
    from model import make_model
    from safetensors import safe_open
    from transformers import AutoTokenizer
    from workloads import PROMPT_TOKENS

    config = read_yaml(MODEL / "config.json") | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    make_model(tmp_path / "config.json", tmp_path, prompt_tokens=PROMPT_TOKENS - 3, num_prompts=1)
    model = tmp_path / "model"
    index = json.loads((model / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * ModelSize.read(model).num_parameters
    written: set[str] = set()
    for name in set(index["weight_map"].values()):
        with safe_open(model / name, "pt") as file:
            written |= set(file.keys())
    assert written == set(index["weight_map"])
    # The files are holes behind their headers.
    assert sum(file.stat().st_blocks * 512 for file in model.glob("*.safetensors")) < 2**20
    tokenizer = AutoTokenizer.from_pretrained(model)
    message = {"role": "user", "content": json.loads((tmp_path / "train.jsonl").read_text())["input"]}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == PROMPT_TOKENS
