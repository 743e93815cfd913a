"""A tiny aligned Megatron model in FP32 on every layout of four ranks, against the embedded engine's learner.

`python -m support.megatron.run_layouts <folder>`
"""

import sys
from dataclasses import replace
from typing import Any

from support.megatron.checkpoints import checkpoint_keys, reloaded
from support.megatron.compare import relative_error, same_bytes
from support.megatron.layers import dropped_caches, layer_cases, refused_publication, replayed_routes
from support.megatron.models import DENSE, TINY, Layout
from support.megatron.ranks import run_ranks
from support.megatron.training import Case, reference, train

# isort: split
import megatron.core

from qarl_nemo.megatron.alignment import Alignment

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
PLAIN, DEEP = Case(), Case(shape=replace(TINY, layers=4))
MLP = Case(targets=("attention", "mlp"), shape=DENSE)
HIGH_PRECISION, ATTENTION = Case(backward="high_precision"), Case(targets=("experts", "attention"))
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
    "ep2_selective_recompute": (Layout(ep=2), PLAIN, SELECTIVE_RECOMPUTE),
    "ep4_fused_accumulation": (Layout(ep=4), PLAIN, {"fused_accumulation": True}),
    "ep2_distributed_adam": (Layout(ep=2), PLAIN, {"optimizer": "adam"}),
    "ep2_overlapped_adam": (Layout(ep=2), PLAIN, {"optimizer": "adam", "overlap": True}),
    "high_precision": (Layout(ep=2), HIGH_PRECISION, {}),
    "attention_ep2": (Layout(ep=2), ATTENTION, {}),
    "attention_tp2_ep2": (Layout(tp=2, ep=2), ATTENTION, {}),
    "dense": (Layout(), MLP, {}),
    "dense_tp2": (Layout(tp=2), MLP, {}),
    "dense_pp2": (Layout(pp=2), MLP, {}),
}
LAST_EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


def everything() -> dict[str, Any]:
    """One rank's results."""
    references = {case: reference(case) for case in (PLAIN, DEEP, HIGH_PRECISION, ATTENTION, MLP)}
    right, wrong = (references[case]["grads"][LAST_EXPERTS] for case in (PLAIN, HIGH_PRECISION))
    moved = {
        "experts": (reloaded(Layout(tp=2, ep=2, etp=2), Layout(ep=4), Alignment(PLAIN.fmt)), PLAIN),
        "attention": (reloaded(Layout(ep=2), Layout(tp=2, ep=2), Alignment(PLAIN.fmt, ATTENTION.targets)), ATTENTION),
    }
    return {
        "versions": {"megatron-core": megatron.core.__version__},
        "layouts": {
            name: train(layout, case, references[case], **options) for name, (layout, case, options) in RUNS.items()
        },
        "expected_grads": {name: sorted(references[case]["grads"]) for name, (_, case, _) in RUNS.items()},
        "wrong_mode_error": relative_error(wrong, right),
        "layers": layer_cases(),
        "dropped_caches": dropped_caches(),
        "routes": replayed_routes(),
        "reloaded": {
            key: [
                name for name, tensor in references[case]["published"].items() if not same_bytes(tensors[name], tensor)
            ]
            for key, (tensors, case) in moved.items()
        },
        "refused": refused_publication(),
        "checkpoint_keys": checkpoint_keys(Layout(tp=2, ep=2, etp=2), Alignment(PLAIN.fmt, ATTENTION.targets)),
    }


if __name__ == "__main__":
    run_ranks(sys.argv[1], everything)
