"""One rank of a Megatron learner behind the embedded engine's loop: `... CONFIG.yaml [a.b=c ...]`.

A program of its own: Megatron on a CPU needs patches that no other test should meet.
"""

import contextlib
import faulthandler
import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    from support.megatron import on_cpu

# isort: split
from qarl_nemo.config import load_config
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.megatron.launch import train_this_rank

if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A rank that waits for one that failed would wait for ever: say where, and end.
    faulthandler.dump_traceback_later(1800, exit=True)
    with contextlib.nullcontext() if torch.cuda.is_available() else on_cpu.CudaMeansCpu():
        train_this_rank(load_config(Path(sys.argv[1]), sys.argv[2:], LocalConfig))
