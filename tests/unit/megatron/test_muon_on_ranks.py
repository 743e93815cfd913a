"""Muon's steps in stacks are Megatron's own where tensor-parallel and expert-parallel ranks share a model."""

from importlib.util import find_spec

import pytest
import torch

from support.needs import MEGATRON
from support.programs import run_program

pytestmark = [
    pytest.mark.slow,
    MEGATRON,
    pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="needs Emerging-Optimizers, and Python 3.12"),
]

RANKS = 4


# One test: of several, each worker that gets one would start its own ranks.
def test_ranks_step_in_stacks_as_megatron_steps(tmp_path):
    run_program("megatron.run_muon", tmp_path, CUDA_VISIBLE_DEVICES="")
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(RANKS)]
    assert len(ranks[0]) == 8
    for name in ranks[0]:
        found = [rank[name] for rank in ranks]
        assert sum(sum(one["whole"]) for one in found) > 0, name
        # BF16's last bits, five iterations long.
        assert max(one["difference"] for one in found) < 0.02, name
        if "tp2" not in name:
            continue
        # Neighbours share matrices, and one that leaves them to Megatron would wait for the other.
        assert found[0]["whole"] == found[1]["whole"], name
        assert found[2]["whole"] == found[3]["whole"], name
        assert not all(one for rank in found for one in rank["whole"]), name
        assert max(one["wrong"] for one in found) > 0.3, name
