"""Measure what alignment costs in Megatron: time and memory of Qwen3-30B-A3B's layers, beside Megatron's own BF16.

All variants are built side by side and run in turns, so that a ratio compares neighbours in time. A variant is
`megatron` (its TEGroupedMLP, BF16) or a format, with `+keep` for `keep_operand`, `+hp` for backward mode
`high_precision`. A step is quantization once, a forward and backward for each microbatch, gradient reduction and the
optimizer; the vocabulary is small and there is no head, so that logits are not counted. With EP below the number of
GPUs, ranks with the same experts reduce gradients and share the optimizer.

    torchrun --nproc-per-node 4 tools/bench_megatron.py --ep 1,2,4
"""

import argparse
import gc
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron_model import (
    DEVICE,
    ON_GPU,
    OPTIMIZERS,
    Architecture,
    Layout,
    gpt_model,
    parallel,
    process_group,
    transformer_config,
    with_optimizer,
)
from record_local import row
from torch import Tensor, nn

from qarl_kernels import get_format
from qarl_nemo.layers.weight import AlignedWeight
from qarl_nemo.local.progress import LiveProgress
from qarl_nemo.metrics.machine import hardware
from qarl_nemo.metrics.results import append_results
from qarl_nemo.nemo.alignment import Alignment, aligned_weights, bump_on_step

STARTED = time.perf_counter()
BASELINE = "megatron"
VARIANTS = "megatron,bf16,w4a16,w4a16+keep,w4a8,w4a8+keep,fp8_block,fp8_channel,fp8_channel+hp"
GOALS = {"w4a16": 1.05, "w4a8": 0.85, "fp8_block": 0.85, "fp8_channel": 0.85}
# Relative difference of the MoE layer's output from Megatron's; quantization noise of random weights, and other routes
# where two experts are all but tied. Twice as much is another function.
GATES = {"megatron": 0.0, "bf16": 0.1, "w4a16": 0.4, "w4a8": 0.4, "fp8_block": 0.2, "fp8_channel": 0.2}


def parse_variant(name: str) -> Alignment | None:
    """Return what a variant executes; None is Megatron's own.

    Raises:
        ValueError: the name is not of a variant.
    """
    if name == BASELINE:
        return None
    format_name, *flags = name.split("+")
    unknown = set(flags) - {"keep", "hp"}
    if unknown:
        raise ValueError(f"unknown flags {sorted(unknown)} of variant {name!r}; legal: keep, hp")
    mode = "high_precision" if "hp" in flags else "dequantized"
    return Alignment(get_format(format_name), mode=mode, keep_operand="keep" in flags)


@dataclass
class Variant:
    """A model in training, and what was measured of it."""

    name: str
    model: nn.Module
    optimizer: Any
    weights: list[AlignedWeight]
    static_bytes: int = 0
    figures: dict[str, list[float]] = field(default_factory=dict)

    def keep(self, name: str, value: float) -> None:
        """Keep one measurement: the slowest rank's, the fullest rank's."""
        worst = torch.tensor(value, dtype=torch.float64, device=DEVICE)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        self.figures.setdefault(name, []).append(float(worst))


@dataclass(frozen=True)
class Batch:
    """What every microbatch of a rank computes."""

    tokens: Tensor
    positions: Tensor
    grad: Tensor
    moe_input: Tensor
    microbatches: int


