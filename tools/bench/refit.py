"""Measure a live refit of vLLM: seconds by phase, bytes and memory, with Qwen3-30B-A3B's shapes and random weights.

The engine runs with CUDA graphs in processes of its own, on the first visible GPU. With `ipc` the learner's packed
tensors are on the same GPU, with `collective` on the second one. BF16 is sent the same way, for comparison. Several of
these commands may run at once: they start their engines together and measure one after another.
"""

import argparse
import fcntl
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
from refit_model import ENVIRONMENT, Learner, model_config, shapes, start

from qarl_kernels import FORMAT_NAMES, get_format
from qarl_nemo.metrics.machine import facts
from qarl_nemo.metrics.results import Figure, record_figures, running_command
from qarl_nemo.names import check_targets
from qarl_nemo.refit.answers import ask
from qarl_nemo.refit.engine import VllmEngine
from qarl_nemo.refit.push import push, serving_version
from qarl_nemo.refit.send import CollectiveSender, IpcSender, Sender
from qarl_nemo.train.progress import LiveProgress

SENDERS = ("ipc", "collective")
TARGETS = ("experts", "attention")
GOAL_S, GOAL_RATIO = 1.0, 0.28
_PROMPT = {"prompt_token_ids": list(range(1, 17))}


def bench(format_name: str, options: argparse.Namespace) -> None:
    """Start one engine and refit it through every sender; show and record each result at once."""
    os.environ.update(ENVIRONMENT)
    config, fmt = model_config(options.layers), get_format(format_name, nested_in=options.nested_in)
    label = f"{format_name}_in_{options.nested_in}" if options.nested_in else format_name
    print(f"{label}: starting vLLM, about a minute", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        engine = VllmEngine(start(config, fmt, options.targets, Path(folder)))
    bf16_bytes = sum(2 * torch.Size(shape).numel() for shape in shapes(config).values())
    with _measuring_alone():
        for name in options.senders:
            device = "cuda:1" if name == "collective" else "cuda:0"
            torch.cuda.set_device(device)
            sender = CollectiveSender(1, torch.device(device)) if name == "collective" else IpcSender()
            learner = Learner(config, fmt, options.targets, device)
            figures = measure(f"{label} {name}", learner, engine, sender, options.repeats)
            del learner
            gc.collect()
            torch.cuda.empty_cache()
            record_figures(
                options.record,
                refit_figures(label, name, figures, bf16_bytes, options.targets),
                **facts("cuda", 2 if name == "collective" else 1, ["vllm"]),
                command=options.command,
            )
    engine.llm.llm_engine.engine_core.shutdown()


def measure(label: str, learner: Learner, engine: VllmEngine, sender: Sender, repeats: int) -> dict[str, list[float]]:
    """Refit once to warm up, then `repeats` times; versions go on from the one that an earlier sender left."""
    from vllm import SamplingParams

    first = (serving_version(engine) or 0) + 1
    found: dict[str, list[float]] = {}
    with LiveProgress(label, repeats + 1) as progress:
        for repeat in range(repeats + 1):
            before = ask(engine, "qarl_memory")[0]
            started = time.perf_counter()
            update = learner.publish(first + repeat)
            published = time.perf_counter()
            report = push(update, engine, sender)
            total = time.perf_counter() - started
            after = ask(engine, "qarl_memory")[0]
            progress.update(repeat + 1, seconds=total)
            seconds = {"publish": published - started, **report.seconds}
            values = {"s": total, **{f"{phase}_s": value for phase, value in seconds.items()}}
            values |= {"bytes": report.num_bytes, "peak_extra_bytes": after["peak"] - before["allocated"]}
            for name, value in values.items() if repeat else ():
                found.setdefault(name, []).append(value)
    assert serving_version(engine) == first + repeats
    # Check that the CUDA graphs captured before the refits still replay.
    assert len(engine.llm.generate([_PROMPT], SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False))) == 1
    return found


@contextmanager
def _measuring_alone() -> Iterator[None]:
    with (Path(tempfile.gettempdir()) / "qarl_bench_refit.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def refit_figures(
    label: str, sender: str, figures: dict[str, list[float]], bf16_bytes: int, targets: tuple[str, ...]
) -> list[Figure]:
    """Return the medians of one format's repeats through one sender, and the spread of the whole.

    Args:
        label: the targeted layers' format, and the one that it is nested in.
        sender: one of `SENDERS`.
        figures: what `measure` returned.
        bf16_bytes: size of the model in BF16.
        targets: what is quantized; rows' names include targets other than the default.
    """
    if targets != TARGETS:
        label = "_".join((label, *targets))
    found: list[Figure] = []

    def add(name: str, value: float, unit: str, goal: float | None = None) -> None:
        found.append(Figure(name, value, unit, "<=", goal))

    for name, repeats in figures.items():
        add(f"refit_{label}_{sender}_{name}", median(repeats), name.rpartition("_")[2])
    add(f"refit_{label}_{sender}_spread_s", max(figures["s"]) - min(figures["s"]), "s")
    if sender == "ipc":
        ratio = figures["bytes"][0] / bf16_bytes
        add(f"refit_bytes_ratio_{label}", ratio, "")
        if label == "w4a16":
            add("refit_s", median(figures["s"]), "s", GOAL_S)
            add("refit_bytes_ratio", ratio, "", GOAL_RATIO)
        if label == "bf16":
            add("refit_bf16_s", median(figures["s"]), "s")
    return found


def main() -> None:
    """Bench every format in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default=",".join(FORMAT_NAMES), help="comma-separated")
    parser.add_argument("--nested-in", help="publish codes of this finer format: w8a16")
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated")
    parser.add_argument("--senders", default="ipc", help=f"comma-separated, of {', '.join(SENDERS)}")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", type=Path, help="results file, e.g. docs/results/vllm.json")
    options = parser.parse_args()
    options.targets, options.senders = check_targets(options.targets.split(",")), options.senders.split(",")
    unknown = [name for name in options.senders if name not in SENDERS]
    if unknown:
        parser.error(f"unknown senders {unknown}; legal: {', '.join(SENDERS)}")
    options.command = running_command("python tools/bench/refit.py", "--record")
    for name in options.formats.split(","):
        # Each format has a process of its own, because an engine frees its memory only when its parent ends.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(bench, name, options).result()


if __name__ == "__main__":
    main()
