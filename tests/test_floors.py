"""The house rules a machine can check: who imports whom, what stays free of torch, how long things get."""

import ast
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Contract -> a module and the import that breaks it; every contract of pyproject.toml has at least one.
VIOLATIONS = [
    pytest.param("floors", "qarl_nemo/losses/ratios.py", "import qarl_nemo.metrics.mismatch", id="up-import"),
    pytest.param("floors", "qarl_nemo/config/load.py", "from qarl_nemo.losses import config", id="up-import-to-config"),
    pytest.param("floors", "qarl_nemo/layers/weight.py", "import qarl_nemo.refit.manifest", id="sibling"),
    pytest.param("floors", "qarl_nemo/metrics/runs.py", "from qarl_nemo.checkpoints import plan", id="other-sibling"),
    pytest.param("floors", "qarl_nemo/homeless/__init__.py", "", id="package-without-floor"),
    pytest.param("formats", "kernels/qarl_formats/record.py", "import torch", id="formats-load-torch"),
    pytest.param("formats", "kernels/qarl_formats/presets.py", "import qarl_kernels.fp8", id="formats-up"),
    pytest.param("kernels", "kernels/qarl_kernels/fp8.py", "import qarl_nemo.config", id="kernels-up"),
    pytest.param("floors", "qarl_nemo/megatron/publish.py", "import qarl_nemo.nemo_rl.plugin", id="up-to-nemo-rl"),
    pytest.param("floors", "qarl_nemo/train/trainer.py", "import qarl_nemo.measure.doctor", id="up-to-measure"),
    pytest.param("floors", "qarl_nemo/train/run.py", "import qarl_nemo.cluster.plan", id="stranger"),
    pytest.param("losses", "qarl_nemo/losses/tbpo.py", "from qarl_kernels import get_format", id="loss-knows-formats"),
    pytest.param("floor-zero", "qarl_nemo/names.py", "import torch", id="names-load-torch"),
    pytest.param("floor-zero", "qarl_nemo/losses/config.py", "import qarl_nemo.losses.ratios", id="config-loads-torch"),
    pytest.param("quick-start", "qarl_nemo/metrics/report/style.py", "import torch", id="report-loads-torch"),
    pytest.param("door-transformers", "qarl_nemo/layers/router.py", "import transformers", id="transformers"),
    pytest.param("door-vllm", "qarl_nemo/refit/publish.py", "from vllm import LLM", id="vllm"),
    pytest.param("door-vllm", "qarl_nemo/train/sampler.py", "from vllm.config import VllmConfig", id="vllm-in-train"),
    pytest.param("door-scale-out", "qarl_nemo/train/trainer.py", "import ray", id="ray"),
    pytest.param("door-scale-out", "qarl_nemo/layers/linear.py", "import megatron.core", id="megatron"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of all packages and their contracts, to plant violations in."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "qarl_nemo", tmp_path / "qarl_nemo", ignore=ignore)
    for package in ("qarl_formats", "qarl_kernels"):
        shutil.copytree(ROOT / "kernels" / package, tmp_path / "kernels" / package, ignore=ignore)
    return tmp_path


def lint_imports(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # The lint reads what Python would import, so all packages are looked up in the tree first.
    program = "import sys; sys.path[:0] = ['.', 'kernels']; from importlinter.cli import lint_imports_command as c; c()"
    command = [sys.executable, "-c", program, "--no-cache", "--no-logo", *options]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120, check=False)


def python_files() -> Iterator[Path]:
    for folder in ("qarl_nemo", "kernels", "tools", "examples", "tests"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_every_contract_holds(tree):
    result = lint_imports(tree)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(("contract", "module", "statement"), VIOLATIONS)
def test_a_planted_violation_breaks_its_contract(tree, contract, module, statement):
    path = tree / module
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + f"\n{statement}\n")
    result = lint_imports(tree, "--contract", contract)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 broken" in result.stdout


def test_a_door_lets_in_what_it_is_for(tree):
    (tree / "qarl_nemo" / "refit" / "rank.py").write_text("import vllm\n")
    policy = tree / "qarl_nemo" / "nemo_rl" / "policy.py"
    policy.write_text("import megatron.core\nimport nemo_rl.algorithms\nimport ray\nimport vllm\n")
    result = lint_imports(tree)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_contract_has_a_planted_violation():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["id"] for contract in contracts} == {violation.values[0] for violation in VIOLATIONS}


@pytest.mark.parametrize(
    "module",
    ["config", "losses.config", "names", "train.config", "metrics.report", "metrics.results", "cli"],
)
def test_importing_it_loads_no_torch(module):
    program = f"import sys, qarl_nemo.{module}; print(*{{'torch', 'transformers', 'vllm', 'ray'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == []


def test_the_name_kernels_stays_free_for_the_package_that_nemo_rl_imports():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_package_and_template_is_installed():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found, templates = set(), set()
    for root in (ROOT / "qarl_nemo", ROOT / "kernels" / "qarl_formats", ROOT / "kernels" / "qarl_kernels"):
        found |= {".".join(path.parent.relative_to(root.parent).parts) for path in root.rglob("__init__.py")}
        templates |= set(root.rglob("*.j2"))
    # The example configs are data, kept at the top of the repository.
    assert set(setuptools["packages"]) == found | {"qarl_nemo.examples"}
    patterns = setuptools["package-data"]["qarl_nemo"]
    assert templates == {path for pattern in patterns for path in (ROOT / "qarl_nemo").glob(pattern)}


def test_files_and_functions_stay_short():
    too_long = []
    for path in python_files():
        text = path.read_text(encoding="utf-8")
        num_lines = len(text.splitlines())
        if num_lines > MAX_FILE_LINES:
            too_long.append(f"{path.relative_to(ROOT)}: {num_lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    too_long.append(f"{path.relative_to(ROOT)}:{node.name}: {num_lines} lines")
    assert too_long == []
