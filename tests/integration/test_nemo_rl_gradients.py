"""Inside NeMo-RL's own policy worker: TBPO without mismatch trains like its clipped loss, a NaN costs one step."""

import json
import os
from pathlib import Path

import pytest

from support.nemo_rl import installed
from support.programs import run_program


@pytest.mark.gpu
def test_tbpo_without_mismatch_has_the_gradients_of_nemo_rls_loss(tmp_path):
    root = os.environ.get("NEMO_RL_ROOT") or str(Path(installed.nemo_rl.__file__).parents[1])
    settings = {"NEMO_RL_ROOT": root, "NRL_MEGATRON_CHECKPOINT_DIR": str(tmp_path / "megatron")}
    printed = run_program("nemo_rl.run_gradients", tmp_path, timeout_s=400, **settings)
    figures = json.loads((tmp_path / "gradients.json").read_text())
    assert 0.1 < figures["kept"] < 0.9, "responses in and out of their bands"
    # What the same loss gives twice, sums in another order, is no difference.
    assert figures["tbpo"] <= 2 * figures["again"] + 1e-6
    assert figures["wrong"] > 0.05
    # One log-probability that is no number leaves out one step, is named, and nothing stays of it.
    assert (figures["skipped"], figures["skipped_after"]) == (1, 0)
    assert "response 5, response token 0: prev_logprobs is nan" in printed
