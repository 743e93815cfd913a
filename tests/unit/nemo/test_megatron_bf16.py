"""The Megatron learner on four GPUs: every layout trains and publishes the same, in every format.

Set QARL_MEGATRON_RESULTS to a file to keep the figures as rows of docs/results.
"""

import importlib.util

import pytest
import torch
from megatron_results import figures, keep_figures, run_program, training_error, wrong_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer-Engine"),
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
]

# Relative, routes equal: where each layer's output has the same bits, only weight gradients are other sums.
SAME_FORWARD = 0.01
# Where linear_proj or fc2 is a sum over ranks, or attention over parts, its last bit differs, and an FP8 code by 2^-4.
OTHER_SUMS = 0.3


def bound(layout):
    """Return how far a layout's gradients may be from those of one rank."""
    return OTHER_SUMS if "tp2" in layout or "cp2" in layout else SAME_FORWARD


@pytest.mark.parametrize(
    ("group", "suffix"),
    [("formats", "_h200"), ("settings", "_h200"), ("packed", "_h200"), ("qwen3", "_qwen3_h200")],
)
def test_every_layout_trains_and_publishes_the_same(group, suffix, tmp_path):
    ranks = run_program("run_megatron_bf16.py", tmp_path, group)
    # By layout and format, what each rank found.
    found = {
        (name, key): [rank["layouts"][name][key] for rank in ranks]
        for name, cases in ranks[0]["layouts"].items()
        for key in cases
    }
    failed = {run: one["error"] for run, summaries in found.items() for one in summaries if "error" in one}
    layouts = {name for name, _ in found} - {name for name, _ in failed}
    # Of all formats the worst.
    kept = {
        layout: figures([one for (name, _), summaries in found.items() if name == layout for one in summaries])
        for layout in sorted(layouts)
    }
    goals = {layout: bound(layout) for layout in kept}
    keep_figures(ranks, kept, suffix, goals, "tests/unit/nemo/test_megatron_bf16.py")
    assert failed == {}
    wrong = {run: wrong_tensors(summaries) for run, summaries in found.items()}
    assert {run: tensors for run, tensors in wrong.items() if tensors} == {}
    errors = {run: training_error(summaries) for run, summaries in found.items()}
    assert {run: error for run, error in errors.items() if error >= bound(run[0])} == {}
    # The comparison would see the wrong backward weight.
    assert all(rank["wrong_mode_error"] > 2 * SAME_FORWARD for rank in ranks)
