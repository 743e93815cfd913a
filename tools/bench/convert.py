"""Measures `qarl convert` on a synthetic checkpoint of Qwen3-30B-A3B's width: peak memory, GB/s, CPU, the disk's share.

With `--sparse` the weights are zeros in files with holes: all 48 layers (61 GB) take no disk space, and only memory is
measured. Without it they are random numbers on the disk, not in the page cache; give as many layers as fit there.
"""

import argparse
import json
import os
import re
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from synthetic_megatron import CONFIG, write_checkpoint

from qarl_kernels import FORMAT_NAMES, get_format
from qarl_nemo.checkpoints import QuantizeProgress, open_megatron, quantize_checkpoint
from qarl_nemo.metrics.machine import facts
from qarl_nemo.metrics.results import Figure, record_figures

BLOCK_BYTES = 2**26


def drop_from_cache(folder: Path) -> None:
    """Write a folder's files to the disk and drop them from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def convert(source: Path, destination: Path, format_name: str) -> tuple[float, float, float]:
    """Convert, in a process of its own.

    Args:
        source: the checkpoint, beside a folder `hf` with config.json.
        destination: where to.
        format_name: format of the experts.

    Returns:
        Seconds, seconds of all cores together, and the largest resident memory in GiB.
    """
    start, start_cpu = time.perf_counter(), time.process_time()
    marks = iter(range(0, 101, 5))
    mark = next(marks)

    def show(event: QuantizeProgress) -> None:
        nonlocal mark
        if event.done_bytes >= event.total_bytes * mark / 100:
            left = (time.perf_counter() - start) * (event.total_bytes / event.done_bytes - 1)
            print(f"{mark} %, ETA {left:.0f} s", flush=True)
            mark = next(marks, 101)

    checkpoint = open_megatron(source, source.parent / "hf")
    quantize_checkpoint(checkpoint, destination, get_format(format_name), ["experts"], progress=show)
    seconds = time.perf_counter() - start
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return seconds, time.process_time() - start_cpu, int(peak[1]) / 2**20


def disk_seconds(source: Path, destination: Path) -> float:
    """Measure how long the disk takes to read the source and to write what the conversion wrote.

    Returns:
        Seconds.
    """
    start = time.perf_counter()
    for path in source.glob("*.distcp"):
        with path.open("rb", buffering=0) as file:
            while file.read(BLOCK_BYTES):
                pass
    block = memoryview(os.urandom(BLOCK_BYTES))
    for path in destination.glob("*.safetensors"):
        with (destination / "copy").open("wb", buffering=0) as file:
            for begin in range(0, path.stat().st_size, BLOCK_BYTES):
                file.write(block[: path.stat().st_size - begin])
            os.fsync(file.fileno())
    return time.perf_counter() - start


def measure(folder: Path, num_layers: int, format_name: str, *, sparse: bool) -> dict[str, float]:
    """Write a checkpoint, convert it, and return what that took.

    Returns:
        Figures by name; units in the names.
    """
    source, destination = folder / "megatron", folder / "out"
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": num_layers}))
    num_bytes = write_checkpoint(source, num_layers, sparse=sparse)
    print(f"{num_bytes / 1e9:.1f} GB of weights in {num_layers} layers{', sparse' if sparse else ''}", flush=True)
    drop_from_cache(source)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        seconds, cpu_seconds, peak_gib = pool.submit(convert, source, destination, format_name).result()
    figures = {"convert_peak_gib": peak_gib, "seconds": seconds}
    if not sparse:
        drop_from_cache(source)
        named = "convert" if format_name == "w4a16" else f"convert_{format_name}"
        figures[f"{named}_gb_s"] = num_bytes / seconds / 1e9
        figures[f"{named}_cpu_s_per_gb"] = cpu_seconds / num_bytes * 1e9
        figures[f"{named}_disk_ratio"] = seconds / disk_seconds(source, destination)
    shutil.rmtree(destination)
    return figures


def main() -> None:
    """Measure one format and record it on request: the peak of sparse checkpoints, speed and CPU time of others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--format", default="w4a16", help=f"of the experts: {', '.join(FORMAT_NAMES)}")
    parser.add_argument("--sparse", action="store_true", help="measure memory only, with next to no disk")
    parser.add_argument("--folder", type=Path, help="where to work; the system's temporary folder by default")
    parser.add_argument("--record", type=Path, help="results file, e.g. docs/results/megatron.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(Path(folder), options.layers, options.format, sparse=options.sparse)
    print(f"{figures['seconds']:.4g} s, at most {figures['convert_peak_gib']:.4g} GiB")
    command = f"python tools/bench/convert.py --layers {options.layers} --format {options.format}"
    if options.sparse:
        command += " --sparse"
        found = [Figure("convert_peak_gib", figures["convert_peak_gib"], "GiB", "<=", 4.0)]
    else:
        ends = {"_gb_s": ("GB/s", ">="), "_per_gb": ("s", "<=")}
        found = [Figure(name, figures[name], *ends[end]) for name in figures for end in ends if name.endswith(end)]
    record_figures(options.record, found, command=command, **facts("cpu"))


if __name__ == "__main__":
    main()
