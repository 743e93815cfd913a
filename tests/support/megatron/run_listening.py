"""A rank of a Megatron learner that writes into FOLDER/RANK where it listens: `... FOLDER`."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from qarl_nemo.train.megatron.ranks import end_ranks, start_ranks
from support.listening import listeners

if __name__ == "__main__":
    start_ranks(
        torch.device("cpu"),
        tensor_model_parallel_size=2,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
    )
    total = torch.ones(1)
    dist.all_reduce(total)
    found = {"sum": total.item(), "addresses": sorted({address for address, _ in listeners()})}
    (Path(sys.argv[1]) / os.environ["RANK"]).write_text(json.dumps(found))
    end_ranks()
