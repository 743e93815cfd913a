"""Two data-parallel ranks step a small guarded model, one of them with gradients that are not finite: `... FOLDER`.

A program of its own, because it replaces what Megatron needs a GPU for. Each rank writes facts<rank>.json.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from support.megatron import on_cpu

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from qarl_nemo.losses.nonfinite import NonFinite
from qarl_nemo.megatron.step_guard import StepGuard


def rank_facts(rank: int, folder: str) -> None:
    """Run one rank as on a GPU."""
    with on_cpu.CudaMeansCpu():
        write_facts(rank, folder)


def write_facts(rank: int, folder: str) -> None:
    """Step with good and with broken gradients, and write what happened."""
    store = f"file://{folder}/store"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    checked = DistributedDataParallelConfig(check_for_nan_in_grad=True)
    model = DistributedDataParallel(config, checked, torch.nn.Linear(8, 8))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=1.0), [model])

    def step(factor: float) -> tuple[bool, float]:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        (model(torch.ones(2, 8)) * factor).sum().backward()
        finalize_model_grads([model])
        stepped, norm, _ = optimizer.step()
        return stepped, norm

    def weight() -> list[float]:
        return model.module.weight.detach().flatten().tolist()

    # Both ranks do this, because a rank that Megatron ends would leave the other waiting.
    without = type(error_of(lambda: step(math.nan))).__name__
    dist.barrier()
    guard = StepGuard([model], optimizer, limit=3)
    facts = {"without": without, "start": weight(), "steps": [], "norms": [], "weights": [], "in_a_row": []}
    prepared = count_preparations(optimizer)
    for factor in (1.0, math.nan, 1.0, math.nan, math.inf):
        broken = not math.isfinite(factor)
        # Only the second rank holds the response that is at fault.
        guard.nonfinite = [NonFinite(17, 5, "prev_logprobs", factor)] if broken and rank else []
        stepped, norm = step(factor if rank else 1.0)
        facts["steps"].append(stepped)
        facts["norms"].append(norm)
        facts["weights"].append(weight())
        facts["in_a_row"].append(guard.skipped_in_a_row)
    facts["prepared"] = len(prepared)
    guard.nonfinite = []
    facts["error"] = str(error_of(lambda: step(math.nan if rank else 1.0)))
    facts["num_skipped"] = guard.num_skipped
    facts["own"] = own_skips(optimizer, guard, lambda: step(1.0)[0])
    facts["norms_by_group"] = skip_for_causes(optimizer, guard, lambda factor: step(factor)[0])
    Path(folder, f"facts{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


def error_of(step: Callable[[], object]) -> RuntimeError | None:
    """Return what a step raises, if it does."""
    try:
        step()
    except RuntimeError as error:
        return error
    return None


def own_skips(optimizer: Any, guard: StepGuard, step: Callable[[], bool]) -> list[tuple[bool, int]]:
    """Step, skip as Megatron does above a norm, which one rank alone has parameters for, and step again."""
    outcomes = []
    for skips in (False, True, False):
        if skips and dist.get_rank():
            # Older releases have no such norm.
            optimizer.step_with_ready_grads = lambda: False
        outcomes.append((step(), guard.skipped_in_a_row))
        vars(optimizer).pop("step_with_ready_grads", None)
    return outcomes


def skip_for_causes(optimizer: Any, guard: StepGuard, step: Callable[[float], bool]) -> dict[str, float]:
    """Skip a step that two ranks found causes of, one with none, and one after a step that was applied all the same.

    Returns:
        The norms by group that the first of them left.
    """
    optimizer.grad_norms_by_group = {"of the step before": 1.0}
    # The first response is the last one that the last rank found.
    last, first = ((9, 4), (3, 0))[dist.get_rank()]
    guard.nonfinite = [NonFinite(last, 1, "prev_logprobs", math.nan), NonFinite(first, 7, "advantages", math.inf)]
    step(math.nan)
    norms = optimizer.grad_norms_by_group
    step(math.nan)
    guard.nonfinite.append(NonFinite(5, 1, "prev_logprobs", math.nan))
    step(1.0)
    step(math.nan)
    return norms


def count_preparations(optimizer: Any) -> list[None]:
    """Return a list that grows whenever gradients are prepared."""
    counted = []
    for inner in optimizer.chained_optimizers:
        prepare = inner.prepare_grads
        inner.prepare_grads = lambda prepare=prepare: (counted.append(None), prepare())[1]
    return counted


if __name__ == "__main__":
    # Forked, so that Megatron is imported once.
    mp.start_processes(rank_facts, args=(sys.argv[1],), nprocs=2, start_method="fork")
