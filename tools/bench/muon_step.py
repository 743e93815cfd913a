"""Time a Muon step of one rank's experts: Megatron's, one matrix after the other, and the same in stacks.

    python tools/bench/muon_step.py --experts 16 --layers 48 --record docs/results/megatron.json

Defaults are a rank of Qwen3-30B-A3B on eight GPUs. Masters, gradients and momentum are FP32 and random. PYTHONPATH
needs Megatron-core 0.20 and emerging-optimizers.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from torch import Tensor, nn

from qarl_nemo.megatron.stacked_muon import stack_muon
from qarl_nemo.metrics.machine import facts
from qarl_nemo.metrics.results import Figure, record_figures, running_command
from qarl_nemo.muon import MEGATRON, MEGATRONS_PACKAGE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_SETTINGS = {key.removeprefix("muon_"): value for key, value in MEGATRON.items() if key.startswith("muon_")}
_RULE = {key: value for key, value in _SETTINGS.items() if key not in ("scalar_optimizer", "split_qkv")}


def experts(options: argparse.Namespace) -> list[nn.Parameter]:
    """Return the experts' matrices, the same ones at every call."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(2 * options.inner, options.hidden), (options.hidden, options.inner)]
    return [
        nn.Parameter(0.02 * torch.randn(shape, device=DEVICE, generator=generator))
        for _ in range(options.layers)
        for shape in shapes
        for _ in range(options.experts)
    ]


def step_of(matrices: list[nn.Parameter], *, stacked: bool) -> Callable[[], None]:
    """Return an optimizer's step; RuntimeError where it would take no stacks but should."""
    optimizer = TensorParallelMuon(matrices, lr=1e-3, **_RULE)
    if stacked and not stack_muon(SimpleNamespace(optimizer=optimizer)):
        raise RuntimeError(
            "this emerging-optimizers takes no stacks, so that there is nothing to compare; pip install "
            f"{MEGATRONS_PACKAGE}"
        )
    return optimizer.step


def give_gradients(matrices: list[nn.Parameter]) -> None:
    """Draw gradients, the same ones at every call."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    for one in matrices:
        one.grad = torch.randn(one.shape, device=DEVICE, generator=generator)


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Return a step's seconds, and the GiB that it allocated beside what it found."""
    found = _allocated()
    _synchronize()
    started = time.perf_counter()
    step()
    _synchronize()
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return seconds, max(0, peak - found) / 2**30


def measure(options: argparse.Namespace, *, stacked: bool) -> tuple[float, float, list[Tensor]]:
    """Return the median seconds of a step, the GiB that it takes, and the matrices after the first one."""
    matrices = experts(options)
    step, found = step_of(matrices, stacked=stacked), []
    give_gradients(matrices)
    step()
    # On the host, so that both ways have the same memory.
    after = [one.detach().cpu() for one in matrices[: 2 * options.experts]]
    for _ in range(options.repeats):
        give_gradients(matrices)
        found.append(timed(step))
    seconds, gib = zip(*found, strict=True)
    return statistics.median(seconds), max(gib), after


def figures(options: argparse.Namespace) -> list[Figure]:
    """Measure both ways."""
    start = [one.detach().cpu() for one in experts(options)[: 2 * options.experts]]
    one_s, one_gib, expected = measure(options, stacked=False)
    all_s, all_gib, found = measure(options, stacked=True)
    difference = max(
        float((mine - wanted).norm() / (wanted - before).norm())
        for mine, wanted, before in zip(found, expected, start, strict=True)
    )
    return [
        Figure("muon_step_s_single", one_s, "s", "<="),
        Figure("muon_step_s_stacked", all_s, "s", "<="),
        Figure("muon_step_ratio", all_s / one_s, "", "<="),
        Figure("muon_step_gib_single", one_gib, "GiB", "<="),
        Figure("muon_step_gib_stacked", all_gib, "GiB", "<="),
        # BF16's last bits, five iterations long.
        Figure("muon_step_difference", difference, "", "<=", 0.02),
    ]


def _allocated() -> int:
    if DEVICE == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=16, help="experts of a layer that the rank holds")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", type=Path, help="results file that receives the figures")
    options = parser.parse_args()
    packages = ["megatron-core", "emerging-optimizers"]
    command = running_command("python tools/bench/muon_step.py", "--record")
    record_figures(options.record, figures(options), command=command, **facts(DEVICE, packages=packages))


if __name__ == "__main__":
    main()
