"""The Megatron learner on four GPUs: every layout trains and publishes the same, in every format.

Set QARL_MEGATRON_RESULTS to a file to keep a layout's figures, once measured, as rows of docs/results.
"""

import pytest
import torch

from support.megatron.results import SAME_FORWARD, bf16_bound, run_ranks_of, training_error, wrong_tensors
from support.needs import TRANSFORMER_ENGINE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    TRANSFORMER_ENGINE,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
]


@pytest.mark.parametrize("group", ["formats", "settings", "packed", "qwen3"])
def test_every_layout_trains_and_publishes_the_same(group, tmp_path):
    ranks = run_ranks_of("run_bf16", tmp_path, group)
    # By layout and format, what each rank found.
    found = {
        (name, key): [rank["layouts"][name][key] for rank in ranks]
        for name, cases in ranks[0]["layouts"].items()
        for key in cases
    }
    assert {run: one["error"] for run, summaries in found.items() for one in summaries if "error" in one} == {}
    wrong = {run: wrong_tensors(summaries) for run, summaries in found.items()}
    assert {run: tensors for run, tensors in wrong.items() if tensors} == {}
    errors = {run: training_error(summaries) for run, summaries in found.items()}
    assert {run: error for run, error in errors.items() if error >= bf16_bound(run[0])} == {}
    # The comparison would see the wrong backward weight.
    assert all(rank["wrong_mode_error"] > 2 * SAME_FORWARD for rank in ranks)
