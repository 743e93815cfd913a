"""The launcher of NeMo-RL runs, where NeMo-RL is not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


# The little of NeMo-RL that the launcher reads a config with.
STAND_IN = {
    # Unlike NeMo-RL itself it runs on any Python of ours.
    "sitecustomize.py": "from qarl_nemo import installation\ninstallation.NEMO_RL_PYTHON = (3, 11)",
    "nemo_rl/__init__.py": "",
    "nemo_rl/package_info.py": "__version__ = '0'",
    "nemo_rl/utils/__init__.py": "",
    "nemo_rl/utils/config.py": "import yaml\nfrom omegaconf import OmegaConf\nclass OverridesError(Exception): pass\n"
    "def load_config(path):\n    values = yaml.safe_load(path.read_text())\n"
    "    assert isinstance(values, dict), 'Config must be a Dictionary Config'\n"
    "    OmegaConf.merge({'data': {'validation': {}}}, values)\n    open(values['defaults'])",
    "pynvml.py": "class NVMLError(Exception): pass\ndef nvmlInit(): raise NVMLError",
    "examples/run_grpo.py": "from omegaconf.errors import OmegaConfBaseException\nMasterConfig = setup = None\n"
    "setup_response_data = None\ndef main(): raise OmegaConfBaseException('policy.megatron_cfg is not a container')",
}


def check(folder: Path, files: dict[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    """Lay these files out and let the launcher check config.yaml among them."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    env = {"PYTHONPATH": f"{folder}:{ROOT}:{ROOT}/kernels", "PATH": ""}
    command = [
        sys.executable,
        str(ROOT / "examples" / "run_qarl_grpo.py"),
        "--config",
        "config.yaml",
        "--check",
        *overrides,
    ]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=folder)


def test_its_help_needs_no_nemo_rl(tmp_path):
    program = [sys.executable, str(ROOT / "examples" / "run_qarl_grpo.py"), "--help"]
    env = {"PYTHONPATH": f"{ROOT}:{ROOT}/kernels", "PATH": ""}
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--check" in done.stdout


def test_a_python_that_is_too_old_for_nemo_rl_is_named_in_one_line(tmp_path):
    newer = STAND_IN["sitecustomize.py"].replace("(3, 11)", "(99, 0)")
    # What Pydantic raises there is no ImportError.
    files = STAND_IN | {"sitecustomize.py": newer, "nemo_rl/__init__.py": "raise TypeError"}
    done = check(tmp_path, files | {"config.yaml": "defaults: config.yaml"})
    assert done.returncode == 1
    assert done.stderr.startswith("run_qarl_grpo.py: NeMo-RL needs Python 99.0 or newer, this is 3.")
    assert len(done.stderr.strip().splitlines()) == 1


NEEDS = ["nemo_rl/__init__.py", "nemo_rl/utils/config.py", "examples/run_grpo.py", "pynvml.py"]


@pytest.mark.parametrize("name", NEEDS)
def test_what_nemo_rl_needs_and_is_not_there_is_named_in_one_line(tmp_path, name):
    files = STAND_IN | {"config.yaml": "defaults: config.yaml", name: "import a_package_that_it_needs"}
    done = check(tmp_path, files)
    assert done.returncode == 1
    assert "NeMo-RL is not importable (No module named 'a_package_that_it_needs')" in done.stderr
    assert "NEMO_RL_ROOT alone" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("importing", "said"),
    [
        ("assert False, 'transformers 5.23.0 detected.\\nIt was written for <5.12.'", "It was written for <5.12."),
        (
            "try:\n import sounds\nexcept ImportError as error:\n raise ImportError('AutoProcessor') from error",
            "sounds",
        ),
    ],
    ids=["another version", "a package that a package needs"],
)
def test_a_package_that_does_not_fit_is_named_in_one_line(tmp_path, importing, said):
    done = check(tmp_path, STAND_IN | {"config.yaml": "defaults: config.yaml", "examples/run_grpo.py": importing})
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("a: [1\nb: {", "config.yaml cannot be read: while parsing a flow sequence"),
        ("- a", "config.yaml cannot be read: Config must be a Dictionary Config"),
        ("defaults: none.yaml", "config.yaml cannot be read: [Errno 2] No such file or directory: 'none.yaml'"),
        (
            "defaults: config.yaml\ndata: {validation: [{}]}",
            "config.yaml cannot be read: Cannot merge incompatible container types; a list does not merge with a block "
            "of settings: write it in a recipe that builds on this one, with `_override_: true` in the top-level block",
        ),
        ("defaults: config.yaml\ndata: {validation: {}}", "run_qarl_grpo.py: policy.megatron_cfg is not a container"),
        ("defaults: config.yaml", "run_qarl_grpo.py: policy.megatron_cfg is not a container"),
    ],
)
def test_a_config_that_cannot_be_read_is_no_traceback(tmp_path, written, said):
    done = check(tmp_path, STAND_IN | {"config.yaml": written})
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("qarl.targets=experts,attention", "; a list needs brackets: set 'qarl.targets=[experts,attention]'\n"),
        ("++a.b=[c,d],e", "; a list needs brackets: set '++a.b=[[c,d],e]'\n"),
        ("data.train=[{a: (b, [c, d]), e: 'f,g'}]", "; a list does not merge with a block of settings"),
    ],
)
def test_an_override_that_lacks_brackets_is_written_out_with_them(tmp_path, override, said):
    launcher = STAND_IN["examples/run_grpo.py"].rpartition("def main")[0]
    launcher += "def main():\n    from nemo_rl.utils.config import OverridesError\n"
    launcher += "    raise OverridesError('Error merging override')"
    done = check(
        tmp_path, STAND_IN | {"config.yaml": "defaults: config.yaml", "examples/run_grpo.py": launcher}, override
    )
    assert done.returncode == 1
    assert f"run_qarl_grpo.py: Error merging override{said}" in done.stderr


