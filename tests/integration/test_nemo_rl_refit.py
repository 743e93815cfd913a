"""NeMo-RL's worker groups refitted by our synchronizer, on a CPU: two learner ranks, two engines, all or none."""

import itertools
import os
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from support.nemo_rl import installed  # noqa: F401 skips where NeMo-RL is not

ray = pytest.importorskip("ray")

from nemo_rl.distributed import ray_actor_environment_registry as registry  # noqa: E402
from nemo_rl.distributed.named_sharding import NamedSharding  # noqa: E402
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES, RayVirtualCluster  # noqa: E402
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup  # noqa: E402
from nemo_rl.utils.timer import Timer  # noqa: E402

from qarl_nemo.nemo_rl.engines import RayEngines  # noqa: E402
from qarl_nemo.nemo_rl.synchronizer import PackedWeightSynchronizer  # noqa: E402
from qarl_nemo.refit.push import serving_version  # noqa: E402
from support.asserts import assert_bitwise_equal  # noqa: E402
from support.nemo_rl.actors import weights  # noqa: E402

_NUMBERS = itertools.count()
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster():
    before, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", ""), os.pathsep.join(filter(None, sys.path))
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    os.environ["PYTHONPATH"] = before


def group(worker, config):
    name = f"support.nemo_rl.actors.{worker}"
    registry.ACTOR_ENVIRONMENT_REGISTRY[name] = PY_EXECUTABLES.SYSTEM
    # Ray lets go of a name some time after its group has ended.
    unique = f"{worker}{next(_NUMBERS)}"
    cluster = RayVirtualCluster(name=unique, bundle_ct_per_node_list=[2], use_gpus=False, max_colocated_worker_groups=1)
    ranks = NamedSharding(np.arange(2), ["data_parallel"])
    workers = RayWorkerGroup(cluster, RayWorkerBuilder(name, config), name_prefix=worker, sharding_annotations=ranks)
    return workers, cluster


@pytest.fixture
def run(request):
    """A policy, engines and the synchronizer between them, with an account of what NeMo-RL's policy was told."""
    config = {"dies_at": 0, "colocated": False} | request.param
    (learner, learners), (engines, others) = group("Learner", config), group("Engine", {})
    told, asked = [], learner.run_all_workers_single_data
    learner.run_all_workers_single_data = lambda method, **named: told.append(method) or asked(method, **named)
    policy = SimpleNamespace(
        worker_group=learner,
        next_step=1,
        offload_before_refit=lambda: told.append("make room"),
        offload_after_refit=lambda: told.append("leave"),
    )
    generation = SimpleNamespace(
        cfg={"colocated": {"enabled": config["colocated"]}},
        worker_group=engines,
        prepare_for_generation=lambda *, tags=("all",): told.append(f"wake {tags[0]}") or True,
        finish_generation=lambda: False,
    )
    synchronizer = PackedWeightSynchronizer(policy, generation)
    synchronizer.init_communicator()
    yield SimpleNamespace(learner=learner, engines=engines, synchronizer=synchronizer, generation=generation, told=told)
    for workers in (learner, engines):
        for worker in workers.workers:
            ray.kill(worker)
    for cluster in (learners, others):
        cluster.shutdown()


@pytest.mark.parametrize("run", [{}], indirect=True)
def test_all_engines_serve_what_all_ranks_published(run):
    assert run.synchronizer.is_stale
    timer = Timer()
    for version in (1, 2):
        figures = run.synchronizer.sync_weights(timer=timer)
        assert figures["version"] == version
        assert figures["num_bytes"] == sum(tensor.nbytes for tensor in weights(version).values())
        for served in RayEngines(run.engines.workers).collective_rpc("qarl_served"):
            for name, tensor in weights(version).items():
                assert_bitwise_equal(served[name], tensor)
    assert not run.synchronizer.is_stale
    assert run.synchronizer.failure is None
    assert "prepare_for_generation/transfer_and_update_weights" in timer.get_timing_metrics()
    with pytest.raises(ValueError, match="KV cache scales"):
        run.synchronizer.sync_weights(kv_scales={})
    assert vars(pickle.loads(pickle.dumps(run.synchronizer))) == {"version": 2}


