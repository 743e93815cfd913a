"""Which job starts next, on which GPUs: in the list's order, beside others as far as memory allows."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jobs import Job


@dataclass
class Gpu:
    """A GPU and the jobs that run on it."""

    index: int
    memory_gib: float
    jobs: list[Job] = field(default_factory=list)

    @property
    def free_gib(self) -> float:
        """What running jobs leave of its memory."""
        return self.memory_gib - sum(job.memory_gib for job in self.jobs)

    def takes(self, job: Job) -> bool:
        """Return whether a job may start here now."""
        if any(other.alone for other in self.jobs) or (job.alone and self.jobs):
            return False
        return job.memory_gib <= self.free_gib


def next_job(
    waiting: Sequence[Job], gpus: Sequence[Gpu], running: Iterable[Job], host_gib: float = math.inf
) -> tuple[Job, list[Gpu]] | None:
    """Return the first waiting job that can start, and its GPUs, the emptiest ones.

    A job that must be alone, or needs several GPUs, would never start while smaller ones keep arriving, so that nothing
    behind it starts on the GPUs that it waits for; on none, if it waits for the host or its memory.

    Args:
        waiting: in their order.
        gpus: all of the host.
        running: jobs that run now.
        host_gib: the host's memory.

    Returns:
        Both, or None: something has to end first.
    """
    running = list(running)
    if any(job.alone == "host" for job in running):
        return None
    words = {job.one_of for job in running} - {None}
    free_gib = host_gib - sum(job.host_gib for job in running)
    open_gpus = sorted(gpus, key=lambda gpu: (len(gpu.jobs), -gpu.free_gib, gpu.index))
    for job in waiting:
        if job.one_of in words:
            continue
        if (job.alone == "host" and running) or job.host_gib > free_gib:
            return None
        free = [gpu for gpu in open_gpus if gpu.takes(job)][: job.gpus]
        if len(free) == job.gpus:
            return job, free
        if job.alone or job.gpus > 1:
            open_gpus = open_gpus[job.gpus :]
    return None
