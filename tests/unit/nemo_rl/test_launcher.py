"""The launcher of NeMo-RL runs, where NeMo-RL is not."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_without_nemo_rl_one_line_says_what_is_missing(tmp_path):
    (tmp_path / "nemo_rl.py").write_text("raise ImportError('No module named nemo_rl')")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT}/kernels", "NEMO_RL_ROOT": str(tmp_path), "PATH": ""}
    command = [sys.executable, str(ROOT / "examples" / "run_qarl_grpo.py"), "--config", "any.yaml", "--check"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "NEMO_RL_ROOT alone" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
