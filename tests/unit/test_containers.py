"""docker/: clean for its linters, and in step with the code."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from qarl_nemo import __version__
from qarl_nemo.nemo_rl.upstream import COMMIT
from support.linters import assert_clean, shellcheck

DOCKER = Path(__file__).parents[2] / "docker"
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.scratch"]
# What constraints.txt has newer than Dockerfile.scratch's lock can, by what holds it back there.
HELD_BACK = {
    "requirements.in": "datasets numpy omegaconf torch transformers",
    "botocore": "python-dateutil",
    "datasets": "fsspec",
    "hydra-core": "antlr4-python3-runtime",
    "mlflow": "pyarrow",
    "multi-storage-client": "tzdata",
    "swanlab": "protobuf",
    "transformers": "huggingface-hub tokenizers",
    "vllm": "setuptools",
}


def pins(path: Path) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    found = [re.fullmatch(r"([\w.-]+)(?:\[.*\])?==([^\s;]+)", line) for line in lines if line]
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_is_clean(path):
    assert_clean("hadolint", str(path))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_linter_would_have_found_a_floating_version(path):
    with pytest.raises(AssertionError, match=r"DL3013|DL3042"):
        assert_clean("hadolint", "-", text=path.read_text() + "\nRUN pip install ray\n")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_an_ordinary_user_by_number(path):
    """By number, as Kubernetes' runAsNonRoot cannot look names up."""
    users = re.findall(r"^USER (.*)$", path.read_text(), flags=re.MULTILINE)
    assert users[-1] == "${USER_ID}"
    assert "ARG USER_ID=1000" in path.read_text()


def test_every_file_a_dockerfile_copies_exists():
    for path in DOCKERFILES:
        for source in re.findall(r"^COPY (?:--chown=\S+ )?(\S+) \S+$", path.read_text(), flags=re.MULTILINE):
            assert (DOCKER.parent / source).exists(), f"{path.name} copies {source}"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_the_command(path, tmp_path):
    (made,) = re.findall(r"^RUN (printf .*) > /usr/local/bin/qarl && chmod 755 ", path.read_text(), flags=re.MULTILINE)
    (tmp_path / "qarl").write_bytes(subprocess.run(["bash", "-c", made], stdout=subprocess.PIPE, check=True).stdout)
    (tmp_path / "qarl").chmod(0o755)
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{DOCKER.parent}:{DOCKER.parent}/kernels",
    }
    done = subprocess.run([str(tmp_path / "qarl"), "--help"], env=env, capture_output=True, text=True, check=False)
    assert "report" in done.stdout, done.stderr
    assert "qarl --help" in path.read_text()


def test_worker_environments_are_linked_under_our_workers_names():
    plugin = pytest.importorskip("qarl_nemo.nemo_rl.plugin")
    links = dict(re.findall(r"ln -s (nemo_rl\.\S+) \\\n\s+(qarl_nemo\.\S+)", (DOCKER / "Dockerfile").read_text()))
    (policy,) = [theirs for theirs, own in links.items() if own == plugin.POLICY_WORKER]
    assert policy.endswith(".MegatronPolicyWorker")
    assert {theirs: own for theirs, own in links.items() if theirs != policy} == plugin.GENERATION_WORKERS


def test_the_lock_holds_what_was_asked_for():
    asked, locked = pins(DOCKER / "scratch" / "requirements.in"), pins(DOCKER / "scratch" / "requirements.txt")
    overrides = pins(DOCKER / "scratch" / "overrides.txt")
    assert {name: locked.get(name) for name in asked} == asked
    assert {name: locked.get(name) for name in overrides} == overrides
    lines = [line for line in (DOCKER / "scratch" / "requirements.txt").read_text().splitlines() if line[:1] != "#"]
    assert all("==" in line for line in lines)


def test_the_lock_serves_this_package():
    locked = pins(DOCKER / "scratch" / "requirements.txt")
    project = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w-]+", each)[0] for each in project["dependencies"]]
    assert [name for name in names if name not in locked] == []
    assert project["optional-dependencies"]["vllm"] == [f"vllm=={locked['vllm']}"]


@pytest.mark.parametrize("lock", ["constraints.txt", "docker/scratch/requirements.txt"])
def test_what_a_dockerfile_installs_by_itself_has_the_locked_version(lock):
    installed = dict(re.findall(r" ([a-z][\w-]*)==(\d[\w.]*)", "".join(path.read_text() for path in DOCKERFILES)))
    assert set(installed) >= {"jinja2", "typer"}
    locked = pins(DOCKER.parent / lock)
    assert {name: locked.get(name) for name in installed} == installed


def test_the_lock_has_the_versions_that_tests_run_with():
    tested, locked = pins(DOCKER.parent / "constraints.txt"), pins(DOCKER / "scratch" / "requirements.txt")
    differing = {name for name in tested.keys() & locked.keys() if tested[name] != locked[name]}
    assert differing == set(" ".join(HELD_BACK.values()).split())
    assert {"requirements.in"} == {name for name in HELD_BACK if name not in locked}


def test_images_are_this_version_on_the_nemo_rl_that_tests_know():
    text = "".join(path.read_text() for path in sorted(DOCKER.rglob("*")) if path.is_file())
    assert set(re.findall(r"qarl-nemo:(\d+\.\d+\.\d+)", text)) == {__version__}
    commits = re.findall(r"(?:RL\.git#|NRL_GIT_REF=|NEMO_RL_COMMIT=|nemo-rl:)(\w+)", text)
    assert {commit[: len(COMMIT)] for commit in commits} == {COMMIT}


def test_compose_starts_the_launcher_on_the_shared_folder():
    (service,) = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"].values()
    assert (DOCKER.parent / service["command"].split()[-1]).exists()
    assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    shellcheck(f"#!/bin/bash\n{service['command']}\n")


def test_kubernetes_objects_fit_their_schemas():
    """Offline: KUBECONFORM_SCHEMAS says where schemas of the core and of KubeRay lie, see docs/guide/clusters.md."""
    schemas = os.environ.get("KUBECONFORM_SCHEMAS")
    if not schemas:
        pytest.skip("KUBECONFORM_SCHEMAS names no schemas")
    objects = sorted(map(str, (DOCKER / "kubernetes").glob("*.yaml")))
    assert_clean("kubeconform", "-strict", "-schema-location", schemas, *objects)