def make_batch(num_tokens: int, sequence: int, architecture: Architecture, microbatches: int) -> Batch:
    """Return random tokens of this rank, [B, S], and gradients of its hidden states, [S, B, H]."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (num_tokens // sequence, sequence)
    tokens = torch.randint(architecture.vocab_size, shape, generator=generator).to(DEVICE)
    positions = torch.arange(sequence, device=DEVICE).expand(shape)
    hidden = (sequence, shape[0], architecture.hidden)
    grad, moe_input = (torch.randn(hidden, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(2))
    return Batch(tokens, positions, grad / num_tokens, moe_input, microbatches)


def build(name: str, architecture: Architecture, layout: Layout, optimizer: str, **options: Any) -> Variant:
    """Build one variant."""
    alignment = parse_variant(name)
    config = transformer_config(architecture, layout, **options)
    model = gpt_model(architecture, config, alignment, with_output=False)
    wrapped, stepper = with_optimizer(model, optimizer)
    if alignment is not None:
        bump_on_step(stepper, alignment.version)
    return Variant(name, wrapped, stepper, aligned_weights([model]))


def moe(variant: Variant, batch: Batch) -> Tensor:
    """Run the first layer's MoE alone, forward and backward."""
    x = batch.moe_input.clone().requires_grad_()
    with variant.model.no_sync():
        out, _ = variant.model.module.decoder.layers[0].mlp(x)
        out.backward(batch.grad)
    return out.detach()


def forward(variant: Variant, batch: Batch) -> None:
    """Run all layers as for log-probabilities."""
    with torch.no_grad():
        _hidden(variant, batch)


def quantize(variant: Variant, _: Batch) -> None:
    """Quantize what the optimizer changed."""
    for weight in variant.weights:
        weight.quantized()


def forward_backward(variant: Variant, batch: Batch) -> None:
    """Run every microbatch; gradients are reduced in the last one."""
    variant.model.zero_grad_buffer()
    for number in range(batch.microbatches):
        if number + 1 < batch.microbatches:
            with variant.model.no_sync():
                _hidden(variant, batch).backward(batch.grad)
        else:
            _hidden(variant, batch).backward(batch.grad)


def optimize(variant: Variant, _: Batch) -> None:
    """Finish reducing gradients, clip, step."""
    finalize_model_grads([variant.model])
    variant.optimizer.step()


def _hidden(variant: Variant, batch: Batch) -> Tensor:
    # The causal mask is the attention kernel's own on a GPU; Megatron's local attention on a CPU wants it.
    mask = None
    if not ON_GPU:
        length = batch.tokens.shape[1]
        mask = ~torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    return variant.model(batch.tokens, batch.positions, mask)


WORK = {
    "moe": moe,
    "forward": forward,
    "forward_backward": forward_backward,
    "optimizer": optimize,
    "quantize": quantize,
}


def measure(variants: list[Variant], batch: Batch, repeats: int, label: str) -> None:
    """Run all variants in turns, every other round backwards; the first two rounds are not kept."""
    progress = LiveProgress(label, repeats + 2) if dist.get_rank() == 0 else None
    for number in range(repeats + 2):
        for variant in variants if number % 2 else reversed(variants):
            for name, value in _step(variant, batch).items() if number >= 2 else ():
                variant.keep(name, value)
        if progress:
            progress.update(number + 1)


def _step(variant: Variant, batch: Batch) -> dict[str, float]:
    figures: dict[str, float] = {}
    before = memory_allocated()
    for name, work in WORK.items():
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        dist.barrier()
        start = time.perf_counter()
        work(variant, batch)
        synchronize()
        figures[f"{name}_s"] = time.perf_counter() - start
        figures[f"{name}_peak_bytes"] = torch.cuda.max_memory_allocated() - before if ON_GPU else 0
    return figures


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


def memory_allocated() -> int:
    """Return the bytes of this rank's tensors on the GPU."""
    return torch.cuda.memory_allocated() if ON_GPU else 0


def saved_bytes(variant: Variant, batch: Batch) -> int:
    """Return what a forward keeps for its backward."""
    before = memory_allocated()
    with variant.model.no_sync():
        out = _hidden(variant, batch)
        held = memory_allocated() - before - out.nbytes
        out.backward(batch.grad)
    return held


