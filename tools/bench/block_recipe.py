"""Compares Transformer-Engine's FP8 block recipe with this package's kernels on the experts of one Qwen3-30B-A3B layer.

One GPU, all 128 experts, routed tokens. Measures milliseconds of a forward and of a forward with backward, beside
Megatron's own BF16 experts, and the outputs' distance in decibels from the kernels' outputs and from unquantized ones.
"""

import argparse
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron_model import QWEN3_30B_A3B, Layout, gpt_model, parallel, ran_on, transformer_config
from torch import Tensor, nn

from qarl_kernels import get_format
from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.metrics.results import Figure, record_figures

MODEL = replace(QWEN3_30B_A3B, num_layers=1, vocab_size=128)


def build_experts(alignment: Alignment | None) -> nn.Module:
    """Return the expert MLP of a one-layer model, with the same weights in every call.

    Args:
        alignment: what it executes; None is Megatron's own.

    Returns:
        The module: rows, counts, router weights -> rows.
    """
    # Without Apex gradients cannot be added in place; no optimizer reads them here.
    config = transformer_config(MODEL, Layout(), gradient_accumulation_fusion=False)
    experts = gpt_model(MODEL, config, alignment, with_output=True).decoder.layers[0].mlp.experts
    generator = torch.Generator("cuda").manual_seed(1)
    for weight in experts.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5, generator=generator)
    return experts


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median time of `work`.

    Args:
        work: something that runs on the GPU.
        repeats: how often it is timed, after three times that are not.

    Returns:
        Milliseconds.
    """
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[3:])[repeats // 2]


def decibels(actual: Tensor, expected: Tensor) -> float:
    """Return the ratio of signal to difference: 20 lg(|expected| / |actual - expected|)."""
    return 20 * math.log10(float(expected.double().norm() / (actual.double() - expected.double()).norm()))


def unquantized(experts: nn.Module, rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """Return the experts' output in FP32, without any rounding on the way."""
    out = []
    for expert, (part, scale) in enumerate(
        zip(rows.float().split(counts.tolist()), weight.split(counts.tolist()), strict=True)
    ):
        fc1, fc2 = (getattr(linear, f"weight{expert}").float() for linear in (experts.linear_fc1, experts.linear_fc2))
        gate, up = (part @ fc1.T).chunk(2, -1)
        out.append((nn.functional.silu(gate) * up) @ fc2.T * scale.unsqueeze(-1))
    return torch.cat(out)


def measure(tokens: int, repeats: int) -> dict[str, float]:
    """Time and compare all backends.

    Args:
        tokens: number of tokens, each routed to eight random experts.
        repeats: see `milliseconds`.

    Returns:
        Names of rows -> figures.
    """
    generator = torch.Generator("cuda").manual_seed(2)
    chosen = torch.rand(tokens, MODEL.num_experts, device="cuda", generator=generator).topk(MODEL.top_k).indices
    counts = torch.bincount(chosen.flatten(), minlength=MODEL.num_experts).cpu()
    rows = torch.randn(tokens * MODEL.top_k, MODEL.hidden, device="cuda", dtype=torch.bfloat16, generator=generator)
    weight = torch.rand(len(rows), device="cuda", generator=generator)
    fp8 = get_format("fp8_block")
    backends = {
        "kernels": Alignment(fp8, keep_operand=True),
        "block_recipe": Alignment(fp8, backend="transformer_engine"),
        "megatron_bf16": None,
    }
    figures, outputs = {}, {}
    for name, alignment in backends.items():
        experts = build_experts(alignment)
        leaf = rows.clone().requires_grad_()

        def forward(experts: nn.Module = experts, leaf: Tensor = leaf) -> Tensor:
            return experts(leaf, counts, weight)[0]

        def step(forward: Callable[[], Tensor] = forward) -> None:
            forward().backward(rows)

        with torch.no_grad():
            outputs[name] = forward()
            figures[f"{name}_forward_ms"] = milliseconds(forward, repeats)
        figures[f"{name}_step_ms"] = milliseconds(step, repeats)
        if alignment:
            figures[f"{name}_exact_db"] = decibels(outputs[name], unquantized(experts, rows, counts, weight))
    figures["block_recipe_kernels_db"] = decibels(outputs["block_recipe"], outputs["kernels"])
    return figures


def main() -> None:
    """Measure, print, and keep the figures as rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--results", type=Path, help="e.g. docs/results/megatron.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        with parallel(Layout()):
            figures = measure(arguments.tokens, arguments.repeats)
        dist.destroy_process_group()
    command = f"python tools/bench/block_recipe.py --tokens {arguments.tokens}"
    found = [Figure(name, value, name.rpartition("_")[2].replace("db", "dB"), "<=") for name, value in figures.items()]
    record_figures(arguments.results, found, command=command, **ran_on(1))


if __name__ == "__main__":
    main()
