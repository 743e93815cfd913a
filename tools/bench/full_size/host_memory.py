"""How much memory of a host and of its GPUs is used while something runs."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qarl_nemo.memory import GIB

# What all hold together; of it processes' own pages, and Ray's objects. Pinned memory and drivers' are the rest.
HOST = ("host", "host_anonymous", "host_shared")


@contextmanager
def recorded_memory(file: Path, gpus: int) -> Iterator[None]:
    """Record every second how much memory the host and each GPU use, in GiB.

    Args:
        file: the table to write, CSV.
        gpus: how many of the first GPUs that this process may use to watch.
    """
    import pynvml

    handles = visible_gpus()[:gpus]
    ended = threading.Event()

    def watch() -> None:
        with file.open("w") as rows:
            held = [*HOST, *(f"gpu{index}" for index in range(gpus))]
            rows.write(",".join(["time_s", *(f"{name}_gib" for name in held)]) + "\n")
            while not ended.wait(1.0):
                used = [pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB for handle in handles]
                rows.write(",".join(f"{value:.1f}" for value in (time.time(), *_host_gib(), *used)) + "\n")
                rows.flush()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def visible_gpus() -> list[Any]:
    """Return NVML's handles of the GPUs that `CUDA_VISIBLE_DEVICES` leaves: others may run other jobs."""
    import pynvml

    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(pynvml.nvmlDeviceGetCount())] if visible is None else visible.split(",")
    return [
        pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
        for name in map(str.strip, names)
        if name
    ]


def num_gpus() -> int:
    """Return how many GPUs this process may use."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        return len(visible_gpus())
    except pynvml.NVMLError:
        return 0


def _host_gib() -> tuple[float, float, float]:
    values = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free, anonymous, shared = (
        int(values[key].split()[0]) / 2**20 for key in ("MemTotal", "MemAvailable", "AnonPages", "Shmem")
    )
    return total - free, anonymous, shared
