"""Times on the device and the limits they are compared with."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton


def median_ms(function: Callable[[], Any], *, warmup_ms: int = 25, repeat_ms: int = 150) -> float:
    """Return the median time of a call between two device events, after a warm-up, the L2 cache flushed in between.

    Args:
        function: launches work on the current stream.
        warmup_ms: how long to warm up.
        repeat_ms: how long to measure.

    Returns:
        Milliseconds.
    """
    return float(triton.testing.do_bench(function, warmup=warmup_ms, rep=repeat_ms, return_mode="median"))


def interleaved_ms(functions: Mapping[str, Callable[[], Any]], *, rounds: int = 21) -> dict[str, float]:
    """Return the median device time of each call; calls take turns, so that a drifting clock affects all alike.

    Each call is captured as a CUDA graph, so that the device's work is timed and not how fast Python launches it.

    Args:
        functions: calls by name; each works on tensors larger than the L2 cache.
        rounds: turns of each.

    Returns:
        Milliseconds by name.
    """
    graphs, pool = {}, torch.cuda.graph_pool_handle()
    for name, function in functions.items():
        function()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], pool=pool):
            function()
    turns = {name: [] for name in graphs}
    for _ in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            turns[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(start.elapsed_time(end) for start, end in took[2:]) for name, took in turns.items()}


def copy_gb_s(num_bytes: int = 4 << 30) -> float:
    """Return the bandwidth of a device-to-device copy, bytes read plus bytes written, in GB/s.

    Args:
        num_bytes: size of the buffer, far above the L2 cache.
    """
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / median_ms(lambda: target.copy_(source)) / 1e6


def dense_tflops(size: int = 8192) -> float:
    """Return the rate of a square BF16 product on random data in TFLOP/s.

    Args:
        size: M = N = K.
    """
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: left @ right) / 1e9
