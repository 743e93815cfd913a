"""A tiny aligned Megatron model on every layout of four ranks; what each gave goes to files, for the tests.

A program of its own: Megatron on a CPU needs patches that no other test should meet, and ranks are processes.
Four GPUs and Transformer-Engine, or a CPU: `python run_megatron.py <folder>`
"""

import contextlib
import faulthandler
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron_checkpoints import checkpoint_keys
from megatron_layers import dropped_caches, layer_cases, refused_publication, replayed_routes
from megatron_models import ON_GPU, TINY, Layout
from megatron_training import Case, reference, train

# isort: split
import megatron.core

from qarl_nemo.nemo.alignment import Alignment

if not ON_GPU:
    import megatron_on_cpu

WORLD = 4
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PLAIN, DEEP = Case(), Case(shape=replace(TINY, layers=4))
HIGH_PRECISION, ATTENTION = Case(mode="high_precision"), Case(targets=("experts", "attention"))
RUNS = {
    "tp1_ep1": (Layout(), PLAIN, {}),
    "ep2": (Layout(ep=2), PLAIN, {}),
    "ep4": (Layout(ep=4), PLAIN, {}),
    "tp2_ep2": (Layout(tp=2, ep=2), PLAIN, {}),
    "tp2_ep2_etp2": (Layout(tp=2, ep=2, etp=2), PLAIN, {}),
    "pp2": (Layout(pp=2), PLAIN, {}),
    "pp2_ep2": (Layout(pp=2, ep=2), PLAIN, {}),
    "pp2_vpp2": (Layout(pp=2, vpp=2), DEEP, {}),
    "ep2_allgather": (Layout(ep=2), PLAIN, {"moe_token_dispatcher_type": "allgather"}),
    "tp2_ep2_etp2_allgather": (Layout(tp=2, ep=2, etp=2), PLAIN, {"moe_token_dispatcher_type": "allgather"}),
    "ep2_full_recompute": (Layout(ep=2), PLAIN, FULL_RECOMPUTE),
    "ep2_selective_recompute": (
        Layout(ep=2),
        PLAIN,
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ),
    "ep4_fused_accumulation": (Layout(ep=4), PLAIN, {"fused_accumulation": True}),
    "ep2_distributed_adam": (Layout(ep=2), PLAIN, {"optimizer": "adam"}),
    "high_precision": (Layout(ep=2), HIGH_PRECISION, {}),
    "attention_ep2": (Layout(ep=2), ATTENTION, {}),
    "attention_tp2_ep2": (Layout(tp=2, ep=2), ATTENTION, {}),
}


def rank_main(rank: int, folder: str) -> None:
    """Everything on one rank; each rank's results are kept, since stages hold different layers."""
    # A rank that waits for one that failed would wait for minutes: say where, and end.
    faulthandler.dump_traceback_later(240, exit=True)
    if ON_GPU:
        torch.cuda.set_device(rank)
    backend = "nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    with contextlib.nullcontext() if ON_GPU else megatron_on_cpu.CudaMeansCpu():
        cases = {case: reference(case) for _, case, _ in RUNS.values()}
        results = {"reference": {name: cases[case] for name, (_, case, _) in RUNS.items()}}
        results["versions"] = {"megatron-core": megatron.core.__version__}
        results["layouts"] = {name: train(layout, case, **options) for name, (layout, case, options) in RUNS.items()}
        results["layers"] = layer_cases()
        results["dropped_caches"] = dropped_caches()
        results["routes"] = replayed_routes()
        results["refused"] = refused_publication()
        results["checkpoint_keys"] = checkpoint_keys(Layout(tp=2, ep=2, etp=2), Alignment(PLAIN.fmt, ATTENTION.targets))
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: str) -> None:
    """Write each rank's results."""
    torch.set_num_threads(1)
    # Forked where that is possible: Megatron is imported once.
    mp.start_processes(rank_main, args=(folder,), nprocs=WORLD, start_method="spawn" if ON_GPU else "fork")


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(sys.argv[1])
