"""Four ranks, processes of their own: on four GPUs with Transformer-Engine, or on a CPU; results go to files.

Megatron on a CPU needs patches that no other test should meet.
"""

import contextlib
import faulthandler
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from support.megatron.models import ON_GPU

if not ON_GPU:
    from support.megatron import on_cpu

WORLD = 4
# Under `run_program`'s limit, so that each rank says where it waits.
PATIENCE_S = 800


def _rank_main(rank: int, folder: str, work: Callable[[], Any]) -> None:
    # A rank that waits for one that has failed would wait for minutes: print where it waits, and end.
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    if ON_GPU:
        torch.cuda.set_device(rank)
    backend = "nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    with contextlib.nullcontext() if ON_GPU else on_cpu.CudaMeansCpu():
        results = work()
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(folder: str, work: Callable[[], Any]) -> None:
    """Write each rank's `work()` to `folder`; all are kept, since stages hold different layers."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # Forked where that is possible: Megatron is imported once.
    start = "spawn" if ON_GPU else "fork"
    mp.start_processes(_rank_main, args=(folder, work), nprocs=WORLD, start_method=start)
