"""Measure what alignment costs in Megatron: time and memory of Qwen3-30B-A3B's layers, beside Megatron's own BF16.

All variants are built side by side and run in turns, so that a ratio compares neighbours in time. A variant is
`megatron` (its TEGroupedMLP, BF16) or a format, with `+keep` for `keep_operand`, `+hp` for backward mode
`high_precision`, `+er` for `engine_rounding`. A step is quantization once, a forward and backward for each microbatch,
gradient reduction and the optimizer. The vocabulary is small and there is no head, so logits are not counted. With EP
below the number of GPUs, ranks with the same experts reduce gradients and share the optimizer.

    torchrun --nproc-per-node 4 tools/bench/megatron_step.py --ep 1,2,4
"""

import argparse
import gc
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron_model import (
    DEVICE,
    ON_GPU,
    OPTIMIZERS,
    QWEN3_30B_A3B,
    Layout,
    gpt_model,
    memory_allocated,
    parallel,
    process_group,
    say,
    synchronize,
    transformer_config,
    with_optimizer,
)
from megatron_rows import BASELINE, MOST_TOKENS, describe, predicted_bytes, step_rows
from torch import Tensor, nn

from qarl_kernels import get_format
from qarl_nemo.layers.weight import AlignedWeight
from qarl_nemo.megatron.alignment import Alignment, aligned_weights, bump_on_step
from qarl_nemo.memory import ModelSize
from qarl_nemo.metrics.results import append_results
from qarl_nemo.train.progress import LiveProgress

RECOMPUTE = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
VARIANTS = "megatron,bf16,w4a16,fp8_block,fp8_channel,int8,nvfp4,w4a8"


def parse_variant(name: str) -> Alignment | None:
    """Return what a variant executes; None is Megatron's own.

    Raises:
        ValueError: the name is not a variant's.
    """
    if name == BASELINE:
        return None
    format_name, *flags = name.split("+")
    unknown = set(flags) - {"keep", "hp", "er"}
    if unknown:
        raise ValueError(f"unknown flags {sorted(unknown)} of variant {name!r}; legal: keep, hp, er")
    backward = "high_precision" if "hp" in flags else "dequantized"
    return Alignment(
        get_format(format_name), backward=backward, keep_operand="keep" in flags, engine_rounding="er" in flags
    )


@dataclass
class Variant:
    """A model in training, and its measurements."""

    name: str
    model: nn.Module
    optimizer: Any
    weights: list[AlignedWeight]
    static_bytes: int = 0
    difference: float = 0.0
    figures: dict[str, list[float]] = field(default_factory=dict)

    def keep(self, name: str, value: float) -> None:
        """Keep one measurement: the slowest rank's, the fullest rank's."""
        self.figures.setdefault(name, []).append(over_ranks(value, dist.ReduceOp.MAX))


