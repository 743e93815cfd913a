"""Several engines as Ray actors, refitted as one: all of them or none.

The ranks here are the real receiving half without an engine around it; only GPUs have vLLM around it.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ray = pytest.importorskip("ray", reason="needs Ray")

from receiving_rank import ReceivingRank  # noqa: E402

from qarl_kernels import get_format  # noqa: E402
from qarl_nemo.nemo_rl.engines import RayEngines  # noqa: E402
from qarl_nemo.refit.colocated import push_from_all  # noqa: E402
from qarl_nemo.refit.manifest import Manifest  # noqa: E402
from qarl_nemo.refit.publish import RefitUpdate, StreamedUpdate  # noqa: E402
from qarl_nemo.refit.push import push, serving_version  # noqa: E402
from qarl_nemo.refit.send import CollectiveSender  # noqa: E402
from support.asserts import assert_bitwise_equal  # noqa: E402

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
NAMES = {"model.layers.0.mlp.experts.down_proj.weight_packed": torch.int32, "model.norm.weight": torch.bfloat16}


@ray.remote(num_cpus=0)
class Engine:
    def renew(self, num_ranks: int) -> None:
        """Be an engine that no refit has reached."""
        self.ranks = [ReceivingRank(rank) for rank in range(num_ranks)]
        self.busy = False

    def qarl_rpc(self, method, args=()):
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            calls = [pool.submit(getattr(rank, method), *args) for rank in self.ranks]
        return [call.result() for call in calls]

    def qarl_busy(self):
        return self.busy

    def qarl_reset_prefix_cache(self):
        return True

    def set_busy(self, busy):
        self.busy = busy


@pytest.fixture(scope="module", autouse=True)
def cluster():
    # Actors find this module, and what it imports, where the tests do.
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": paths})
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def actors(cluster):
    """Two processes that import torch, which takes longer than any test."""
    return [Engine.remote() for _ in range(2)]


@pytest.fixture
def engines(actors):
    ray.get([actor.renew.remote(num_ranks) for actor, num_ranks in zip(actors, (2, 1), strict=True)])
    found = RayEngines(actors)
    assert found.place() == 3
    return found


def update_of(version):
    tensors = {name: (torch.rand(4, 6) * 100).to(dtype) for name, dtype in NAMES.items()}
    return RefitUpdate(Manifest.of([tensors], version=version, fmt="w4a16"), [tensors])


def test_every_rank_of_every_engine_serves_the_same_bytes(engines):
    sender = CollectiveSender(3, CPU, backend="gloo")
    for version in (1, 2):
        update = update_of(version)
        push(update, engines, sender)
        assert serving_version(engines) == version
        for served in engines.collective_rpc("qarl_served"):
            assert served.keys() == update.tensors.keys()
            for name, tensor in served.items():
                assert_bitwise_equal(tensor, update.tensors[name])


def test_a_busy_engine_keeps_all_engines_as_they_are(engines):
    ray.get(engines.workers[1].set_busy.remote(True))
    with pytest.raises(ValueError, match="requests are unfinished"):
        push(update_of(1), engines, CollectiveSender(3, CPU, backend="gloo"))
    assert serving_version(engines) is None


def test_all_ranks_of_the_learner_learn_how_a_refit_ended(engines, learner):
    sender = CollectiveSender(3, CPU, backend="gloo")
    figures = push_from_all(update_of(1), engines, sender)
    assert {"announce_s", "transfer_s", "verify_s", "replace_s", "total_s", "num_bytes"} == figures.keys()
    broken = update_of(2)
    broken.tensors["model.norm.weight"] += 1
    with pytest.raises(RuntimeError, match=r"refit to version 2 refused.*keeps serving version 1(.|\n)*norm\.weight"):
        push_from_all(broken, engines, sender)
    assert serving_version(engines) == 1


def test_a_streamed_update_is_made_to_the_end_also_where_it_is_refused(engines, learner):
    sender = CollectiveSender(3, CPU, backend="gloo")
    tensors, made = update_of(1).tensors, []

    def stream():
        for name, tensor in tensors.items():
            made.append(name)
            yield {name: tensor}

    push_from_all(StreamedUpdate(stream, get_format("w4a16"), version=1), engines, sender)
    assert made == 2 * list(NAMES)
    for served in engines.collective_rpc("qarl_served"):
        assert_bitwise_equal(served["model.norm.weight"], tensors["model.norm.weight"])
    made.clear()
    ray.get(engines.workers[1].set_busy.remote(True))
    with pytest.raises(RuntimeError, match="requests are unfinished"):
        push_from_all(StreamedUpdate(stream, get_format("w4a16"), version=2), engines, sender)
    assert made == 2 * list(NAMES)
    assert serving_version(engines) == 1


def rehearsed(update, *, made=None, spoiled=False):
    """The update layer by layer, which may not be served as it was rehearsed."""
    passes = []

    def stream():
        passes.append(None)
        for name, tensor in update.tensors.items():
            if made is not None:
                made.append(name)
            last = spoiled and len(passes) == 3 and name == "model.norm.weight"
            yield {name: tensor + 1 if last else tensor}

    return StreamedUpdate(stream, get_format("w4a16"), version=update.manifest.version, rehearsed=True)


def test_a_rehearsed_update_comes_twice_and_is_held_a_layer_at_a_time(engines, learner):
    sender, update, made = CollectiveSender(3, CPU, backend="gloo"), update_of(1), []
    push_from_all(rehearsed(update, made=made), engines, sender)
    assert made == 3 * list(NAMES)
    assert serving_version(engines) == 1
    assert engines.collective_rpc("qarl_most_held") == [1, 1, 1]
    for served in engines.collective_rpc("qarl_served"):
        for name, tensor in update.tensors.items():
            assert_bitwise_equal(served[name], tensor)


def test_an_engine_serves_nothing_after_what_differs_from_its_rehearsal(engines, learner):
    sender = CollectiveSender(3, CPU, backend="gloo")
    push_from_all(update_of(1), engines, sender)
    with pytest.raises(RuntimeError, match=r"broke off while version 2 replaced version 1(.|\n)*norm\.weight"):
        push_from_all(rehearsed(update_of(2), spoiled=True), engines, sender)
    with pytest.raises(RuntimeError, match="no single weight version"):
        serving_version(engines)
    push_from_all(rehearsed(update_of(3)), engines, sender)
    assert serving_version(engines) == 3


def test_a_killed_engine_is_an_error_and_the_other_keeps_its_version(engines, learner):
    """Last: it kills an engine."""
    sender = CollectiveSender(3, CPU, backend="gloo")
    push_from_all(update_of(1), engines, sender)
    ray.kill(engines.workers[1])
    with pytest.raises(RuntimeError, match="ActorDiedError"):
        push_from_all(update_of(2), engines, sender)
    assert serving_version(RayEngines(engines.workers[:1])) == 1
