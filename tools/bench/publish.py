"""Measure publishing from shards: seconds, bytes and memory for Qwen3-30B-A3B's 48 layers on every GPU there is.

The weights are random BF16, without an optimizer. Each rank packs its experts; then the packed tensors are streamed as
in a refit, layer by layer, and freed. `shards` leaves experts where they are, for receivers that take shards; `update`
makes every layer twice, first for the manifest's checksums.

    torchrun --nproc-per-node 4 tools/bench/publish.py
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron_model import (
    DEVICE,
    ON_GPU,
    QWEN3_30B_A3B,
    Layout,
    gpt_model,
    memory_allocated,
    parallel,
    process_group,
    ran_on,
    say,
    synchronize,
    transformer_config,
)
from torch import nn

from qarl_kernels import FORMAT_NAMES, get_format
from qarl_nemo.megatron.alignment import Alignment, aligned_weights, release
from qarl_nemo.megatron.checks import require_supported
from qarl_nemo.megatron.publish import publish_layers, publish_update
from qarl_nemo.metrics.results import Figure, append_results, result_rows, running_command


def parse_layout(text: str) -> Layout:
    """Return the layout that e.g. `tp2_ep2_etp2` names."""
    return Layout(**{part.rstrip("0123456789"): int(part.lstrip("tepu")) for part in text.split("_")})


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Run `work` on every rank at once.

    Returns:
        Its result, the slowest rank's seconds, the largest rank's bytes above what was allocated before.
    """
    before = memory_allocated()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    dist.barrier()
    start = time.perf_counter()
    result = work()
    synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if ON_GPU else 0
    worst = torch.tensor([seconds, peak], dtype=torch.float64, device=DEVICE)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return result, *worst.tolist()


def measure(model: nn.Module, alignment: Alignment, vocab_size: int, repeats: int) -> dict[str, Any]:
    """Pack and publish the model in one format."""
    weights = aligned_weights([model])
    release([model])
    for weight in weights:
        weight.format, weight.changes = alignment.format, alignment.changes
    # The first call compiles kernels.
    weights[0].quantized()
    release([model])
    gc.collect()
    held, quantize_s, _ = timed(lambda: sum(weight.quantized().num_bytes for weight in weights))
    figures: dict[str, Any] = {"quantize_s": quantize_s, "packed_bytes": held}

    def stream(**options: Any) -> int:
        layers = publish_layers([model], vocab_size=vocab_size, **options)
        return sum(tensor.nbytes for layer in layers for tensor in layer.values())

    def update() -> int:
        with publish_update([model], alignment.format, vocab_size=vocab_size, version=0) as made:
            return made.num_bytes

    kinds = {"": stream, "shards_": lambda: stream(gather_experts=False), "update_": update}
    for name, work in kinds.items():
        runs = [timed(work) for _ in range(repeats + 1)][1:]
        figures[f"{name}bytes"] = runs[0][0]
        figures[f"{name}s"] = [seconds for _, seconds, _ in runs]
        figures[f"{name}peak_extra_bytes"] = max(peak for _, _, peak in runs)
    return figures


def bench(options: argparse.Namespace) -> list[dict]:
    """Measure every layout and format; called on every rank."""
    found, architecture = [], options.architecture
    for text in options.layouts:
        layout = parse_layout(text)
        with parallel(layout):
            # Without Apex Megatron's head cannot add to gradients in place; nothing is trained here.
            config = transformer_config(architecture, layout, gradient_accumulation_fusion=False)
            model = gpt_model(architecture, config, Alignment(get_format("bf16")), with_output=True)
            for name in options.formats:
                alignment = Alignment(get_format(name))
                try:
                    require_supported(config, alignment)
                except ValueError as error:
                    say(f"{text} {name}: {error}")
                    continue
                figures = measure(model, alignment, architecture.vocab_size, options.repeats)
                found.append({"layout": text, "format": name, **figures})
                say(describe(found[-1]))
                if options.raw and dist.get_rank() == 0:
                    options.raw.write_text(json.dumps(found, indent=1))
            del model
            gc.collect()
    return found


def describe(entry: dict) -> str:
    """Return one line about a format on a layout."""
    text = f"{entry['layout']} {entry['format']:12} quantize {entry['quantize_s']:.3f} s"
    for kind, what in (("", "publish"), ("shards_", "shards"), ("update_", "with checksums")):
        text += f"  {what} {median(entry[f'{kind}s']):.3f} s, {entry[f'{kind}bytes'] / 1e9:.2f} GB"
        text += f", peak {entry[f'{kind}peak_extra_bytes'] / 2**30:.2f} GiB"
    return text


def publish_rows(found: list[dict], num_gpus: int, bf16_bytes: int) -> list[dict]:
    """Turn what was measured into rows.

    Args:
        found: records that `bench` returned.
        num_gpus: how many GPUs it ran on.
        bf16_bytes: size of the whole model in BF16.

    Returns:
        The rows; `publish_s` and `publish_bytes_ratio` are those of the first layout's w4a16.
    """
    figures: list[Figure] = []

    def add(name: str, value: float, unit: str) -> None:
        figures.append(Figure(name, value, unit, "<="))

    for entry in found:
        where = f"{entry['format']}_{entry['layout']}"
        ratio = entry["bytes"] / bf16_bytes
        add(f"publish_quantize_s_{where}", entry["quantize_s"], "s")
        for kind in ("", "shards_", "update_"):
            add(f"publish_{kind}s_{where}", median(entry[f"{kind}s"]), "s")
            add(f"publish_{kind}spread_s_{where}", max(entry[f"{kind}s"]) - min(entry[f"{kind}s"]), "s")
            add(f"publish_{kind}peak_gib_{where}", entry[f"{kind}peak_extra_bytes"] / 2**30, "GiB")
        add(f"publish_bytes_ratio_{where}", ratio, "")
        if entry["format"] == "w4a16" and entry["layout"] == found[0]["layout"]:
            add("publish_s", median(entry["s"]), "s")
            add("publish_bytes_ratio", ratio, "")
    program = f"torchrun --nproc-per-node {num_gpus} tools/bench/publish.py"
    return result_rows(figures, **ran_on(num_gpus), command=running_command(program, "--record", "--raw"))


def main() -> None:
    """Measure, show and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=["ep4", "tp2_ep2_etp2"])
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMAT_NAMES))
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--raw", type=Path, help="keep every measurement in this file")
    parser.add_argument("--record", type=Path, help="results file, e.g. docs/results/megatron.json")
    options = parser.parse_args()
    options.architecture = replace(QWEN3_30B_A3B, num_layers=options.layers)
    with process_group() as rank:
        found, num_gpus = bench(options), dist.get_world_size()
    if options.record and rank == 0:
        append_results(options.record, publish_rows(found, num_gpus, 2 * options.architecture.num_parameters))


if __name__ == "__main__":
    main()