def over_ranks(value: float, operator: dist.ReduceOp) -> float:
    """Reduce a number over all ranks."""
    reduced = torch.tensor(value, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(reduced, operator)
    return float(reduced)


@dataclass(frozen=True)
class Batch:
    """What every microbatch of a rank computes."""

    tokens: Tensor
    positions: Tensor
    grad: Tensor
    moe_input: Tensor
    microbatches: int


def make_batch(num_tokens: int, sequence: int, architecture: ModelSize, microbatches: int) -> Batch:
    """Return random tokens of this rank, [B, S], and gradients of its hidden states, [S, B, H]."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (num_tokens // sequence, sequence)
    tokens = torch.randint(architecture.vocab_size, shape, generator=generator).to(DEVICE)
    positions = torch.arange(sequence, device=DEVICE).expand(shape)
    hidden = (sequence, shape[0], architecture.hidden)
    grad, moe_input = (torch.randn(hidden, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(2))
    return Batch(tokens, positions, grad / num_tokens, moe_input, microbatches)


def build(name: str, options: argparse.Namespace, layout: Layout, like: Variant | None) -> Variant:
    """Build one variant.

    Args:
        name: the variant's name.
        options: the command line's options.
        layout: how ranks share it.
        like: the variant whose weights it begins with.
    """
    alignment = parse_variant(name)
    config = transformer_config(options.architecture, layout, **RECOMPUTE[options.recompute])
    model = gpt_model(options.architecture, config, alignment, with_output=False)
    if like is not None:
        _copy_weights(like.model.module, model)
    wrapped, stepper = with_optimizer(model, options.optimizer)
    if alignment is not None:
        bump_on_step(stepper, alignment.changes)
    return Variant(name, wrapped, stepper, aligned_weights([model]))


@torch.no_grad()
def _copy_weights(source: nn.Module, destination: nn.Module) -> None:
    weights = dict(source.named_parameters())
    for name, parameter in destination.named_parameters():
        # In Megatron's own layers experts are separate modules, and the first norm is fused into linear_qkv.
        linear, _, expert = name.rpartition(".weight")
        *path, kind = linear.split(".")
        local = ".".join([*path, "local_experts", expert, kind, "weight"])
        fused = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
        parameter.copy_(weights[next(one for one in (name, fused, local) if one in weights)])


def moe(variant: Variant, batch: Batch) -> Tensor:
    """Run the first layer's MoE alone, forward and backward."""
    x = batch.moe_input.clone().requires_grad_()
    with variant.model.no_sync():
        out, _ = variant.model.module.decoder.layers[0].mlp(x)
        out.backward(batch.grad)
    return out.detach()


def forward(variant: Variant, batch: Batch) -> None:
    """Run a forward of all layers without gradient, as for logprobs."""
    with torch.no_grad():
        _hidden(variant, batch)


def quantize(variant: Variant, _: Batch) -> None:
    """Quantize the weights that the optimizer changed."""
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
    # On a GPU the attention kernel masks by itself; Megatron's local attention on a CPU needs a mask.
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
    """Run all variants in turns, in reverse order every other round; the first two rounds are not kept."""
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


def saved(variant: Variant, batch: Batch) -> dict[str, float]:
    """Return the bytes that a forward keeps for its backward, and the busiest rank's rows over the mean."""
    rows: list[int] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, arguments: rows.append(len(arguments[0])))
        for layer in variant.model.module.decoder.layers
    ]
    before = memory_allocated()
    with variant.model.no_sync():
        out = _hidden(variant, batch)
        held, total = memory_allocated() - before - out.nbytes, sum(rows)
        out.backward(batch.grad)
    for hook in hooks:
        hook.remove()
    mean = over_ranks(total, dist.ReduceOp.SUM) / dist.get_world_size()
    largest = over_ranks(total, dist.ReduceOp.MAX)
    return {"saved_bytes": over_ranks(held, dist.ReduceOp.MAX), "busiest": largest / mean}


def gpu_seconds(variant: Variant, batch: Batch, path: Path) -> float:
    """Return the time of kernels in a forward and backward on the first rank's GPU, without communication.

    Args:
        variant: the variant to run.
        batch: one microbatch.
        path: where a table of the longest kernels goes.
    """
    once = replace(batch, microbatches=1)
    if dist.get_rank():
        forward_backward(variant, once)
        optimize(variant, once)
        return 0.0
    activity = torch.profiler.ProfilerActivity.CUDA if ON_GPU else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        forward_backward(variant, once)
        synchronize()
    optimize(variant, once)
    kernels = profiler.key_averages()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(kernels.table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90))
    return 1e-6 * sum(kernel.self_device_time_total for kernel in kernels if "nccl" not in kernel.key.lower())


def differences(variants: list[Variant], batch: Batch) -> list[float]:
    """Return how far each variant's MoE layer is from the first one's, relative to it."""
    expected, *others = (moe(variant, batch).float() for variant in variants)
    return [0.0, *(float((out - expected).norm() / expected.norm()) for out in others)]


