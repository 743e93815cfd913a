"""The commands of whole steps: what the page and the waiting list run fits, and what cannot is refused at once."""

import itertools
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from qarl_nemo.config import ConfigError
from qarl_nemo.metrics.results import read_results
from qarl_nemo.nemo_rl.config import apply_qarl
from qarl_nemo.nemo_rl.layout import read_layout
from qarl_nemo.nemo_rl.lookup import look_up
from support.documents import commands
from support.full_size import composed
from support.nemo_rl.recipes import own_settings

ROOT = Path(__file__).parents[2]
PAGE, RUN = ROOT / "docs" / "evidence" / "full_size.md", "tools/bench/full_size/run.py"


@pytest.fixture(autouse=True)
def harness(tools):
    tools("bench/full_size")


def waiting() -> list[list[str]]:
    """The commands of whole steps that wait for GPUs."""
    jobs = yaml.safe_load((ROOT / "tools" / "on_gpu" / "waiting.yaml").read_text())["jobs"]
    return [words for words in (shlex.split(job["run"]) for job in jobs) if words[1] == RUN]


def documented() -> list[tuple[str, str, str, float, tuple[str, ...]]]:
    """What is said to run: workload, arm, placement, GiB of a GPU, settings."""
    found = []
    for words in [*(words for words in commands(PAGE) if words[1:2] == [RUN]), *waiting()]:
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
    asked = set().union(*(rows(words) for words in commands(PAGE) if words[1:2] == [RUN]))
    measured = {row.name for row in read_results(ROOT / "docs" / "results" / "full_size.json")}
    assert asked - measured - listed == set()


def test_the_page_runs_what_its_rows_ran(tmp_path):
    def run(words):
        workload, arms, placements = named(words)
        changes = tuple(options(words, "set"))
        composed_of = itertools.product(arms, placements)
        return [(workload, composed(workload, arm, place, 140.0, changes, tmp_path)) for arm, place in composed_of]

    page = [config for words in commands(PAGE) if words[1:2] == [RUN] for config in run(words)]
    ran = {row.command for row in read_results(ROOT / "docs" / "results" / "full_size.json") if RUN in row.command}
    # Those of earlier options run no more.
    told = [words for words in map(shlex.split, ran) if "--gpus" not in words]
    assert len(told) >= 5
    for words in told:
        (config,) = run(words if "--workload" in words else [*words, "--workload", "a"])
        assert config in page, shlex.join(words)


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


def test_a_cap_holds_learner_and_engine_on_a_larger_gpu(monkeypatch):
    import run
    from arms import SHARE, settings

    config = settings("w4a16", "colocated", "8gpu", "NEMO_RL")
    monkeypatch.setattr(run, "first_gpu_gib", lambda: 140.0)
    share, allocator, optimizer = run.capped(79.0, config, ours=True)
    # 0.6 of 79 GiB are as much of 140; the learner's tensors have 79 without 6 for its process and 4 for the engine's.
    assert share == f"{SHARE}={0.6 * 79 / 140:.3f}"
    assert f"per_process_memory_fraction:{69 / 140:.3f}" in allocator
    assert optimizer == "++qarl.resident=false"
    # A machine without a GPU is checked as if its GPUs were that large.
    monkeypatch.setattr(run, "first_gpu_gib", lambda: None)
    assert run.capped(79.0, config, ours=True) == ["++qarl.gpu_memory_gib=79.0"]
    shipped = own_settings(ROOT / "examples" / "configs" / "qarl-qwen3-30ba3b-1n8g-megatron-w4a16.yaml")
    assert look_up(shipped, SHARE) == look_up(config, SHARE)


def test_a_learner_without_room_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="a learner rank needs 168 GiB"):
        apply_qarl(composed("a24", "w4a16", "separate_1_1", 140.0, (), tmp_path))
