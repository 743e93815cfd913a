"""A Megatron learner behind the embedded engine's loop: the same run as with the transformers learner.

Set QARL_MEGATRON_RESULTS to a file to keep the differences as rows of docs/results.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qarl_nemo.config import ConfigError
from qarl_nemo.config.problems import attempt
from qarl_nemo.files import FileError, exclusive, require_free
from qarl_nemo.metrics.results import Figure
from qarl_nemo.train.checkpoint import checkpoint_dir, checkpoint_steps
from qarl_nemo.train.config import ModelInit
from qarl_nemo.train.model import tiny_config
from qarl_nemo.train.run import LOCK_FILE
from qarl_nemo.train.run_dir import RunToldError
from qarl_nemo.train.tokenizer import character_tokenizer
from support.megatron.results import keep_megatron
from support.needs import MEGATRON
from support.programs import environment, run_program
from support.runs import BASE, QARL, STEPS, make_config, read_metrics, train, without_clocks, write_config

pytestmark = [
    pytest.mark.slow,
    MEGATRON,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares sums in FP32 on a CPU"),
]

# Other orders of the same FP32 sums.
SUMS_DIFFER = 1e-5
MODEL = {"num_key_value_heads": 2}
ATTENTION = QARL["attention too"]
ROLLOUT_ONLY = {"alignment": "rollout_only"}


def train_megatron(run_dir: Path, *, ranks: int = 1, sizes=(), policy=None, **blocks) -> list[dict]:
    """Metrics of a run with a Megatron learner."""
    settings = (policy or {}) | {"megatron_cfg": {"num_gpus": ranks, **dict(sizes)}}
    config = write_config(run_dir.with_suffix(".yaml"), run_dir, policy=settings, **blocks)
    run_program("megatron.run_rank", config, ranks=ranks)
    return without_clocks(read_metrics(run_dir))


def test_ranks_listen_on_this_host_alone_and_failures_end_in_a_line(tmp_path, monkeypatch, capfd):
    from qarl_nemo.train.megatron.ranks import launch_ranks

    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    assert launch_ranks(2, ["-m", "support.megatron.run_listening", str(tmp_path)]) == 0
    for rank in ("0", "1"):
        # 127.0.0.1, as the kernel writes it
        assert json.loads((tmp_path / rank).read_text()) == {"sum": 2.0, "addresses": ["0100007F"]}
    assert launch_ranks(2, ["-m", "support.megatron.run_listening", str(tmp_path / "nowhere")]) == 1
    said = capfd.readouterr().err
    assert "FileNotFoundError" in said
    assert "ChildFailedError" not in said
    assert re.search(r"qarl: rank [01] ended with code 1, and the others were ended\n\Z", said)


def test_what_ended_a_rank_is_named():
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from qarl_nemo.train.megatron.torchrun import ended

    said = [ended(1, ProcessFailure(7, 7, code, "<N/A>")) for code in (2, -signal.SIGKILL, -signal.SIGSEGV)]
    assert said == [
        "rank 1 ended with code 2, and the others were ended",
        "rank 1 was ended by SIGKILL, as the system does where memory is short, and the others were ended",
        "rank 1 was ended by SIGSEGV, and the others were ended",
    ]


def test_ranks_that_are_told_to_end_save_and_go_on_to_the_same_metrics(tmp_path):
    settings = {"model_init": MODEL, "megatron_cfg": {"num_gpus": 2, "expert_model_parallel_size": 2}}
    run_dir, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    blocks = {"policy": settings, "checkpointing": {"save_period": 100}}
    config = write_config(tmp_path / "run.yaml", run_dir, grpo={"max_num_steps": 1000}, **blocks)
    command = [sys.executable, "-m", "support.megatron.run_launched", str(config)]
    launcher = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while not metrics.exists() or not metrics.read_text():
            assert launcher.poll() is None, launcher.stdout.read()
            time.sleep(0.05)
        launcher.terminate()
        printed = launcher.communicate(timeout=120)[0]
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 143, printed
    assert "Traceback" not in printed
    last = read_metrics(run_dir)[-1]["step"]
    assert checkpoint_steps(run_dir)[-1] == last < 1000
    sizes = {"expert_model_parallel_size": 2}
    policy = {"model_init": MODEL}
    parts, whole = (
        train_megatron(folder, ranks=2, sizes=sizes, policy=policy, grpo={"max_num_steps": last + 1})
        for folder in (run_dir, tmp_path / "whole")
    )
    assert parts == whole


@pytest.mark.parametrize("tell", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end twice"])
def test_ranks_end_with_the_process_that_launched_them(tell, tmp_path):
    run_dir, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    sums = tmp_path / "sums.jsonl"
    sums.write_text("".join(json.dumps({"problem": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(9)))
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def score(response, answer):\n"
        f"    time.sleep(60 * bool(Path({str(metrics)!r}).read_text()))\n"
        "    return len(response)\n"
    )
    data = {"_override_": True, "source": "datasets"}
    data |= {"train": {"data_path": str(sums), "reward_function": "slow:score"}}
    policy = {"model_init": MODEL, "megatron_cfg": {"num_gpus": 2, "expert_model_parallel_size": 2}}
    blocks = {"policy": policy, "data": data, "grpo": {"max_num_steps": 9, "val_period": 0}}
    config = write_config(tmp_path / "run.yaml", run_dir, **blocks)
    command = [sys.executable, "-m", "support.megatron.run_launched", str(config)]
    settings = environment(TMPDIR=str(tmp_path / "ranks"))
    settings["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    (tmp_path / "ranks").mkdir()
    launcher = subprocess.Popen(command, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not metrics.exists() or not metrics.read_text():
            assert launcher.poll() is None
            time.sleep(0.05)
        launcher.send_signal(tell)
        if tell == signal.SIGTERM:
            time.sleep(5.5)
            launcher.send_signal(tell)
        assert launcher.wait(timeout=20) == -tell
    finally:
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + 20
    while True:
        problems = list[str]()
        attempt(problems, require_free, run_dir / LOCK_FILE, "the run's folder")
        problems += map(str, (tmp_path / "ranks").glob("qarl-ranks-*"))
        if not problems:
            return
        assert time.monotonic() < deadline, problems
        time.sleep(0.1)


def test_another_run_is_refused_before_ranks_start_and_changes_nothing(tmp_path, monkeypatch):
    from qarl_nemo.train.megatron import launch

    started = []
    monkeypatch.setattr(launch, "require_machine", lambda *_: None)
    monkeypatch.setattr(launch, "launch_ranks", lambda *arguments: started.append(arguments) or 0)
    policy = {"model_init": MODEL, "megatron_cfg": {"num_gpus": 2}}
    launch.train_with_megatron(make_config(tmp_path, policy=policy))
    ((ranks, _, settings),) = started
    assert (ranks, settings["seed"]) == (2, BASE["seed"])
    # What ranks read lies nowhere where another command writes, too.
    assert not list(tmp_path.iterdir())
    with exclusive(tmp_path / LOCK_FILE, "it"), pytest.raises(FileError, match="is in use by process"):
        launch.train_with_megatron(make_config(tmp_path, policy=policy))
    train(tmp_path, grpo={"max_num_steps": 1})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="seed: there 3, now 9"):
        launch.train_with_megatron(make_config(tmp_path, policy=policy, seed=9))
    assert (len(started), sorted(tmp_path.rglob("*"))) == (1, before)


def test_a_run_that_was_told_to_end_in_its_last_step_is_complete(tmp_path, monkeypatch):
    from qarl_nemo.train.megatron import launch

    monkeypatch.setattr(launch, "require_machine", lambda *_: None)
    monkeypatch.setattr(launch, "launch_ranks", lambda *_: RunToldError.exit_code)
    config = make_config(tmp_path, policy={"model_init": MODEL, "megatron_cfg": {"num_gpus": 2}})
    with pytest.raises(RunToldError, match="stopped before the first step"):
        launch.train_with_megatron(config)
    monkeypatch.setattr(launch, "is_complete", lambda _: True)
    launch.train_with_megatron(config)


def largest_difference(records, expected) -> float:
    """Over all metrics of all steps, absolute where the metric is below one, else relative.

    Shares of flipped codes are left out: one code more, at a tie, is more than sums differ by.
    """
    assert [record.keys() for record in records] == [record.keys() for record in expected]
    return max(
        abs(record[key] - wanted[key]) / max(1.0, abs(wanted[key]))
        for record, wanted in zip(records, expected, strict=True)
        for key in record
        if not key.startswith("refit/flipped_")
    )


def keep_figure(name: str, value: float) -> None:
    """With QARL_MEGATRON_RESULTS, what was measured becomes a row of docs/results."""
    figure = Figure(name, float(f"{value:.2g}"), "", "<", SUMS_DIFFER)
    engines = {"megatron-core": version("megatron-core")}
    keep_megatron([figure], "cpu", engines, f"tests/integration/{Path(__file__).name}")


@pytest.fixture(scope="module")
def transformers_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformers")
    train(folder / "run", policy={"model_init": MODEL}, qarl=ATTENTION)
    return without_clocks(read_metrics(folder / "run"))


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        pytest.param(1, {}, id="one_rank"),
        pytest.param(2, {"expert_model_parallel_size": 2}, id="dp2_ep2"),
        pytest.param(2, {"tensor_model_parallel_size": 2, "use_distributed_optimizer": False}, id="tp2"),
    ],
)
def test_a_run_gives_the_transformers_learners_rewards_and_losses(ranks, sizes, transformers_run, tmp_path, request):
    found = train_megatron(tmp_path / "run", ranks=ranks, sizes=sizes, policy={"model_init": MODEL}, qarl=ATTENTION)
    difference = largest_difference(found, transformers_run)
    keep_figure(f"run_difference_{request.node.callspec.id}", difference)
    assert difference < SUMS_DIFFER
    assert [record["weight_version"] for record in found] == [2, 4, 6, 8]


def test_the_comparison_notices_a_learner_that_is_not_aligned(transformers_run, tmp_path):
    unaligned = train_megatron(tmp_path / "run", policy={"model_init": MODEL}, qarl=ATTENTION | ROLLOUT_ONLY)
    assert largest_difference(unaligned, transformers_run) > 100 * SUMS_DIFFER
    train(tmp_path / "expected", policy={"model_init": MODEL}, qarl=ATTENTION | ROLLOUT_ONLY)
    assert largest_difference(unaligned, without_clocks(read_metrics(tmp_path / "expected"))) < SUMS_DIFFER


def test_update_aware_steps_are_the_transformers_learners(tmp_path):
    # Larger steps would carry more weights over a tie, where other orders of sums round otherwise.
    policy = {name: {"model_init": MODEL, "optimizer": {"lr": 1e-4, "update_aware_scale": scale}}
              for name, scale in (("expected", 2.0), ("plain", 1.0))}  # fmt: skip
    for name, settings in policy.items():
        train(tmp_path / name, policy=settings, qarl=ATTENTION)
    expected, plain = (without_clocks(read_metrics(tmp_path / name)) for name in policy)
    found = train_megatron(tmp_path / "run", policy=policy["expected"], qarl=ATTENTION)
    assert largest_difference(found, expected) < SUMS_DIFFER
    assert largest_difference(found, plain) > 100 * SUMS_DIFFER


@pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="needs emerging-optimizers, and Python 3.12")
def test_muons_steps_are_nearly_the_transformers_learners(tmp_path):
    muon = {"_override_": True, "name": "muon", "lr": 1e-4}
    policy = {name: {"model_init": MODEL, "optimizer": muon | more}
              for name, more in (("expected", {}), ("wrong", {"lr": 5e-4}))}  # fmt: skip
    for name, settings in policy.items():
        train(tmp_path / name, policy=settings, qarl=ATTENTION)
    expected, wrong = (without_clocks(read_metrics(tmp_path / name)) for name in policy)
    sizes = {"tensor_model_parallel_size": 2, "use_distributed_optimizer": False}
    found = train_megatron(tmp_path / "run", ranks=2, sizes=sizes, policy=policy["expected"], qarl=ATTENTION)
    # Its iterations multiply in lower precision. By Megatron's default a step would be five times as long.
    nearly = 500 * SUMS_DIFFER
    assert [record["reward/mean"] for record in found] == [record["reward/mean"] for record in expected]
    assert largest_difference(found, expected) < nearly
    assert largest_difference(found, wrong) > 5 * nearly


def test_stages_are_entered_on_every_rank(tmp_path):
    qarl = ATTENTION | {"schedule": [{"from_step": 3, "bits": 2, "reset_moments": True}]}
    # With smaller steps fewer weights lie on a tie, where other orders of sums round otherwise.
    policy = {"model_init": MODEL, "optimizer": {"lr": 1e-4}}
    train(tmp_path / "expected", policy=policy, qarl=qarl)
    expected = without_clocks(read_metrics(tmp_path / "expected"))
    found = train_megatron(tmp_path / "run", ranks=2, policy=policy, qarl=qarl)
    assert [record["refit/grid_bits"] for record in found] == [4, 4, 2, 2]
    assert largest_difference(found, expected) < SUMS_DIFFER
    kept = qarl | {"schedule": [{"from_step": 3, "bits": 2}]}
    train(tmp_path / "kept", policy=policy, qarl=kept)
    assert largest_difference(found, without_clocks(read_metrics(tmp_path / "kept"))) > 100 * SUMS_DIFFER


def test_noise_is_served_and_replayed_on_every_rank(tmp_path):
    qarl, policy = ATTENTION, {"model_init": MODEL, "optimizer": {"lr": 1e-4}}
    noise = {"noise": {"start": 0.1, "end": 0.05, "stages": STEPS}}
    train(tmp_path / "expected", policy=policy, qarl=qarl, rollout=noise)
    expected = without_clocks(read_metrics(tmp_path / "expected"))
    found = train_megatron(tmp_path / "run", ranks=2, policy=policy, qarl=qarl, rollout=noise)
    assert largest_difference(found, expected) < SUMS_DIFFER
    clean = train_megatron(
        tmp_path / "clean", policy=policy, qarl=qarl, rollout={"noise": noise["noise"] | {"mode": "clean"}}
    )
    gaps = [max(record["mismatch/abs_gap_mean"] for record in records) for records in (found, clean)]
    assert gaps[0] < SUMS_DIFFER < 100 * SUMS_DIFFER < gaps[1]


def test_a_run_that_was_cut_goes_on_to_the_same_bits(tmp_path):
    whole = train_megatron(tmp_path / "run", ranks=2)
    shutil.rmtree(checkpoint_dir(tmp_path / "run", STEPS))
    assert checkpoint_steps(tmp_path / "run") == [2]
    assert train_megatron(tmp_path / "run", ranks=2) == whole


def test_a_tied_head_is_trained_and_saved(tmp_path):
    tokenizer = character_tokenizer()
    hf = tiny_config(ModelInit(**BASE["policy"]["model_init"] | MODEL), tokenizer)
    hf.tie_word_embeddings = True
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(hf).save_pretrained(tmp_path / "tied")
    tokenizer.save_pretrained(tmp_path / "tied")
    # With smaller steps fewer weights lie on a tie, where other orders of sums round otherwise.
    policy = {"model_init": None, "model_path": str(tmp_path / "tied"), "optimizer": {"lr": 1e-4}}
    train(tmp_path / "expected", policy=policy)
    found = train_megatron(tmp_path / "run", policy=policy)
    assert largest_difference(found, without_clocks(read_metrics(tmp_path / "expected"))) < SUMS_DIFFER
    start, wanted, saved = (
        load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        for folder in (
            tmp_path / "tied",
            *(checkpoint_dir(tmp_path / run, STEPS) / "model" for run in ("expected", "run")),
        )
    )
    assert torch.allclose(saved, wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(saved, start, rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("facts")
    policy = {"model_init": {"num_hidden_layers": 2}, "megatron_cfg": {}}
    config = write_config(folder / "config.yaml", folder / "run", policy=policy)
    run_program("megatron.run_learner", config, folder / "facts.pt")
    return torch.load(folder / "facts.pt")


def apart(facts, one, other="") -> float:
    return float((facts["megatron"][one] - facts["transformers"][other or one]).abs().max())


def test_it_replays_the_engines_routes(facts):
    assert apart(facts, "replayed") < SUMS_DIFFER
    assert apart(facts, "chosen") < SUMS_DIFFER
    assert apart(facts, "replayed", "chosen") > 100 * SUMS_DIFFER


def test_it_takes_the_same_steps_and_publishes_the_same_tensors(facts):
    ours, theirs = facts["megatron"], facts["transformers"]
    assert apart(facts, "updated") < 10 * SUMS_DIFFER
    assert apart(facts, "updated", "replayed") > 100 * SUMS_DIFFER
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4, abs=1e-5)
    for name, values in theirs["sequences"].items():
        assert torch.allclose(ours["sequences"][name].double(), values.double(), atol=1e-4), name
    assert ours["published"] == theirs["published"]
    assert ours["version"] == theirs["version"] == 2


def test_a_step_that_is_not_finite_is_skipped(facts):
    for one in facts.values():
        assert one["skipped"] == (1.0, 1, 0)
        assert one["causes"] == ("response 0, response token 0: generation_logprobs is nan",)
        assert torch.equal(one["unchanged"], one["replayed"])
        assert one["applied"] == (0, 2)
