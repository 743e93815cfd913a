"""Measure a live refit of vLLM: seconds by phase, bytes and memory, with Qwen3-30B-A3B's shapes and random weights.

The engine runs with CUDA graphs in processes of its own, on the first visible GPU. With `ipc` the learner's packed
tensors lie on the same GPU, with `collective` on the second one. BF16 goes the same way, for comparison. Several of
these commands may run at once: they start their engines together and measure one after the other.
"""

import argparse
import fcntl
import gc
import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import hardware
from record_local import row
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from qarl_kernels import FORMAT_NAMES, QuantFormat, QuantizedWeight, get_format, quantize_weight
from qarl_nemo.checkpoints.hf_config import model_quantization_config
from qarl_nemo.local.progress import LiveProgress
from qarl_nemo.metrics.results import append_results
from qarl_nemo.refit.names import check_targets, module_kind
from qarl_nemo.refit.publish import publish
from qarl_nemo.refit.push import push, serving_version
from qarl_nemo.refit.send import CollectiveSender, IpcSender, Sender

SENDERS = ("ipc", "collective")
GOAL_S, GOAL_RATIO = 1.0, 0.28
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
_MOE_BACKENDS = {"w4a16": "marlin", "fp8_block": "triton", "bf16": "triton"}
_PROMPT = {"prompt_token_ids": list(range(1, 17))}


@dataclass(frozen=True)
class Packed:
    """What the publisher asks of an aligned weight that has been quantized; its master is gone."""

    name: str
    format: QuantFormat
    stored: QuantizedWeight

    def quantized(self) -> QuantizedWeight:
        """Return the stored tensors."""
        return self.stored


class Learner:
    """Random weights of a model, the targeted ones packed.

    Args:
        config: of the model.
        fmt: of the targeted weights.
        targets: what is quantized.
        device: where they lie.
    """

    def __init__(self, config: Qwen3MoeConfig, fmt: QuantFormat, targets: tuple[str, ...], device: str) -> None:
        self.format = fmt
        self.weights: dict[str, Packed] = {}
        self.others: list[tuple[str, Tensor]] = []
        for name, shape in shapes(config).items():
            weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
            module = name.removesuffix(".weight")
            if module_kind(module) in targets:
                self.weights[name] = Packed(module, fmt, quantize_weight(weight, fmt, name=name))
            else:
                self.others.append((name, weight))

    def publish(self, number: int) -> Any:
        """Return the update with this version number; its manifest is computed anew."""
        return publish(self.weights, self.others, self.format, version=number)


def shapes(config: Qwen3MoeConfig) -> dict[str, tuple[int, ...]]:
    """Return every parameter's shape."""
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def model_config(num_layers: int) -> Qwen3MoeConfig:
    """Return Qwen3-30B-A3B's config with so many of its 48 layers."""
    config = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
    )
    config.architectures, config.dtype = ["Qwen3MoeForCausalLM"], torch.bfloat16
    return config


def start(config: Qwen3MoeConfig, fmt: QuantFormat, targets: tuple[str, ...], folder: Path) -> Any:
    """Start the engine from a config alone."""
    from vllm import LLM

    config.save_pretrained(folder)
    quantization = model_quantization_config(fmt, shapes(config), targets)
    if quantization is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        worker_extension_cls="qarl_nemo.refit.load.PackedRefit",
        max_model_len=1024,
        max_num_seqs=64,
        kv_cache_memory_bytes=2**30,
        gpu_memory_utilization=0.1,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 8, 64],
            "custom_ops": ["+quant_fp8"],
        },
        **({"moe_backend": _MOE_BACKENDS[fmt.name]} if fmt.name in _MOE_BACKENDS else {}),
    )


