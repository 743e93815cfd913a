"""The commands of whole steps: what the pages and the waiting list run fits, and what cannot is refused at once."""

import importlib.util
import itertools
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from qarl_nemo.config import ConfigError
from qarl_nemo.memory import GIB
from qarl_nemo.metrics.results import read_results
from qarl_nemo.nemo_rl.checks import data_files
from qarl_nemo.nemo_rl.config import apply_qarl
from qarl_nemo.nemo_rl.layout import read_layout
from qarl_nemo.nemo_rl.layout_memory import needed_memory
from qarl_nemo.nemo_rl.lookup import look_up
from support.documents import commands
from support.full_size import composed
from support.nemo_rl.recipes import own_settings

ROOT = Path(__file__).parents[2]
ON_GPU = ROOT / "tools" / "on_gpu"
# The present version, and all other runs.
PAGES = [ROOT / "docs" / "evidence" / name for name in ("full_size.md", "full_size_runs.md")]
RUN = "tools/bench/full_size/run.py"


@pytest.fixture(autouse=True)
def harness(tools):
    tools("bench/full_size")


def jobs() -> list[tuple[Any, list[str]]]:
    """The jobs of whole steps that wait for GPUs, and their commands' words."""
    # Tests are collected before a fixture could let them import it.
    spec = importlib.util.spec_from_file_location("gpu_jobs", ON_GPU / "jobs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    listed = module.read_jobs(ON_GPU / "waiting" / "whole_steps.yaml")
    split = [(job, list(itertools.dropwhile(is_variable, shlex.split(job.run)))) for job in listed]
    return [(job, words) for job, words in split if words[1] == RUN]


def is_variable(word: str) -> bool:
    """Whether a word sets an environment variable for the command behind it."""
    return word.partition("=")[0].isidentifier() and "=" in word


def waiting() -> list[list[str]]:
    """The commands of whole steps that wait for GPUs."""
    return [words for _, words in jobs()]


def on_pages() -> list[list[str]]:
    """The commands of whole steps that the pages give."""
    return [words for page in PAGES for words in commands(page) if words[1:2] == [RUN]]


def documented() -> list[tuple[str, str, str, float, tuple[str, ...]]]:
    """What is said to run: workload, arm, placement, GiB of a GPU, settings."""
    found = []
    for words in [*on_pages(), *waiting()]:
        workload, arms, placements = named(words)
        rest = float((options(words, "cap-gib") or ["140"])[0]), tuple(options(words, "set"))
        found += [(workload, arm, place, *rest) for arm, place in itertools.product(arms, placements)]
    return list(dict.fromkeys(found))


def options(words, name) -> list[str]:
    """What a command gives an option that may be repeated."""
    return [value for option, value in itertools.pairwise(words) if option == f"--{name}"]


def named(words) -> tuple[str, list[str], list[str]]:
    """The workload, the arms and the placements of a command."""
    arms, placements = options(words, "arm") or ["w4a16"], options(words, "placement") or ["colocated"]
    return options(words, "workload")[0], arms, placements


def test_what_can_be_run_has_its_rows_or_waits_for_gpus():
    from arms import row_name

    def rows(words):
        workload, arms, placements = named(words)
        label = "".join(options(words, "label"))
        return {f"full_step_s_{row_name(arm, place, label)}_{workload}" for arm in arms for place in placements}

    listed = set().union(*map(rows, waiting()))
    asked = set().union(*map(rows, on_pages()))
    measured = {row.name for row in read_results(ROOT / "docs" / "results" / "full_size.json")}
    assert asked - measured - listed == set()


def test_the_pages_run_what_their_rows_ran(tmp_path):
    def run(words):
        workload, arms, placements = named(words)
        changes = tuple(options(words, "set"))
        composed_of = itertools.product(arms, placements)
        return [(workload, composed(workload, arm, place, 140.0, changes, tmp_path)) for arm, place in composed_of]

    pages = [config for words in on_pages() for config in run(words)]
    ran = {row.command for row in read_results(ROOT / "docs" / "results" / "full_size.json") if RUN in row.command}
    # Those of earlier options run no more.
    told = [words for words in map(shlex.split, ran) if "--gpus" not in words]
    assert len(told) >= 5
    for words in told:
        (config,) = run(words if "--workload" in words else [*words, "--workload", "a"])
        assert config in pages, shlex.join(words)


@pytest.mark.parametrize(
    "case",
    [case if case[1] == "w4a16" else pytest.param(case, marks=pytest.mark.slow) for case in documented()],
    ids=lambda case: "-".join(map(str, case)),
)
def test_what_is_said_to_run_fits(tmp_path, case):
    values = composed(*case, tmp_path)
    apply_qarl(values)
    layout = read_layout(values)
    assert layout is not None
    assert layout.learner_gpus + (0 if layout.colocated else layout.engine_gpus) == layout.gpus_per_node


def test_a_job_asks_for_the_memory_that_its_run_takes(tmp_path):
    """The host's as computed, so that a host with less does not start it; of a GPU no more than the run may take."""
    named_host: dict[str, tuple[float, float]] = {}
    for job, words in jobs():
        cap = options(words, "cap-gib")
        assert job.memory_gib <= float((cap or ["141"])[0]), job.name
        workload, (arm,), (place,) = named(words)
        # As on a larger GPU, where a cap says that the optimizer leaves.
        changes = ["qarl.resident=false"] if cap else []
        values = composed(
            workload, arm, place, float((cap or ["140"])[0]), (*changes, *options(words, "set")), tmp_path
        )
        qarl = apply_qarl(values)
        ours = not arm.startswith("nemo_rl")
        needed = needed_memory(values, qarl, optimizer_stays=qarl.resident, engines_forget=ours)
        assert needed is not None
        # One number stands for all that a job expands to.
        name = job.name.split(".")[0]
        said, most = job.host_gib or 300, named_host.get(name, (0, 0))[1]
        named_host[name] = said, max(most, sum(needed.host.values()) / GIB)
    assert {name: pair for name, pair in named_host.items() if pair[1] > pair[0] + 1} == {}
    shipped = {name: pair for name, pair in named_host.items() if name.startswith(("two_", "eight_"))}
    assert len(shipped) > 8
    # Nor does it ask for so much more that a host would be left out for nothing.
    assert {name: pair for name, pair in shipped.items() if pair[0] > pair[1] + 1} == {}


def test_a_placement_that_cannot_be_says_why():
    from arms import Placement

    assert Placement.parse("separate_1_3", 4) == Placement(1, 3)
    assert Placement.parse("asynchronous_2_2", 4).asynchronous
    for name in ("apart", "separate", "separate_0_4"):
        with pytest.raises(ValueError, match="legal: colocated, separate_E_L"):
            Placement.parse(name, 4)
    with pytest.raises(ValueError, match="4 GPUs, where the workload has 2"):
        Placement.parse("separate_2_2", 2)


def test_nemo_rls_own_refit_is_imported_before_anything_starts(monkeypatch, capsys, tmp_path):
    import arms
    import refusals
    import run

    recipe = tmp_path / arms.OWN_RECIPE
    recipe.parent.mkdir(parents=True)
    recipe.touch()
    # As on a host that has nccl4py without cuda-core.
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    monkeypatch.setattr(run, "_prepare", lambda *_: pytest.fail("something was made"))
    command = ["run.py", str(tmp_path / "work"), "--nemo-rl", str(tmp_path), "--workload", "a12_2gpu"]
    monkeypatch.setattr(
        sys, "argv", [*command, "--arm", "w4a16", "--arm", "nemo_rl_best", "--placement", "separate_1_1"]
    )
    with pytest.raises(SystemExit):
        run.main()
    assert "--arm nemo_rl_best: NeMo-RL refits engines" in (said := capsys.readouterr().err)
    assert "install nccl4py and cuda-core" in said
    # Ours, and engines beside the learner, do without it.
    refusals.require_transport(["w4a16"])


def test_a_check_finds_the_files_that_it_names_and_starts_nothing_else(monkeypatch, tmp_path):
    import run

    root, asked = tmp_path / "nemo_rl", []
    monkeypatch.setattr(run, "require_possible", lambda _: None)
    monkeypatch.setattr(run, "host_hint", lambda *_, **__: None)
    monkeypatch.setattr(
        run.subprocess, "run", lambda command, **_: asked.append(command) or SimpleNamespace(returncode=0)
    )
    monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path / "work"), "--nemo-rl", str(root), "--check"])
    assert run.main() == 0
    ((*_, config, last),) = asked
    assert last == "--check"
    values = yaml.safe_load(Path(config).read_text())
    monkeypatch.setattr(data_files, "first_gpu_gib", lambda: 140.0)
    assert data_files.file_conflicts(values["data"]) == []
    assert not (tmp_path / "work" / "nemo_rl_root").exists()
    # What a launcher would say without them.
    Path(values["data"]["train"]["data_path"]).unlink()
    (line,) = data_files.file_conflicts(values["data"])
    assert line.startswith("data.train.data_path=")


