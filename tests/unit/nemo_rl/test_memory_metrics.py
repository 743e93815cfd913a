"""What a step held is logged by phase, of the fullest rank."""

import pytest
import torch

from qarl_nemo.nemo_rl.memory_metrics import PhaseMemory, fullest

MIB = 2**20


def test_each_figure_is_the_fullest_ranks():
    ranks = [{"memory/update_allocated_gib": 90.0, "memory/rollout_allocated_gib": 60.0}, {}]
    ranks.append({"memory/update_allocated_gib": 91.5, "memory/refit_reserved_gib": 3.0})
    assert fullest(ranks) == {
        "memory/update_allocated_gib": 91.5,
        "memory/rollout_allocated_gib": 60.0,
        "memory/refit_reserved_gib": 3.0,
    }


@pytest.mark.gpu
def test_a_phase_notes_its_own_peak_and_a_step_starts_anew():
    memory = PhaseMemory()
    before = torch.cuda.memory_allocated()
    with memory.phase("update"):
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    with memory.phase("prev_logprobs"):
        torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
    found = memory.take()
    peaks = {key: found[f"memory/{key}_allocated_gib"] * 2**30 - before for key in ("update", "prev_logprobs")}
    assert peaks == {"update": 64 * MIB, "prev_logprobs": 16 * MIB}
    assert found["memory/update_reserved_gib"] >= found["memory/update_allocated_gib"]
    # At least CUDA's own context.
    assert found["memory/update_others_gib"] > 0.1
    assert memory.take() == {}
