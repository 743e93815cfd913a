"""The Megatron learner in FP32: equal to the embedded engine's on every layout, published from its shards.

Set QARL_MEGATRON_RESULTS to a file to keep the figures as rows of docs/results.
"""

import re

import pytest
import torch

from support.formats import FORMATS
from support.megatron.results import figures, keep_figures, run_ranks_of, training_error, wrong_tensors
from support.needs import FOUR_GPUS_OR_NONE, MEGATRON

pytestmark = [pytest.mark.slow, MEGATRON, FOUR_GPUS_OR_NONE]

REFUSED = [
    "rank 2",
    "model.layers.0.self_attn.o_proj",
    "model.layers.0.self_attn.qkv_proj",
    "model.layers.1.mlp.experts.down_proj",
    "embedding.word_embeddings.weight",
    "decoder.layers.1.mlp.router.weight",
]
LAST_EXPERTS = "model.layers.1.mlp.experts"
SUMS_DIFFER = 2e-5  # relative, in FP32: other orders of the same sums


# One test: of several, each worker that gets one would start its own ranks.
def test_megatron_learner(tmp_path):
    ranks = run_ranks_of("run_layouts", tmp_path)
    layouts = {name: compared(name, [rank["layouts"][name] for rank in ranks]) for name in ranks[0]["layouts"]}
    assert len(layouts) == 21
    suffix = "_fp32_h200" if torch.cuda.is_available() else ""
    kept = {name: figures(summaries) for name, summaries in layouts.items()}
    keep_figures(
        kept, suffix, dict.fromkeys(kept, SUMS_DIFFER), ranks[0]["versions"], "tests/unit/megatron/test_megatron.py"
    )
    errors = {name: training_error(summaries) for name, summaries in layouts.items()}
    assert {name: error for name, error in errors.items() if error >= SUMS_DIFFER} == {}
    wrong = {name: wrong_tensors(summaries) for name, summaries in layouts.items()}
    assert {name: tensors for name, tensors in wrong.items() if tensors} == {}
    assert {name for name, summaries in layouts.items() if any(one["stale"] for one in summaries)} == set()
    check_all_gradients_are_compared(ranks)
    for rank in ranks:
        # The comparison would see the wrong backward weight.
        assert rank["wrong_mode_error"] > 100 * SUMS_DIFFER
        check_layers(rank["layers"])
        check_routes(rank["routes"])
        assert rank["reloaded"] == {"experts": [], "attention": []}
        assert rank["dropped_caches"] == (2, 0)
        assert re.findall(r"(rank \d|(?:model|decoder|embedding)[\w.]+)", rank["refused"]) == REFUSED
        aligned, plain = rank["checkpoint_keys"]
        assert aligned == plain


def compared(name, summaries):
    """What can be compared: with masters in the backward, the gradients of the last layer's experts."""
    if name != "high_precision":
        return summaries
    # The router's gradient comes through fc2's backward weight here, through its forward weight there.
    return [
        one | {"grad_errors": {key: error for key, error in one["grad_errors"].items() if key.startswith(LAST_EXPERTS)}}
        for one in summaries
    ]


def check_all_gradients_are_compared(ranks):
    for name, expected in ranks[0]["expected_grads"].items():
        errors = [rank["layouts"][name]["grad_errors"] for rank in ranks]
        if None not in errors:
            assert set().union(*errors) == {key for key in expected if ".layers." in key}, name


def check_layers(cases):
    """In every format a layer gives the embedded engine's bits, wherever its experts live."""
    assert len(cases) == len(FORMATS) * 2 * 3
    for key, case in cases.items():
        assert case["same_bits"], key
        bound = SUMS_DIFFER if "float32" in key else 0.02
        for part, error in case["errors"].items():
            assert error < bound, f"{key}: {part}"


def check_routes(routes):
    """Recorded choices are the embedded engine's, and replayed ones give its output, in recomputation too."""
    assert routes["recorded"]
    assert torch.equal(routes["replayed"], routes["expected"])
    assert torch.equal(routes["again"], routes["expected"])
    assert not torch.equal(routes["own"], routes["expected"])