def bench(format_name: str, targets: tuple[str, ...], senders: list[str], num_layers: int, repeats: int) -> dict:
    """Start one engine and refit it through every sender.

    Returns:
        Sender -> figures by name, units in the names; each value is a list, one entry for each repeat.
    """
    os.environ.update(_ENVIRONMENT)
    config, fmt = model_config(num_layers), get_format(format_name)
    print(f"{format_name}: starting vLLM, about a minute", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        engine = start(config, fmt, targets, Path(folder))
    figures = {}
    with _measuring_alone():
        for name in senders:
            device = "cuda:1" if name == "collective" else "cuda:0"
            sender = CollectiveSender(1, torch.device(device)) if name == "collective" else IpcSender()
            torch.cuda.set_device(device)
            learner = Learner(config, fmt, targets, device)
            figures[name] = measure(f"{format_name} {name}", learner, engine, sender, repeats)
            del learner
            gc.collect()
            torch.cuda.empty_cache()
    engine.llm_engine.engine_core.shutdown()
    return figures


def measure(label: str, learner: Learner, engine: Any, sender: Sender, repeats: int) -> dict[str, list[float]]:
    """Refit once to warm up, then `repeats` times."""
    from vllm import SamplingParams

    found: dict[str, list[float]] = {}
    with LiveProgress(label, repeats + 1) as progress:
        for repeat in range(repeats + 1):
            before = engine.collective_rpc("qarl_memory")[0]
            started = time.perf_counter()
            update = learner.publish(repeat + 1)
            published = time.perf_counter()
            report = push(update, engine, sender)
            total = time.perf_counter() - started
            after = engine.collective_rpc("qarl_memory")[0]
            progress.update(repeat + 1, seconds=total)
            seconds = {"publish": published - started, **report.seconds}
            values = {"s": total, **{f"{phase}_s": value for phase, value in seconds.items()}}
            values |= {"bytes": report.num_bytes, "peak_extra_bytes": after["peak"] - before["allocated"]}
            for name, value in values.items() if repeat else ():
                found.setdefault(name, []).append(value)
    assert serving_version(engine) == repeats + 1
    # The graphs that were captured before still replay.
    assert len(engine.generate([_PROMPT], SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False))) == 1
    return found


@contextmanager
def _measuring_alone() -> Iterator[None]:
    with (Path(tempfile.gettempdir()) / "qarl_bench_refit.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def result_rows(format_name: str, figures: dict, bf16_bytes: int, command: str) -> list[dict]:
    """Turn one format's figures into result rows: medians, and the spread of the whole."""
    rows = []

    def add(name: str, value: float, unit: str, goal: float | None = None) -> None:
        on = {"versions": {"torch": torch.__version__, "vllm": version("vllm")}}
        rows.append(row(name, value, unit, goal, "<=", command, "cuda") | on)

    for sender, values in figures.items():
        for name, repeats in values.items():
            add(f"refit_{format_name}_{sender}_{name}", median(repeats), name.rpartition("_")[2])
        add(f"refit_{format_name}_{sender}_spread_s", max(values["s"]) - min(values["s"]), "s")
    num_bytes = next(iter(figures.values()))["bytes"][0]
    add(f"refit_bytes_ratio_{format_name}", num_bytes / bf16_bytes, "")
    whole_s = median(figures["ipc"]["s"]) if "ipc" in figures else None
    if format_name == "w4a16" and whole_s is not None:
        add("refit_s", whole_s, "s", GOAL_S)
        add("refit_bytes_ratio", num_bytes / bf16_bytes, "", GOAL_RATIO)
    if format_name == "bf16" and whole_s is not None:
        add("refit_bf16_s", whole_s, "s")
    return rows


def main() -> None:
    """Bench every format in a process of its own, print the table, and record it when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default=",".join(FORMAT_NAMES), help="comma-separated")
    parser.add_argument("--targets", default="experts,attention", help="comma-separated")
    parser.add_argument("--senders", default="ipc", help=f"comma-separated, of {', '.join(SENDERS)}")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", type=Path, help="results file, e.g. docs/results/vllm.json")
    options = parser.parse_args()
    targets, senders = check_targets(options.targets.split(",")), options.senders.split(",")
    unknown = [name for name in senders if name not in SENDERS]
    if unknown:
        parser.error(f"unknown senders {unknown}; legal: {', '.join(SENDERS)}")
    bf16_bytes = sum(2 * torch.Size(shape).numel() for shape in shapes(model_config(options.layers)).values())
    command = f"python tools/bench_refit.py --targets {options.targets} --senders {options.senders}"
    for name in options.formats.split(","):
        # A process for each format: an engine gives its memory back when its parent ends.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            figures = pool.submit(bench, name, targets, senders, options.layers, options.repeats).result()
        _show(name, figures)
        if options.record:
            append_results(options.record, result_rows(name, figures, bf16_bytes, command))


def _show(format_name: str, figures: dict) -> None:
    columns = next(iter(figures.values()))
    table = Table("sender", *columns, title=f"{format_name}, {hardware('cuda')}, medians")
    for sender, values in figures.items():
        table.add_row(sender, *(f"{median(repeats):,.4g}" for repeats in values.values()))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
