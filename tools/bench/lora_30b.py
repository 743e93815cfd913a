"""Measure whole GRPO steps of adapters on a frozen packed base of 30 billion parameters, on one GPU under a memory cap.

The base has random weights in the shape of a `config.json`. They are drawn and quantized one tensor at a time, so that
no BF16 model ever exists, and written as `qarl quantize` writes them; the run then starts from that checkpoint as any
other. Learner and engine share the GPU.

python tools/bench/lora_30b.py --targets attention --rank 32 --cap-gb 80 --record docs/results/lora.json
python tools/bench/lora_30b.py --targets attention,experts --rank 16 --cap-gb 141 --record docs/results/lora.json

With `--engine packed` the built-in sampler shares the learner's base, so that the base is in memory once, and samples
slower; `--format nvfp4` takes another base.
"""

import argparse
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
from real_size import PHASES, WARM_UP_STEPS, step_settings
from torch import Tensor

from qarl_kernels import get_format
from qarl_nemo.architecture import Architecture
from qarl_nemo.checkpoints import Checkpoint, quantize_checkpoint
from qarl_nemo.checkpoints.reader import TensorInfo
from qarl_nemo.config import validate
from qarl_nemo.config.overrides import merge_overrides
from qarl_nemo.files import read_json
from qarl_nemo.memory import EMBEDDED_PROCESS_BYTES, GIB, Learner, ModelSize
from qarl_nemo.memory.lora import Adapters, adapted_memory
from qarl_nemo.metrics.machine import facts
from qarl_nemo.metrics.recorded import read_lines
from qarl_nemo.metrics.results import Figure, record_figures
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.preflight import prepare
from qarl_nemo.train.rollouts import Rollouts
from qarl_nemo.train.tasks import Task
from qarl_nemo.train.tokenizer import character_tokenizer
from qarl_nemo.train.trainer import Trainer

MODEL = Path(__file__).parents[2] / "examples/models/qwen3-30b-a3b"
# Options that say where things are, and the overrides, which follow them.
_FOLDERS = ("config", "work", "base", "record", "overrides")


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Reads tensors that are drawn as they are asked for: a matrix has variance 1 / K, a norm is one.

    Attributes:
        noise: more values than the largest tensor has; each tensor is a part of it that begins elsewhere.
    """

    noise: Tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def read(self, info: TensorInfo) -> Tensor:
        """Return a tensor of a checkpoint."""
        if len(info.shape) == 1:
            return torch.ones(info.shape, dtype=torch.bfloat16, device=self.noise.device)
        size = info.num_bytes // 2
        first = zlib.crc32(info.name.encode()) % (len(self.noise) - size)
        return self.noise[first : first + size].view(info.shape) * info.shape[-1] ** -0.5


def random_checkpoint(folder: Path, options: argparse.Namespace) -> Path:
    """Write a quantized checkpoint of random weights, one tensor at a time, unless `--base` holds one already.

    Args:
        folder: where it goes unless `--base` says otherwise.
        options: what the command line says.
    """
    source, destination = folder / "source", options.base or folder / "base"
    if destination.exists():
        return destination
    source.mkdir()
    character_tokenizer().save_pretrained(source)
    shutil.copy(options.config / "config.json", source)
    values = read_json(source / "config.json", "a model's config.json")
    shapes = Architecture.parse(values, str(source)).parameters()
    infos = tuple(TensorInfo(name, shape, "BF16", ("config.json",)) for name, shape in shapes)
    largest = max(info.num_bytes // 2 for info in infos)
    noise = torch.randn(largest + 1_000_003, generator=torch.Generator().manual_seed(0))
    noise = noise.bfloat16().to(options.device)
    drawn = Checkpoint(source, source, values, infos, lambda: RandomWeights(noise))
    fmt = get_format(options.format, group_size=options.group_size)
    quantize_checkpoint(drawn, destination, fmt, options.base_targets.split(","), device=options.device)
    return destination


def settings(base: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the run's config.

    Returns:
        Values of `LocalConfig`.
    """
    qarl = {"format": options.format, "targets": options.base_targets.split(","), "keep_operand": False}
    budgets = {"train_mb_tokens": options.tokens, "logprob_mb_tokens": options.tokens}
    policy = {
        "precision": "bfloat16" if options.device == "cuda" else "float32",
        "lora": {"rank": options.rank, "targets": options.targets.split(",")},
        "optimizer": {"name": "adamw", "lr": 1e-5},
        "sequence_packing": {"enabled": True, **budgets},
        "activation_checkpointing": True,
    }
    qarl |= {"group_size": options.group_size} if options.group_size else {}
    return step_settings(base, folder, options, qarl=qarl, policy=policy)


class OddRewards(Trainer):
    """A run that rewards odd last tokens: random weights answer nothing right, and equal rewards teach nothing."""

    def rewards(self, rollouts: Rollouts, tasks: list[Task]) -> Tensor:  # noqa: ARG002 the answers are not read
        """Return 0 or 1 by each response's last token."""
        return (rollouts.input_ids[:, -1] % 2).float()


def bench(options: argparse.Namespace) -> dict[str, float]:
    """Train a few steps under the cap and return medians by name, units in the names."""
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        folder = Path(name)
        base = random_checkpoint(folder, options)
        values = merge_overrides(settings(base, folder, options), options.overrides, LocalConfig)
        config = validate(values, LocalConfig, source="the command line")
        started = time.perf_counter()
        prepared = prepare(config)
        if options.device == "cuda":
            total = torch.cuda.get_device_properties(prepared.device).total_memory
            torch.cuda.set_per_process_memory_fraction((options.cap_gb * 1e9 - EMBEDDED_PROCESS_BYTES) / total)
        trainer = OddRewards(config, prepared=prepared)
        figures = {"load_s": time.perf_counter() - started}
        trainer.train()
        records = read_lines(folder / "run" / "metrics.jsonl")[WARM_UP_STEPS:]
    return figures | step_figures(records, options, trainer)


