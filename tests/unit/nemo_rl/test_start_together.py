"""Engines and a learner that share GPUs and start at the same time: the learner's ranks wait for the engines."""

import os
import sys
import threading
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray", reason="needs Ray")

from qarl_nemo.nemo_rl.start_together import GATE, StartTogether, wait_for_engines  # noqa: E402

pytestmark = pytest.mark.slow


@ray.remote(num_cpus=0)
class Rank:
    def __init__(self):
        wait_for_engines()

    def started(self):
        return True


@pytest.fixture(scope="module", autouse=True)
def cluster():
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": paths})
    yield
    ray.shutdown()


@pytest.fixture
def nemo_rl(monkeypatch):
    """The names that `setup` uses: engines that start once they may, and say what was asked of them."""

    class Engines:
        may_start, asked, falls_asleep = threading.Event(), [], True

        @staticmethod
        def init_cluster_placement_groups(cluster, config):
            Engines.asked.append("placement groups")

        def __init__(self, cluster, config, defer_model_load=False):
            assert self.may_start.wait(60)
            if cluster is None:
                raise ValueError("no GPU")
            self.cfg = config
            self.asked.append("start")

        def finish_generation(self):
            self.asked.append("sleep")
            return self.falls_asleep

    # What the start leaves in the environment goes with the test.
    monkeypatch.setenv(GATE, "")
    yield SimpleNamespace(VllmGeneration=Engines)
    Engines.may_start.set()


def ranks():
    """Make a learner as NeMo-RL does, whose ranks get the environment of their maker."""
    return Rank.options(runtime_env={"env_vars": {GATE: os.environ[GATE]}}).remote()


def set_up(nemo_rl, together, cluster, may_start):
    """Do what NeMo-RL's `setup` does, in its order, and let engines start once the learner's ranks are made."""
    own = nemo_rl.VllmGeneration
    with together.engines(nemo_rl):
        engines = nemo_rl.VllmGeneration(cluster=cluster, config={"shared": True})
        engines.finish_generation()
        learner = together.learner(lambda: may_start(ranks()))
    assert nemo_rl.VllmGeneration is own
    return engines, learner


def test_ranks_wait_until_engines_sleep(nemo_rl):
    own, waited = nemo_rl.VllmGeneration, []

    def may_start(learner):
        ready, _ = ray.wait([learner.started.remote()], timeout=3.0)
        waited.append(not ready and own.asked == ["placement groups"])
        own.may_start.set()
        return learner

    engines, learner = set_up(nemo_rl, StartTogether(), "four GPUs", may_start)
    assert waited == [True]
    assert own.asked == ["placement groups", "start", "sleep"]
    assert ray.get(learner.started.remote(), timeout=60)
    # From now on engines are put to sleep as NeMo-RL does it.
    assert engines.finish_generation()
    assert own.asked[3:] == ["sleep"]
    assert engines.cfg == {"shared": True}


@pytest.mark.parametrize(
    ("cluster", "falls_asleep", "error"),
    [(None, True, "no GPU"), ("four GPUs", False, "did not fall asleep")],
)
def test_engines_that_do_not_start_end_the_learners_start(nemo_rl, cluster, falls_asleep, error):
    own = nemo_rl.VllmGeneration
    own.falls_asleep = falls_asleep

    def may_start(learner):
        own.may_start.set()
        return learner

    with pytest.raises((RuntimeError, ValueError), match=error):
        set_up(nemo_rl, StartTogether(), cluster, may_start)


def test_engines_that_nemo_gym_loads_start_as_nemo_rl_starts_them(nemo_rl):
    own = nemo_rl.VllmGeneration
    own.may_start.set()
    together = StartTogether()
    with together.engines(nemo_rl):
        engines = nemo_rl.VllmGeneration("four GPUs", {}, defer_model_load=True)
        assert engines.finish_generation()
        assert together.learner(lambda: "learner") == "learner"
    assert own.asked == ["start", "sleep"]
    assert not os.environ[GATE]


def test_a_learner_without_engines_beside_it_waits_for_nobody(nemo_rl):
    assert StartTogether().learner(lambda: "learner") == "learner"
    wait_for_engines()
