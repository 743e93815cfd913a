"""Train a small BF16 model with Megatron's optimizers, whose tensors leave or are gathered, and without: `... FOLDER`.

A program of its own, because it replaces what Megatron needs a GPU for. It writes facts.json.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from support.megatron import on_cpu

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from qarl_nemo.megatron.offload import Offload, optimizer_tensors, reload_for_update
from qarl_nemo.megatron.step_guard import StepGuard

BF16 = {"bf16": True, "params_dtype": torch.bfloat16}


def trained(*, distributed: bool, moves: str = "") -> tuple[list[float], list[int]]:
    """Return the weights after three guarded steps, and how many tensors were away, or in one piece, before each."""
    torch.manual_seed(0)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **BF16)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, settings, torch.nn.Linear(64, 64).bfloat16())
    options = {"optimizer": "adam", "lr": 0.1, "clip_grad": 1.0, "use_distributed_optimizer": distributed}
    optimizer = get_megatron_optimizer(OptimizerConfig(**options, **BF16), [model])
    carrier, carried = Offload(2**12), []
    if moves == "leaves":
        reload_for_update(optimizer, carrier)
    StepGuard([model], optimizer, limit=3)
    for step in range(3):
        tensors = optimizer_tensors(optimizer, model)
        if moves == "leaves":
            for tensor in tensors:
                tensor.grad = None
            carrier.start_offload(tensors)
            carrier.finish_offload()
            carried.append(sum(tensor.untyped_storage().nbytes() == 0 for tensor in tensors))
        elif moves == "gathers":
            carrier.gather(tensors, 2**20)
            carried.append(len(tensors) if len({t.untyped_storage().data_ptr() for t in tensors}) == 1 else 0)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        (model(torch.ones(2, 64).bfloat16()) * (step + 1)).float().square().sum().backward()
        finalize_model_grads([model])
        optimizer.step()
    return model.module.weight.detach().flatten().tolist(), carried


def main() -> None:
    """Train each way, and write what came out."""
    folder = Path(sys.argv[1])
    facts = {}
    with on_cpu.CudaMeansCpu():
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        for kind, distributed in (("whole", False), ("distributed", True)):
            expected, _ = trained(distributed=distributed)
            for moves in ("leaves", "gathers"):
                weights, carried = trained(distributed=distributed, moves=moves)
                facts[f"{kind} {moves}"] = {"same": weights == expected, "carried": carried}
    (folder / "facts.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