def require_same_function(variants: list[Variant], batch: Batch) -> dict[str, float]:
    """Raise unless every variant's MoE layer computes what Megatron's does, but for rounding.

    Returns:
        Each variant's relative difference.

    Raises:
        ValueError: lists the variants that differ by more.
    """
    outputs = {variant.name: moe(variant, batch).float() for variant in variants}
    # Megatron's local experts are initialized in another order.
    expected = outputs.get(BASELINE if ON_GPU else "bf16")
    if expected is None:
        return {}
    outputs = outputs if ON_GPU else {name: out for name, out in outputs.items() if name != BASELINE}
    found = {name: float((out - expected).norm() / expected.norm()) for name, out in outputs.items()}
    wrong = [f"{name}: {value:.3g}" for name, value in found.items() if not value <= GATES[name.split("+")[0]]]
    if wrong:
        raise ValueError(f"relative differences from {BASELINE} above {GATES}: {', '.join(wrong)}")
    return found


def bench(options: argparse.Namespace) -> list[dict]:
    """Measure every layout; called on every rank.

    Args:
        options: of the command line.

    Returns:
        One entry for each layout, number of tokens and variant.
    """
    found: list[dict] = []
    for ep in options.ep:
        with parallel(Layout(ep=ep)):
            _bench_layout(Layout(ep=ep), options, found)
    return found


def _bench_layout(layout: Layout, options: argparse.Namespace, found: list[dict]) -> None:
    architecture, names = options.architecture, options.variants
    first = make_batch(options.tokens[0], min(options.sequence, options.tokens[0]), architecture, 1)
    # Workspaces that live as long as the process are not any variant's.
    _static_bytes(lambda: build(names[0], architecture, layout, options.optimizer), first)
    variants = []
    for name in names:
        held, variant = _static_bytes(lambda name=name: build(name, architecture, layout, options.optimizer), first)
        variants.append(replace(variant, static_bytes=held))
        say(f"EP{layout.ep}: built {name}, {held / 2**30:.2f} GiB")
    for num_tokens in options.tokens:
        batch = make_batch(num_tokens, min(options.sequence, num_tokens), architecture, options.microbatches)
        differences = require_same_function(variants, batch)
        for variant in variants:
            variant.figures.clear()
        measure(variants, batch, options.repeats, f"EP{layout.ep}, {num_tokens} tokens")
        for variant in variants:
            entry = {"ep": layout.ep, "tokens": num_tokens, "variant": variant.name, **variant.figures}
            entry |= {"static_bytes": variant.static_bytes, "saved_bytes": saved_bytes(variant, batch)}
            entry["difference"] = differences.get(variant.name)
            found.append(entry)
            say(describe(entry, found))
        if options.raw and dist.get_rank() == 0:
            options.raw.write_text(json.dumps(found, indent=1))
    if options.profile:
        for variant in variants:
            _profile(variant, batch, options.profile / f"ep{layout.ep}_{variant.name}.txt")


def _static_bytes(make: Any, batch: Batch) -> tuple[int, Variant]:
    gc.collect()
    before = memory_allocated()
    variant = make()
    # Optimizers allocate their state in the first step.
    _step(variant, batch)
    gc.collect()
    return (memory_allocated() - before), variant


def describe(entry: dict, found: list[dict]) -> str:
    """Return one line about a variant, its ratios over the baseline of the same layout and tokens."""
    base = next((other for other in found if other["variant"] == BASELINE and _place(other) == _place(entry)), entry)
    times = "  ".join(f"{name} {1e3 * median(entry[f'{name}_s']):.2f}" for name in WORK)
    ratio = median(_ratios(entry, base))
    memory = peak_bytes(entry) / 2**30
    return f"EP{entry['ep']} {entry['tokens']} {entry['variant']:16} ms: {times}  ratio {ratio:.3f}  {memory:.2f} GiB"


def peak_bytes(entry: dict) -> float:
    """Return what a variant needs at most: what it holds between steps, and on top of it in a step."""
    return entry["static_bytes"] + max(max(entry[f"{name}_peak_bytes"]) for name in WORK)


def _place(entry: dict) -> tuple[int, int]:
    return entry["ep"], entry["tokens"]


def _ratios(entry: dict, base: dict, parts: tuple[str, ...] = ("quantize", "forward_backward")) -> list[float]:
    totals = [
        [sum(values) for values in zip(*(one[f"{part}_s"] for part in parts), strict=True)] for one in (entry, base)
    ]
    return [ours / theirs for ours, theirs in zip(*totals, strict=True)]


