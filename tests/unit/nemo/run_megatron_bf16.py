"""The aligned Megatron model in BF16 on the kernels, on every layout of four GPUs, in every format.

Against one expert and tensor parallel rank, with its routes replayed, and, where it is published, the whole model.
`python run_megatron_bf16.py <folder> small|qwen3`
"""

import functools
import gc
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from format_cases import FORMATS
from megatron_compare import summary
from megatron_models import Layout, Shape, parallel
from megatron_ranks import run_ranks
from megatron_results import figures, training_error
from megatron_routes import Routes
from megatron_training import Case, reference, train_within

# isort: split
import megatron.core
import transformer_engine

from qarl_nemo.nemo.checks import ROW_SCALED

SMALL = Shape(hidden=256, inner=256, layers=4, head_dim=128, sequence=64, scale=1.0)
# Qwen3-30B-A3B's layers, two of them, over a small vocabulary.
QWEN3 = Shape(2048, 768, 128, 8, 2, 32, 4, 128, vocab=4000, padded_vocab=4096, sequence=1024, scale=1.0)
SHAPES = {"small": SMALL, "qwen3": QWEN3}
FIRST = "tp1_ep1"
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
RUNS: dict[str, tuple[Layout, dict[str, Any]]] = {
    FIRST: (Layout(), {}),
    "ep2": (Layout(ep=2), {}),
    "ep4": (Layout(ep=4), {}),
    "tp2_ep2": (Layout(tp=2, ep=2), {}),
    "tp2_ep2_etp2": (Layout(tp=2, ep=2, etp=2), {}),
    "pp2": (Layout(pp=2), {}),
    "pp2_ep2": (Layout(pp=2, ep=2), {}),
    "pp2_vpp2": (Layout(pp=2, vpp=2), {}),
    "cp2": (Layout(cp=2), {}),
    "cp2_ep4": (Layout(cp=2, ep=4), {}),
    "ep4_allgather": (Layout(ep=4), ALLGATHER),
    "tp2_ep2_etp2_allgather": (Layout(tp=2, ep=2, etp=2), ALLGATHER),
    "ep4_fused_accumulation": (Layout(ep=4), {"fused_accumulation": True}),
    "ep2_distributed_adam": (Layout(ep=2), {"optimizer": "adam"}),
    "ep2_muon": (Layout(ep=2), {"optimizer": "muon"}),
    "tp2_ep2_muon": (Layout(tp=2, ep=2), {"optimizer": "muon"}),
    "attention_ep2": (Layout(ep=2), {}),
    "attention_tp2_ep2": (Layout(tp=2, ep=2), {}),
}
# In these every format is tried, and Qwen3's layers; in the others two formats.
MAIN = (FIRST, "ep2", "ep4", "tp2_ep2", "tp2_ep2_etp2", "pp2", "cp2")


def _cases(shape: Shape, name: str, layout: Layout) -> dict[str, Case]:
    cut = max(layout.etp, layout.tp if "attention" in name else 1) > 1
    targets = ("experts", "attention") if "attention" in name else ("experts",)
    formats = FORMATS if shape is SMALL and name in MAIN else {key: FORMATS[key] for key in ("w4a16", "fp8_block")}
    return {
        key: Case(fmt, targets, dtype=torch.bfloat16, shape=shape)
        for key, fmt in formats.items()
        # A row that is cut has one scale, or, at 3 bits, words that are half full.
        if not cut or fmt.name not in (*ROW_SCALED, "w3a16")
    }


class Expected(dict):
    """What each case gives on one expert and tensor parallel rank, and publishes when it is whole; made once."""

    def __missing__(self, case: Case) -> dict[str, Any]:
        routes = Routes()
        with parallel(Layout()):
            result = train_within(Layout(), case, routes=routes)
        routes.share()
        self[case] = {
            "published": reference(case, backward=False)["published"],
            "loss": result["loss"],
            "grads": result["grads"],
            "routes": routes,
        }
        return self[case]


def _attempt(layout: Layout, case: Case, expected: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    # One layout that fails hides no other.
    try:
        found = summary(train_within(layout, case, routes=expected["routes"], **options), expected)
        # Megatron's models are cycles.
        gc.collect()
        return found
    except Exception:  # noqa: BLE001 whatever it was, it is told
        return {"error": traceback.format_exc()}


def everything(size: str) -> dict[str, Any]:
    """One rank's results."""
    shape, expected, layouts, start = SHAPES[size], Expected(), {}, time.monotonic()
    for name, (layout, options) in RUNS.items():
        if shape is QWEN3 and name not in MAIN:
            continue
        cases = _cases(shape, name, layout)
        for case in cases.values():
            expected[case]  # has groups of its own
        with parallel(layout):
            layouts[name] = {key: _attempt(layout, case, expected[case], options) for key, case in cases.items()}
        if dist.get_rank() == 0:
            errors = {key: one.get("error") or figures([one]) for key, one in layouts[name].items()}
            print(f"{time.monotonic() - start:6.1f} s  {len(layouts)}/{len(RUNS)}  {name}  {errors}", flush=True)
    right = _cases(shape, FIRST, Layout())["w4a16"]
    wrong = replace(right, mode="high_precision")
    with parallel(Layout()):
        wrong_mode = summary(train_within(Layout(), wrong, routes=expected[right]["routes"]), expected[right])
    versions = {"megatron-core": megatron.core.__version__, "transformer-engine": transformer_engine.__version__}
    return {"versions": versions, "layouts": layouts, "wrong_mode_error": training_error([wrong_mode])}


if __name__ == "__main__":
    run_ranks(sys.argv[1], functools.partial(everything, sys.argv[2]), seconds=500)
