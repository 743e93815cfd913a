"""The Ray cluster of the GPU cases, on a CPU that is said to have four GPUs."""

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("psutil")

from support.nemo_rl.cluster import is_alive, ray_cluster  # noqa: E402

pytestmark = pytest.mark.slow


@ray.remote(num_cpus=0, num_gpus=0.5)
class Worker:
    def gpus(self):
        return [int(gpu) for gpu in ray.get_gpu_ids()]


def test_a_cluster_has_the_given_gpus_and_ends_with_all_its_processes():
    with ray_cluster([1, 3], num_host_gpus=4) as cluster:
        workers = [Worker.remote() for _ in range(4)]
        gpus = [gpu for worker in workers for gpu in ray.get(worker.gpus.remote())]
        assert sorted(gpus) == [1, 1, 3, 3]
        assert len(cluster.actors("Worker")) == 4
        assert len(cluster.actors("Holder")) == 2
        assert cluster.worker_logs
        started = [cluster.process, *cluster.process.children(recursive=True)]
    assert not ray.is_initialized()
    assert not [one for one in started if is_alive(one)]
    assert not cluster.folder.exists()
