"""How much memory of a host and of its GPUs is used while something runs."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qarl_nemo.memory import GIB

# What all hold together; of it processes' own pages, and Ray's objects. Pinned memory and drivers' are the rest.
HOST = ("host", "host_anonymous", "host_shared")


@contextmanager
def recorded_memory(file: Path, gpus: int) -> Iterator[None]:
    """Record every second how much memory the host and each GPU use, in GiB.

    Args:
        file: the table to write, CSV.
        gpus: how many of the first GPUs to watch.
    """
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(gpus)]
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


def num_gpus() -> int:
    """Return how many GPUs this machine has."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return 0


def _host_gib() -> tuple[float, float, float]:
    values = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free, anonymous, shared = (
        int(values[key].split()[0]) / 2**20 for key in ("MemTotal", "MemAvailable", "AnonPages", "Shmem")
    )
    return total - free, anonymous, shared
