"""Bridge's optimizer with update-aware rates, as NeMo-RL's worker builds it: `... FOLDER` writes FOLDER/groups.json."""

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    from support.megatron import on_cpu

from support.megatron.models import ON_GPU, Layout, megatron_model, parallel

# isort: split
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from qarl_kernels import get_format
from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.nemo_rl.update_aware import update_aware_optimizer

TARGETS = ("experts", "attention")
LR, LEAST_LR, DECAY = 1e-3, 1e-4, 0.1


def setup_optimizer(
    optimizer_config: OptimizerConfig, model: list[torch.nn.Module], optimizer_config_override_provider: Any = None
) -> tuple[Any, OptimizerParamScheduler]:
    """What Bridge's function of this name does with its arguments."""
    overrides = get_standard_config_overrides(optimizer_config)
    if optimizer_config_override_provider is not None:
        overrides = optimizer_config_override_provider.build_config_overrides(None)
    optimizer = get_megatron_optimizer(optimizer_config, model, config_overrides=overrides)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR,
        min_lr=LEAST_LR,
        lr_warmup_steps=2,
        lr_decay_steps=10,
        lr_decay_style="linear",
        start_wd=DECAY,
        end_wd=DECAY,
        wd_incr_steps=10,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def groups(scale: float | None, steps: int) -> dict[str, list[float]]:
    """Every parameter's learning rate and weight decay after so many steps of the scheduler."""
    model = megatron_model(Layout(), Alignment(get_format("w4a16", group_size=32), TARGETS))
    chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    module = SimpleNamespace(setup_optimizer=setup_optimizer)
    config = OptimizerConfig(optimizer="adam", lr=LR, min_lr=LEAST_LR, weight_decay=DECAY)
    with update_aware_optimizer(module, scale, TARGETS):
        optimizer, scheduler = module.setup_optimizer(optimizer_config=config, model=[chunk])
    assert module.setup_optimizer is setup_optimizer
    scheduler.step(increment=steps)
    names = {id(parameter): name for name, parameter in chunk.named_parameters()}
    return {
        names[id(parameter)]: [group["lr"], group["weight_decay"]]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def main(folder: str) -> None:
    """Write the groups with and without a scale, in the warm-up and after it."""
    dist.init_process_group("nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    with parallel(Layout()), contextlib.nullcontext() if ON_GPU else on_cpu.CudaMeansCpu():
        found = {f"{scale} {steps}": groups(scale, steps) for scale in (None, 1.5) for steps in (1, 6)}
    (Path(folder) / "groups.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