# What NeMo-RL's launcher and its loops call, in their order.
LAUNCHER = """
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from pydantic import BaseModel
from test_nemo_rl_config import config
from qarl_nemo.nemo_rl import plugin, upstream

class Async(BaseModel):
    enabled: bool

class Grpo(BaseModel, extra="allow"):
    async_grpo: Async

class MasterConfig(BaseModel, extra="allow"):
    policy: dict[str, Any]
    logger: dict[str, Any]
    grpo: Grpo

def setup_response_data(*parts):
    return parts

class VllmGeneration:
    pass

def setup(config, *parts, policy_factory):
    assert (VllmGeneration is not own) == colocated["enabled"]
    return [policy_factory(tokenizer=None), "engines", 2, 3, 4, 5, None, 7, 8, SimpleNamespace(total_steps=0)]

own = VllmGeneration

def sync_weights(timer=None):
    assert failure is None, failure
    return {"version": 1.0}

def stand_in(engines, error):
    global failure, colocated
    failure, colocated = error, engines
    plugin.register = upstream.require_fitting = lambda *_: None
    plugin.setup_data = lambda setup, tokenizer, data, env, grpo: setup(tokenizer, data, env)
    plugin.policy_factory = lambda **named: SimpleNamespace()
    plugin.install_refit = lambda *both: SimpleNamespace(sync_weights=sync_weights, failure=failure)
    plugin.install_loss = lambda *both, log_dir, done: None

def main():
    values = config({"format": "w4a16", "gpu_memory_gib": 4096}, cluster={"num_nodes": 1, "gpus_per_node": 8}, **{
        "policy.megatron_cfg.sequence_parallel": True, "policy.generation.colocated": colocated,
        "policy.megatron_cfg.expert_model_parallel_size": 2, "logger": {"log_dir": "logs"}})
    made = MasterConfig(**values)
    made.logger["log_dir"] = "logs/exp_001"
    Path("logs/exp_001").mkdir(parents=True)
    policy, engines, *_ = setup(made, None, *setup_response_data(None, {}, {}), policy_factory=None)
    run.synchronizer.sync_weights(timer=None)
    run.synchronizer.sync_weights(timer=None)
"""
DRIVER = """
import sys
sys.path[:0] = ["examples", {examples!r}, {tests!r}]
import run_grpo, run_qarl_grpo
class Run(run_qarl_grpo._Run):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        run_grpo.run = self
run_qarl_grpo._Run = Run
run_qarl_grpo.fetch_model_config = lambda name: None
run_grpo.stand_in({engines!r}, {error!r})
sys.argv = ["run_qarl_grpo.py"]
run_qarl_grpo.main()
"""
APART = {"enabled": False, "resources": {"gpus_per_node": 4, "num_nodes": 1}}
SHARED = ["Ray", "data", "engines and learner", "learner", "first refit"]


@pytest.mark.parametrize(
    ("engines", "error", "stages"),
    [
        ({"enabled": True}, None, [*SHARED, "done after"]),
        (APART, None, ["Ray", "data", "engines and learner", "first refit", "done after"]),
        ({"enabled": True}, "no room", SHARED),
    ],
)
def test_a_start_shows_its_stages_until_the_first_refit(tmp_path, engines, error, stages):
    for name, text in (STAND_IN | {"examples/run_grpo.py": LAUNCHER}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    tests, examples = str(Path(__file__).parent), str(ROOT / "examples")
    code = DRIVER.format(examples=examples, tests=tests, engines=engines, error=error)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT}/kernels", "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ("no room" if error else "") in done.stderr
    assert done.returncode == bool(error), done.stderr
    assert re.findall(r"^qarl: start: (.*?) +\d", done.stdout, re.MULTILINE) == stages
    assert (tmp_path / "cache" / "qarl_nemo" / "starts.json").exists() == (error is None)
    assert ("start_s" in (tmp_path / "logs" / "exp_001" / "run.json").read_text()) == (error is None)