def bench(options: argparse.Namespace) -> list[dict]:
    """Measure every layout, number of tokens and variant, saving results as they come; called on every rank."""
    found: list[dict[str, Any]] = []
    for ep in options.ep:
        with parallel(Layout(ep=ep)):
            variants = _build_all(Layout(ep=ep), options)
            for num_tokens in options.tokens:
                sequence = min(options.sequence, num_tokens)
                batch = make_batch(num_tokens, sequence, options.architecture, options.microbatches)
                measure(variants, batch, options.repeats, f"EP{ep}, {num_tokens} tokens")
                found += [_entry(variant, ep, num_tokens, batch, options) for variant in variants]
                for entry in found[-len(variants) :]:
                    say(describe(entry, found))
                _keep(found, options)
            if options.profile and ep == options.ep[-1]:
                _profile(variants, batch, found, options)
            del variants
    return found


def _build_all(layout: Layout, options: argparse.Namespace) -> list[Variant]:
    num_tokens = min(options.tokens)
    first = make_batch(num_tokens, min(options.sequence, num_tokens), options.architecture, 1)
    # Builds one model first, so that workspaces that live as long as the process are not counted for a variant.
    _static_bytes(lambda: build(options.variants[0], options, layout, None), first)
    variants: list[Variant] = []
    for name in options.variants:
        like = variants[0] if variants else None
        held, variant = _static_bytes(lambda name=name, like=like: build(name, options, layout, like), first)
        variants.append(replace(variant, static_bytes=held))
        say(f"EP{layout.ep}: built {name}, {held / 2**30:.2f} GiB")
    for variant, difference in zip(variants, differences(variants, first), strict=True):
        variant.difference = difference
    return variants


def _entry(variant: Variant, ep: int, num_tokens: int, batch: Batch, options: argparse.Namespace) -> dict[str, Any]:
    entry = {"ep": ep, "tokens": num_tokens, "variant": variant.name, **variant.figures, **saved(variant, batch)}
    variant.figures = {}
    entry |= {"static_bytes": variant.static_bytes, "difference": variant.difference}
    return entry | {"predicted_bytes": predicted_bytes(entry, options, dist.get_world_size())}


def _keep(found: list[dict], options: argparse.Namespace) -> None:
    if options.raw and dist.get_rank() == 0:
        options.raw.write_text(json.dumps(found, indent=1))
    if options.record and dist.get_rank() == 0:
        append_results(options.record, step_rows(found, dist.get_world_size()))


def _profile(variants: list[Variant], batch: Batch, found: list[dict], options: argparse.Namespace) -> None:
    for variant, entry in zip(variants, found[-len(variants) :], strict=True):
        table = options.profile / f"ep{entry['ep']}_{entry['tokens']}_{variant.name}.txt"
        entry["gpu_s"] = gpu_seconds(variant, batch, table)
        say(describe(entry, found))
    _keep(found, options)


def _static_bytes(make: Any, batch: Batch) -> tuple[int, Variant]:
    gc.collect()
    before = memory_allocated()
    variant = make()
    # Optimizers allocate their state only in the first step.
    _step(variant, batch)
    gc.collect()
    return int(over_ranks(memory_allocated() - before, dist.ReduceOp.MAX)), variant


def numbers(text: str) -> list[int]:
    """Return comma-separated numbers."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure, show and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=VARIANTS.split(","))
    parser.add_argument("--ep", type=numbers, default=[1], help="expert parallel sizes, e.g. 1,2,4")
    parser.add_argument("--tokens", type=numbers, default=[8192, MOST_TOKENS], help="of a rank's microbatch")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", type=Path, help="folder: time the last layout's kernels alone, and list them")
    parser.add_argument("--raw", type=Path, help="keep every measurement in this file")
    parser.add_argument("--record", type=Path, help="results file, e.g. docs/results/megatron.json")
    options = parser.parse_args()
    for name in options.variants:
        parse_variant(name)
    options.architecture = replace(QWEN3_30B_A3B, num_layers=options.layers, vocab_size=1024)
    with process_group():
        bench(options)


if __name__ == "__main__":
    main()
