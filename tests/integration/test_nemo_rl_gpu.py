"""NeMo-RL's own GRPO through our launcher, on GPUs: `-k CASE` picks one of support/nemo_rl/cases.py.

A case wants its GPUs for itself: vLLM gives up falling asleep where another program takes memory meanwhile.

QARL_NEMO_RL_MODELS   folder with tiny/, 1b/ and dense/ (each with model/, train.jsonl, val.jsonl) for several processes
QARL_NEMO_RL_LOGS     folder where logs and outputs stay, one folder a case
QARL_NEMO_RL_PORT     first of 2000 free ports
QARL_NEMO_RL_TIMEOUT  seconds that one start may take
"""

import importlib.util
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from support.nemo_rl import installed  # noqa: F401 skips where NeMo-RL is not

missing = [name for name in ("ray", "psutil", "transformer_engine") if importlib.util.find_spec(name) is None]
if missing:
    pytest.skip(f"needs {', '.join(missing)}", allow_module_level=True)

# isort: split
import pynvml  # noqa: E402

from qarl_nemo.metrics.diagnostics import diagnostic_steps  # noqa: E402
from qarl_nemo.metrics.nemo_rl_logs import find_config  # noqa: E402
from qarl_nemo.metrics.runs import Run, load_run  # noqa: E402
from support.nemo_rl.cases import CASES, Case, Start  # noqa: E402
from support.nemo_rl.cluster import ray_cluster  # noqa: E402
from support.nemo_rl.starts import Ended, keep, make_model, run_start  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return the model folders' parent."""
    given = os.environ.get("QARL_NEMO_RL_MODELS")
    return Path(given) if given else tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", CASES)
def test_nemo_rl_runs(name, models, tmp_path):
    case = CASES[name]
    for package in case.needs:
        pytest.importorskip(package)
    gpus, num_host_gpus = visible_gpus()
    if len(gpus) < case.gpus:
        pytest.skip(f"needs {case.gpus} GPUs, sees {len(gpus)}")
    model = make_model(case.model, models / case.model, gpus[0])
    port = os.environ.get("QARL_NEMO_RL_PORT")
    finished, rewards = 0, []
    with ray_cluster(gpus[: case.gpus], num_host_gpus, port and int(port)) as cluster:
        try:
            for start in case.starts:
                ended = run_start(case, start, cluster, model, tmp_path)
                assert ended.code is not None, f"time was up:\n{ended.text[-5000:]}"
                if start.executes is not None:
                    require_executed(case, start, ended)
                if ended.logs is not None:
                    rewards += load_run(ended.logs).column("reward/mean").tolist()
                if start.kills:
                    require_clear_end(start, ended, finished)
                    finished += start.kills_after
                    continue
                assert ended.code == 0, ended.text[-5000:]
                require_steps(case, start, ended, finished)
                finished = start.steps
                if start.learns is not None:
                    assert np.mean(rewards[-10:]) - np.mean(rewards[:10]) > start.learns, rewards
        finally:
            kept = os.environ.get("QARL_NEMO_RL_LOGS")
            if kept:
                keep(cluster, tmp_path, Path(kept) / name)


def visible_gpus() -> tuple[list[int], int]:
    """Return the GPUs that this process may use, as the host numbers them, and how many the host has."""
    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = list(range(torch.cuda.device_count())) if given is None else [int(one) for one in given.split(",")]
    return gpus, count


def require_executed(case: Case, start: Start, ended: Ended) -> None:
    """Every learner rank executed what it should, and rollouts were what they should be."""
    said = dict(re.findall(r"qarl: rank (\d+) executes (.*; rollouts are \w+)", ended.text))
    assert sorted(map(int, said)) == list(range(case.num_learners)), ended.text[-5000:]
    for text in said.values():
        assert text.startswith(start.executes), text
        assert text.endswith(f"rollouts are {start.rollouts}"), text
    told = re.findall(rf"qarl: rank (\d+): {start.says}", ended.text) if start.says else said
    assert set(told) == set(said), ended.text[-5000:]


def require_clear_end(start: Start, ended: Ended, finished: int) -> None:
    """The program ended by itself, with an error that names what died, in the step it was in."""
    assert ended.code != 0
    last = finished + start.kills_after + 1
    # An engine that dies once it has answered is missed in the next step.
    assert ended.begun[-1] in (last, last + 1)
    assert "Traceback" in ended.text
    assert re.search(rf"(ActorDied|ActorUnavailable|RayActor)Error[\s\S]*{start.kills}", ended.text), ended.text[-5000:]


def require_steps(case: Case, start: Start, ended: Ended, finished: int) -> None:
    """The steps went on from the last start's, each served new weights, and the learner agreed with the sampler."""
    assert ended.logs is not None
    run = load_run(ended.logs)
    assert run.steps.tolist() == list(range(finished + 1, start.steps + 1))
    assert np.isfinite(run.column("loss/total")).all()
    assert (run.column("timing/step_s") > 0).all()
    if start.executes is None:
        return
    assert find_config(ended.logs), "the launcher describes its run"
    require_versions(case, run)
    assert diagnostic_steps(ended.logs)[0] == finished + 1
    assert run.column("loss/entropy")[0] > 0, "exact, in the steps with diagnostics"
    assert (run.column("mismatch/nonfinite_tokens") == 0).all()
    allocated, reserved = (run.column(f"memory/update_{kind}_gib") for kind in ("allocated", "reserved"))
    assert ((allocated > 0) & (allocated <= reserved)).all(), (allocated, reserved)
    gaps = run.column("mismatch/abs_gap_mean")
    smallest, largest = start.gap
    assert np.isfinite(gaps).all(), gaps
    assert smallest < gaps.mean() < largest, gaps
    shares = run.column("refit/flipped_codes")
    if len(run.steps) > 2:
        # The first refit of a start has nothing to be compared with.
        assert np.isfinite(shares).any() == (start.rollouts != "bf16"), shares
    grids = run.column("refit/grid_bits")
    # Nor has a stage's, and no grid is logged without a schedule.
    assert np.isnan(shares[1:][np.abs(np.diff(grids)) > 0]).all(), (grids, shares)


def require_versions(case: Case, run: Run) -> None:
    """Every step is of one more version; where a validation refits, its version is the one that is logged."""
    versions = run.column("refit/version")
    if case.validates is None:
        assert (np.diff(versions) == 1).all(), versions
        return
    assert (np.diff(versions[np.isfinite(versions)]) >= 1).all(), versions
    scores = run.column("validation/reward")
    validated = run.steps % case.validates == 0
    assert (np.isfinite(scores) == validated).all(), scores
