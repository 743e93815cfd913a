"""Muon's steps on layouts of four ranks on a CPU: Megatron's own, in stacks, and with shards that are taken for whole.

`python -m support.megatron.run_muon <folder>`
"""

import sys
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from support.megatron.compare import relative_error
from support.megatron.models import Layout, parallel
from support.megatron.ranks import run_ranks
from support.megatron.training import Case, build, forward_backward

# isort: split
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

from qarl_nemo.megatron import stacked_muon
from qarl_nemo.megatron.param_groups import inner_optimizers
from qarl_nemo.muon import MEGATRON

LAYOUTS = {
    "tp2": Layout(tp=2),
    "ep2": Layout(ep=2),
    "tp2_ep2": Layout(tp=2, ep=2),
    "tp2_ep2_etp2": Layout(tp=2, ep=2, etp=2),
}
# As the embedded engine and as NeMo-RL make them: FP32 masters of BF16 weights need marks of their own.
OPTIMIZERS = {"muon": torch.float32, "dist_muon": torch.bfloat16}
# gloo gathers shards of one size only.
LayerWiseDistributedOptimizer.allgather_params = LayerWiseDistributedOptimizer.broadcast_params


def _is_no_qkv(muon: Any, matrix: Tensor) -> bool:
    return not muon.is_qkv_fn(matrix)


def stepped(layout: Layout, name: str, *, stacked: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[bool]]:
    """Weights before and after two steps, and for each of this rank's matrices whether it is in a stack."""
    dtype = OPTIMIZERS[name]
    (model,), _ = build(layout, Case(dtype=dtype), name, fused_accumulation=False, overlap=False)
    settings = {"optimizer": name, "lr": 0.05, "bf16": dtype == torch.bfloat16, "params_dtype": dtype, "clip_grad": 0.0}
    optimizer = get_megatron_optimizer(OptimizerConfig(**MEGATRON | settings), [model])
    count = stacked_muon.stack_muon(optimizer) if stacked else 0
    start = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    forward_backward([model])
    for _ in range(2):
        optimizer.step()
    muons = [one for one in inner_optimizers(optimizer) if hasattr(one, "tp_mode")]
    whole = [
        stacked_muon._is_whole(one, matrix) for one in muons for group in one.param_groups for matrix in group["params"]
    ]
    assert count == (sum(whole) if stacked else 0)
    return start, dict(model.named_parameters()), whole


def compared(layout: Layout, name: str) -> dict[str, Any]:
    """The largest difference of a weight's change from Megatron's own, with right and with wrong stacks."""
    start, expected, _ = stepped(layout, name, stacked=False)

    def apart(found: dict[str, Tensor]) -> float:
        return max(relative_error(found[key] - start[key], expected[key] - start[key]) for key in start)

    _, found, whole = stepped(layout, name, stacked=True)
    with patch.object(stacked_muon, "_is_whole", _is_no_qkv):
        _, wrong, _ = stepped(layout, name, stacked=True)
    return {"difference": apart(found), "wrong": apart(wrong), "whole": whole}


def everything() -> dict[str, dict[str, Any]]:
    """One rank's results."""
    results = {}
    for place, layout in LAYOUTS.items():
        for name in OPTIMIZERS:
            with parallel(layout):
                results[f"{place}_{name}"] = compared(layout, name)
    return results


if __name__ == "__main__":
    run_ranks(sys.argv[1], everything)
