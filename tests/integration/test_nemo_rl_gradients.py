"""Inside NeMo-RL's own policy worker: TBPO without mismatch trains like its clipped loss, a NaN costs one step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nemo_rl_here
import pytest

HERE = Path(__file__).parent


@pytest.mark.gpu
def test_tbpo_without_mismatch_has_the_gradients_of_nemo_rls_loss(tmp_path):
    # Ray's workers import the program's classes by name.
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "NRL_MEGATRON_CHECKPOINT_DIR": str(tmp_path / "megatron")}
    environment.setdefault("NEMO_RL_ROOT", str(Path(nemo_rl_here.nemo_rl.__file__).parents[1]))
    command = [sys.executable, str(HERE / "nemo_rl_gradients.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    figures = json.loads((tmp_path / "gradients.json").read_text())
    assert 0.1 < figures["kept"] < 0.9, "responses in and out of their bands"
    # What the same loss gives twice, sums in another order, is no difference.
    assert figures["tbpo"] <= 2 * figures["again"] + 1e-6
    assert figures["wrong"] > 0.05
    # One log-probability that is no number leaves out one step, is named, and nothing stays of it.
    assert (figures["skipped"], figures["skipped_after"]) == (1, 0)
    assert "response 5, response token 0: prev_logprobs is nan" in done.stdout