def step_figures(records: list[dict[str, Any]], options: argparse.Namespace, trainer: Trainer) -> dict[str, float]:
    """Return the medians of a run's steps, and how far its memory is from what is computed."""
    num_responses = options.num_prompts * options.num_generations
    tokens = [record["response_length_tokens/mean"] * num_responses for record in records]
    figures: dict[str, float] = {}
    for phase in (*PHASES, "step"):
        figures[f"{phase}_s"] = median(record[f"timing/{phase}_s"] for record in records)
    figures["tokens_s"] = median(tokens) / figures["step_s"]
    figures["gap_nats"] = median(record["mismatch/abs_gap_mean"] for record in records)
    figures["host_gib"] = max(record["memory/process_peak_bytes"] for record in records) / GIB
    if options.device == "cuda":
        figures["peak_gib"] = max(record["memory/device_peak_bytes"] for record in records) / GIB
        # All that the driver counts, engine and CUDA's context included; of a GPU with nobody else on it.
        free, total = torch.cuda.mem_get_info(trainer.device)
        figures["device_gib"] = (total - free) / GIB
        figures["memory_error"] = abs(computed_bytes(options, trainer) / (total - free) - 1)
    return figures


def computed_bytes(options: argparse.Namespace, trainer: Trainer) -> float:
    """Return what `qarl memory --lora` computes for this run at its peak, what tensors do not account for included."""
    model = ModelSize.read(options.config)
    learner = Learner(
        options.format,
        options.group_size or 128,
        tuple(options.base_targets.split(",")),
        tokens=options.tokens,
        recompute="full",
        logits=False,
        logprob_chunk=trainer.config.policy.logprob_chunk_size,
    )
    longest = max(len(trainer.encode([task])[0]) for task in trainer.source.train(1, 8)) + options.max_new_tokens
    cache = model.cache_bytes * options.num_prompts * options.num_generations * longest
    adapters = Adapters(options.rank, tuple(options.targets.split(",")))
    if options.engine == "vllm":
        cache = options.kv_cache_gib * GIB
    memory = adapted_memory(model, learner, adapters, engine=options.engine, cache_bytes=cache)
    return memory.peak_bytes + EMBEDDED_PROCESS_BYTES


def rows_of(figures: Mapping[str, float], options: argparse.Namespace) -> list[Figure]:
    """Return the rows of docs/results/lora.json.

    Args:
        figures: what `bench` returned.
        options: what the command line says.

    Returns:
        `lora_<figure>_<targets>`, the cap as the goal of the peak.
    """
    units = {"tokens_s": "tokens/s", "memory_error": "", "peak_gib": "GiB", "host_gib": "GiB", "device_gib": "GiB"}
    cap = options.cap_gb * 1e9 / GIB
    goals = {"peak_gib": cap, "device_gib": cap, "memory_error": 0.05}
    label = "_".join([*options.targets.split(","), *([options.label] if options.label else [])])
    return [
        Figure(
            f"lora_{name}_{label}",
            value,
            units.get(name, name.rpartition("_")[2]),
            ">=" if name == "tokens_s" else "<=",
            goals.get(name),
        )
        for name, value in figures.items()
    ]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=MODEL, help="folder with a config.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", choices=("vllm", "packed"), help="default: vllm on a GPU")
    parser.add_argument("--kv-cache-gib", type=float, default=8.0, help="vLLM's cache")
    parser.add_argument("--format", default="w4a16", help="of the base")
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--base-targets", default="experts", help="what is quantized in the base")
    parser.add_argument("--targets", default="attention", help="what has adapters")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--cap-gb", type=float, default=80.0, help="GB of 10^9 bytes that the process may take")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--minibatches", type=int, default=1, help="optimizer steps of a rollout batch")
    parser.add_argument("--steps", type=int, default=3, help=f"measured, after {WARM_UP_STEPS} of warm-up")
    parser.add_argument("--work", type=Path, help="folder with room for the base (18 GB); default: the system's")
    parser.add_argument("--base", type=Path, help="keeps the quantized base in this folder, or takes it from there")
    parser.add_argument("--draw", action="store_true", help="only draw --base, which other runs then take")
    parser.add_argument("--label", default="", help="put at the end of the rows' names, e.g. nvfp4")
    parser.add_argument("--record", type=Path, help="results file, e.g. docs/results/lora.json")
    parser.add_argument("overrides", nargs="*", help="dotted overrides of the run's config, a.b=c")
    options = parser.parse_args(given)
    if options.draw and not options.base:
        parser.error("--draw: set --base to the folder that the base goes to")
    options.engine = options.engine or ("vllm" if options.device == "cuda" else "packed")
    return options


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the options that are not the defaults, without the machine's own folders."""
    defaults = vars(arguments([]))
    given = {name: value for name, value in vars(options).items() if value != defaults[name]}
    return [f"--{name.replace('_', '-')} {value}" for name, value in given.items() if name not in _FOLDERS]


def main() -> None:
    """Run, print the figures, and record them on request."""
    options = arguments()
    if options.draw:
        with tempfile.TemporaryDirectory(dir=options.work) as name:
            print(f"base in {random_checkpoint(Path(name), options)}")
        return
    figures = rows_of(bench(options), options)
    command = " ".join(["python tools/bench/lora_30b.py", *chosen(options), *options.overrides])
    record_figures(options.record, figures, command=command, **facts(options.device))


if __name__ == "__main__":
    main()
