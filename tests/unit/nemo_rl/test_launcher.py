"""The launcher of NeMo-RL runs, where NeMo-RL is not."""

import subprocess
import sys
from pathlib import Path

import pytest

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


# The little of NeMo-RL that the launcher reads a config with.
STAND_IN = {
    "nemo_rl/__init__.py": "",
    "nemo_rl/package_info.py": "__version__ = '0'",
    "nemo_rl/utils/__init__.py": "",
    "nemo_rl/utils/config.py": "import yaml\nclass OverridesError(Exception): pass\n"
    "def load_config(path):\n    values = yaml.safe_load(path.read_text())\n"
    "    assert isinstance(values, dict), 'Config must be a Dictionary Config'\n    open(values['defaults'])",
    "pynvml.py": "",
    "examples/run_grpo.py": "from omegaconf.errors import OmegaConfBaseException\nMasterConfig = setup = None\n"
    "setup_response_data = None\ndef main(): raise OmegaConfBaseException('policy.megatron_cfg is not a container')",
}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("a: [1\nb: {", "config.yaml cannot be read: while parsing a flow sequence"),
        ("- a", "config.yaml cannot be read: Config must be a Dictionary Config"),
        ("defaults: none.yaml", "config.yaml cannot be read: [Errno 2] No such file or directory: 'none.yaml'"),
        ("defaults: config.yaml", "run_qarl_grpo.py: policy.megatron_cfg is not a container"),
    ],
)
def test_a_config_that_cannot_be_read_is_no_traceback(tmp_path, written, said):
    for name, text in STAND_IN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "config.yaml").write_text(written)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT}/kernels", "PATH": ""}
    command = [sys.executable, str(ROOT / "examples" / "run_qarl_grpo.py"), "--config", "config.yaml", "--check"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert said in done.stderr