def _profile(variant: Variant, batch: Batch, path: Path) -> None:
    once = replace(batch, microbatches=1)
    with torch.profiler.profile() as profiler:
        forward_backward(variant, once)
        synchronize()
    optimize(variant, once)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        key = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
        path.write_text(profiler.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90))


def say(text: str) -> None:
    """Print on the first rank, with the seconds since the start."""
    if dist.get_rank() == 0:
        print(f"[{time.perf_counter() - STARTED:4.0f} s] {text}", flush=True)


def result_rows(found: list[dict], num_gpus: int, options: argparse.Namespace) -> list[dict]:
    """Turn what was measured into rows: ratios over Megatron's BF16 of the same round, medians and spreads.

    Args:
        found: of `bench`.
        num_gpus: it ran on.
        options: of the command line.

    Returns:
        The rows; those of fewer tokens than the most are named after their tokens.
    """
    command = f"torchrun --nproc-per-node {num_gpus} tools/bench_megatron.py --ep {','.join(map(str, options.ep))}"
    device = "cuda" if ON_GPU else "cpu"
    facts = {"hardware": hardware(device).replace("1x", f"{num_gpus}x"), "versions": software()}
    rows = []

    def add(name: str, value: float, unit: str = "", goal: float | None = None) -> None:
        rows.append(row(name, value, unit, goal, "<=", command, device) | facts)

    for entry in found:
        base = next(one for one in found if one["variant"] == BASELINE and _place(one) == _place(entry))
        name = entry["variant"].replace("+", "_")
        where = f"ep{entry['ep']}" + ("" if entry["tokens"] == max(options.tokens) else f"_{entry['tokens']}")
        for part in WORK:
            add(f"{name}_{part}_ms_{where}", 1e3 * median(entry[f"{part}_s"]), "ms")
        add(f"{name}_memory_gib_{where}", peak_bytes(entry) / 2**30, "GiB")
        if entry is base:
            continue
        ratios = _ratios(entry, base)
        add(f"{name}_step_ratio_{where}", median(ratios), goal=GOALS.get(name.split("_keep")[0].split("_hp")[0]))
        add(f"{name}_step_ratio_spread_{where}", max(ratios) - min(ratios))
        add(f"{name}_moe_ratio_{where}", median(_ratios(entry, base, ("moe",))))
        add(f"{name}_forward_ratio_{where}", median(_ratios(entry, base, ("forward",))))
        whole = ("quantize", "forward_backward", "optimizer")
        add(f"{name}_whole_step_ratio_{where}", median(_ratios(entry, base, whole)))
    return rows


def software() -> dict[str, str]:
    """Return the versions that matter."""
    import megatron.core

    found = {"torch": torch.__version__, "megatron-core": megatron.core.__version__}
    if ON_GPU:
        import transformer_engine

        found["transformer-engine"] = transformer_engine.__version__
    return found


def numbers(text: str) -> list[int]:
    """Return comma-separated numbers."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure, show and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=VARIANTS.split(","))
    parser.add_argument("--ep", type=numbers, default=[1], help="expert parallel sizes, e.g. 1,2,4")
    parser.add_argument("--tokens", type=numbers, default=[4096, 8192], help="of a rank's microbatch")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", type=Path, help="folder for tables of the longest kernels")
    parser.add_argument("--raw", type=Path, help="keep every measurement in this file")
    parser.add_argument("--record", type=Path, help="results file, e.g. docs/results/megatron.json")
    options = parser.parse_args()
    for name in options.variants:
        parse_variant(name)
    options.architecture = Architecture(num_layers=options.layers, vocab_size=1024)
    with process_group() as rank:
        found, num_gpus = bench(options), dist.get_world_size()
    if options.record and rank == 0:
        append_results(options.record, result_rows(found, num_gpus, options))


if __name__ == "__main__":
    main()