def test_a_cap_holds_learner_and_engine_on_a_larger_gpu(monkeypatch, tmp_path):
    import run
    from arms import SHARE

    config = composed("8gpu", "w4a16", "colocated", 79.0, (), tmp_path)
    assert look_up(config, SHARE) == 0.6
    monkeypatch.setattr(run, "first_gpu_gib", lambda: 140.0)
    share, allocator, optimizer = run.capped(79.0, config, ours=True)
    # 0.6 of 79 GiB are as much of 140; the learner's tensors have 79 without 6 for its process and 4 for the engine's.
    assert share == f"{SHARE}={0.6 * 79 / 140:.3f}"
    assert f"per_process_memory_fraction:{69 / 140:.3f}" in allocator
    assert optimizer == "++qarl.resident=false"
    # A share that --set says is one of the part, too, and whether the optimizer stays is not said twice.
    said = ("policy.generation.vllm_cfg.gpu_memory_utilization=0.5", "qarl.resident=true")
    share, *rest = run.capped(79.0, composed("8gpu", "bf16", "colocated", 79.0, said, tmp_path), ours=True)
    assert share == f"{SHARE}={0.5 * 79 / 140:.3f}"
    assert len(rest) == 1
    # A machine without a GPU is checked as if its GPUs were that large.
    monkeypatch.setattr(run, "first_gpu_gib", lambda: None)
    assert run.capped(79.0, config, ours=True) == ["++qarl.gpu_memory_gib=79.0"]


def test_recipes_run_as_they_are_shipped(tmp_path):
    from arms import ARMS, SHARE

    keys = (SHARE, "policy.megatron_cfg.optimizer.optimizer", "policy.sequence_packing.train_mb_tokens")
    for arm in ("w4a16", "w4a8", "fp8_block", "fp8_channel", "bf16"):
        recipe = ROOT / "examples" / "configs" / f"qarl-qwen3-30ba3b-1n8g-megatron-{ARMS[arm].recipe}.yaml"
        shipped = own_settings(recipe)
        assert look_up(shipped, keys[1]) == "dist_muon"
        for workload in ("8gpu", "2gpu"):
            config = composed(workload, arm, "colocated", 79.0, (), tmp_path)
            assert {key: look_up(config, key) for key in keys} == {key: look_up(shipped, key) for key in keys}
    # Other workloads have the settings that suit the host best.
    assert look_up(composed("a", "w4a16", "colocated", 140.0, (), tmp_path), keys[1]) == "adam"


def test_a_learner_without_room_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="a learner rank needs 168 GiB"):
        apply_qarl(composed("a24", "w4a16", "separate_1_1", 140.0, (), tmp_path))
