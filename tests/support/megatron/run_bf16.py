"""The aligned Megatron model in BF16 on the kernels, on layouts of four GPUs.

Against one expert and tensor parallel rank, with its routes replayed, and, where it is published, the whole model.
`python -m support.megatron.run_bf16 <folder> formats|settings|packed|qwen3`
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

from support.formats import FORMATS
from support.megatron.models import Layout, Shape, parallel
from support.megatron.ranks import run_ranks
from support.megatron.results import bf16_bound, figures, keep_figures, training_error
from support.megatron.training import Case, record, train_within

# isort: split
import megatron.core
import transformer_engine

SMALL = Shape(hidden=256, inner=256, head_dim=128, sequence=64, scale=1.0)
DEEP = replace(SMALL, layers=4)
# Qwen3-30B-A3B's layers, two of them, over a small vocabulary.
QWEN3 = Shape(2048, 768, 128, 8, 2, 32, 4, 128, vocab=4000, padded_vocab=4096, sequence=1024, scale=1.0)
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
Runs = dict[str, tuple[Layout, dict[str, Any]]]
LAYOUTS: Runs = {
    "tp1_ep1": (Layout(), {}),
    "ep2": (Layout(ep=2), {}),
    "ep4": (Layout(ep=4), {}),
    "tp2_ep2": (Layout(tp=2, ep=2), {}),
    "tp2_ep2_etp2": (Layout(tp=2, ep=2, etp=2), {}),
    "pp2": (Layout(pp=2), {}),
    "cp2": (Layout(cp=2), {}),
}
SETTINGS: Runs = {
    "pp2_ep2": (Layout(pp=2, ep=2), {}),
    "pp2_vpp2": (Layout(pp=2, vpp=2), {}),
    "cp2_ep4": (Layout(cp=2, ep=4), {}),
    "ep4_allgather": (Layout(ep=4), ALLGATHER),
    "tp2_ep2_etp2_allgather": (Layout(tp=2, ep=2, etp=2), ALLGATHER),
    "ep4_fused_accumulation": (Layout(ep=4), {"fused_accumulation": True}),
    "ep2_distributed_adam": (Layout(ep=2), {"optimizer": "adam"}),
    "ep2_overlapped_adam": (Layout(ep=2), {"optimizer": "adam", "overlap": True}),
    "ep2_muon": (Layout(ep=2), {"optimizer": "muon"}),
    "tp2_ep2_muon": (Layout(tp=2, ep=2), {"optimizer": "muon"}),
    "attention_ep2": (Layout(ep=2), {}),
    "attention_tp2_ep2": (Layout(tp=2, ep=2), {}),
}
PACKED: Runs = {
    "packed_ep4": (Layout(ep=4), {}),
    "packed_tp2_ep2": (Layout(tp=2, ep=2), {}),
    "packed_cp2_ep2": (Layout(cp=2, ep=2), {}),
}
TWO = ("w4a16", "fp8_block")
# What is run: layouts, the model's shape, and formats.
GROUPS = {
    "formats": (LAYOUTS, SMALL, tuple(FORMATS)),
    "settings": (SETTINGS, SMALL, TWO),
    "packed": (PACKED, SMALL, TWO),
    "qwen3": (LAYOUTS, QWEN3, TWO),
}


def _cases(name: str, layout: Layout, shape: Shape, formats: tuple[str, ...]) -> dict[str, Case]:
    cut = max(layout.etp, layout.tp if "attention" in name else 1) > 1
    targets = ("experts", "attention") if "attention" in name else ("experts",)
    like = Case(targets=targets, dtype=torch.bfloat16, shape=DEEP if layout.vpp else shape)
    return {
        key: replace(like, fmt=FORMATS[key], documents=2 if "packed" in name else 1)
        for key in formats
        # A row or a weight that is cut has one scale; at 3 bits, words are half full.
        if not cut or not (FORMATS[key].row_scaled or FORMATS[key].tensor_scaled or FORMATS[key].num_bits == 3)
    }


def _attempt(layout: Layout, case: Case, expected: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    # A layout that fails must not hide the others' results.
    try:
        found = train_within(layout, case, expected, **options)
    except Exception:  # noqa: BLE001 whatever it was, it is told
        found = {"error": traceback.format_exc()}
    # Megatron's models contain reference cycles.
    gc.collect()
    torch.cuda.empty_cache()
    return found


def _keep(name: str, found: dict[str, dict[str, Any]], suffix: str) -> None:
    """Keep a layout's figures, the worst of all ranks and formats, before the next one runs."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    summaries = [one for rank in everyone for one in rank.values()]
    if dist.get_rank() == 0 and not any("error" in one for one in summaries):
        kept = figures(summaries)
        print(f"{name}: {kept}", flush=True)
        engines = {"megatron-core": megatron.core.__version__, "transformer-engine": transformer_engine.__version__}
        command = "tests/unit/megatron/test_megatron_bf16.py"
        keep_figures({name: kept}, suffix, {name: bf16_bound(name)}, engines, command)


def everything(group: str) -> dict[str, Any]:
    """One rank's results."""
    runs, shape, formats = GROUPS[group]
    start, layouts = time.monotonic(), {}
    cases = {name: _cases(name, layout, shape, formats) for name, (layout, _) in runs.items()}
    with parallel(Layout()):
        expected = {
            case: record(case) for case in dict.fromkeys(case for each in cases.values() for case in each.values())
        }
        right = next(iter(expected))
        wrong_mode = _attempt(Layout(), replace(right, backward="high_precision"), expected[right], {})
    for name, (layout, options) in runs.items():
        with parallel(layout):
            layouts[name] = {key: _attempt(layout, case, expected[case], options) for key, case in cases[name].items()}
        _keep(name, layouts[name], "_qwen3_h200" if group == "qwen3" else "_h200")
        if dist.get_rank() == 0:
            print(f"{time.monotonic() - start:6.1f} s  {len(layouts)}/{len(runs)}  {name}", flush=True)
    return {"layouts": layouts, "wrong_mode_error": training_error([wrong_mode])}


if __name__ == "__main__":
    run_ranks(sys.argv[1], functools.partial(everything, sys.argv[2]))