@pytest.mark.parametrize("run", [{}], indirect=True)
def test_a_killed_engine_ends_the_sync_and_leaves_the_other_one_whole(run):
    run.synchronizer.sync_weights()
    ray.kill(run.engines.workers[1])
    with pytest.raises(RuntimeError, match="ActorDiedError"):
        run.synchronizer.sync_weights()
    assert "ActorDiedError" in run.synchronizer.failure
    assert run.synchronizer.version == 1
    assert serving_version(RayEngines(run.engines.workers[:1])) == 1


@pytest.mark.parametrize("run", [{"colocated": True, "poisoned_at": 2}], indirect=True)
def test_colocated_engines_wake_while_weights_are_published(run):
    figures = run.synchronizer.sync_weights()
    assert run.told == ["make room", "qarl_publish", "wake weights", "qarl_refit", "leave", "wake kv_cache"]
    assert {"make_room_s", "wake_weights_s", "leave_s", "wake_cache_s", "transfer_s"} <= figures.keys()
    assert figures["wait_s"] >= figures["total_s"] >= figures["transfer_s"] > 0
    with pytest.raises(ValueError, match="weights hold NaN"):
        run.synchronizer.sync_weights()
    # No engine was told of it, and the next version is served by all.
    assert serving_version(RayEngines(run.engines.workers)) == 1
    assert run.synchronizer.sync_weights()["version"] == serving_version(RayEngines(run.engines.workers)) == 3
    with pytest.raises(RuntimeError, match=r"vLLM did not go to sleep(.|\n)*start the run again"):
        run.generation.finish_generation()


@pytest.mark.parametrize("run", [{"colocated": True}], indirect=True)
def test_an_engine_that_forgot_its_weights_wakes_up_with_a_refit(run):
    run.synchronizer.sync_weights()
    run.told.clear()
    assert run.generation.prepare_for_generation()
    assert run.told == ["wake all"]
    ray.get(run.engines.workers[1].forget.remote())
    run.told.clear()
    assert run.generation.prepare_for_generation()
    assert run.told == ["make room", "qarl_publish", "wake weights", "qarl_refit", "leave", "wake kv_cache"]
    assert serving_version(RayEngines(run.engines.workers)) == 2


def test_an_engine_that_does_not_wake_up_ends_the_sync():
    ranks = SimpleNamespace(run_all_workers_single_data=lambda method, **_: [])
    policy = SimpleNamespace(offload_before_refit=lambda: None, worker_group=ranks, next_step=1)
    # NeMo-RL's own answer where vLLM found no memory.
    generation = SimpleNamespace(
        cfg={"colocated": {"enabled": True}},
        worker_group=SimpleNamespace(workers=[], dp_leader_worker_indices=[]),
        prepare_for_generation=lambda *, tags: False,
        finish_generation=lambda: True,
    )
    synchronizer = PackedWeightSynchronizer(policy, generation)
    with pytest.raises(RuntimeError, match=r"vLLM did not wake up its weights(.|\n)*gpu_memory_utilization"):
        synchronizer.sync_weights()
    assert "did not wake up" in synchronizer.failure
    assert synchronizer.version == 0


@pytest.mark.parametrize("run", [{"dies_at": 2}], indirect=True)
def test_a_killed_learner_rank_ends_the_sync_and_leaves_the_engines_whole(run):
    run.synchronizer.sync_weights()
    with pytest.raises((RuntimeError, ray.exceptions.RayActorError)):
        run.synchronizer.sync_weights()
    assert run.synchronizer.version == 1
    assert serving_version(RayEngines(run.engines.workers)) in (1, 2)
