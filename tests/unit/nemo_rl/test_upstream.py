"""Another NeMo-RL than the tested one is named before anything starts."""

import ast
import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace

import pytest

from qarl_nemo.config import ConfigError
from qarl_nemo.nemo_rl import upstream
from qarl_nemo.nemo_rl.upstream import FILES, upstream_hints

PACKAGE = Path(__file__).parents[3] / "qarl_nemo"


class Interface(ABC):
    @abstractmethod
    def mark_stale(self): ...


class Own(Interface):
    def mark_stale(self): ...


def module(synchronizer):
    return lambda _: SimpleNamespace(PackedWeightSynchronizer=synchronizer)


def test_a_loop_that_asks_for_more_than_we_have_is_refused_with_the_commit_to_take(monkeypatch):
    monkeypatch.setattr(upstream.importlib, "import_module", module(Interface))
    with pytest.raises(ConfigError, match=r"NeMo-RL 0\.7\.0 .* its refits ask for mark_stale\. Take commit 7ea279ab"):
        upstream.require_fitting("0.7.0")
    monkeypatch.setattr(upstream.importlib, "import_module", module(Own))
    upstream.require_fitting("0.7.0")


def test_one_without_such_refits_is_refused_too(monkeypatch):
    def missing(_):
        raise ModuleNotFoundError("No module named 'nemo_rl.weight_sync'")

    monkeypatch.setattr(upstream.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"made for: No module named 'nemo_rl\.weight_sync'\. Take commit"):
        upstream.require_fitting("0.5.0")


@pytest.fixture
def root(tmp_path, monkeypatch):
    known = {}
    for name in ("nemo_rl/a.py", "nemo_rl/b.py", "nemo_rl/c.py", "nemo_rl/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
        known[name] = hashlib.sha256(name.encode()).hexdigest()[:12]
    monkeypatch.setattr(upstream, "FILES", known)
    monkeypatch.setattr(upstream, "installed_version", lambda _: "0.25.1+cu130")
    return tmp_path


def test_the_tested_files_get_no_hint(root):
    assert upstream_hints(root, "0.6.0") == []


def test_files_that_changed_or_are_gone_are_counted_and_named(root):
    for name in ("a", "b", "c"):
        (root / f"nemo_rl/{name}.py").write_text("changed")
    (root / "nemo_rl/d.py").unlink()
    (hint,) = upstream_hints(root, "0.8.0")
    assert hint.startswith(f"NeMo-RL 0.8.0 in {root}: 4 of the 4 files")
    assert hint.endswith("nemo_rl/a.py, nemo_rl/b.py, nemo_rl/c.py and 1 more")


def test_another_vllm_is_named(root, monkeypatch):
    monkeypatch.setattr(upstream, "installed_version", lambda _: "0.20.0")
    assert upstream_hints(root, "0.6.0") == ["vLLM 0.20.0 is installed here; engines have run with 0.25.1 alone"]
    monkeypatch.setattr(upstream, "installed_version", lambda _: None)
    assert upstream_hints(root, "0.6.0") == []


def test_every_module_of_nemo_rl_that_ours_imports_is_looked_at():
    sources = [*PACKAGE.rglob("*.py"), PACKAGE.parent / "examples" / "run_qarl_grpo.py"]
    found = {
        f"{node.module}.{alias.name}" if (node.module, alias.name) in SUBMODULES else node.module
        for source in sources
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nemo_rl"
        for alias in node.names
    }
    looked_at = {name.removesuffix(".py").replace("/", ".") for name in FILES}
    assert found - looked_at == {"nemo_rl.package_info"}


SUBMODULES = {
    ("nemo_rl.distributed", "ray_actor_environment_registry"),
    ("nemo_rl.models.generation.vllm", "utils"),
    ("nemo_rl.models.megatron", "setup"),
    ("nemo_rl.models.megatron", "train"),
    ("nemo_rl.models.policy.workers", "megatron_policy_worker"),
}
