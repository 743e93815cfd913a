"""Check that a cluster can run the job: the same packages everywhere, shared folders that are shared and writable."""

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qarl_nemo.cluster import environment, on_node
from qarl_nemo.cluster.config import ClusterConfig, ClusterError
from qarl_nemo.cluster.nodes import Node, results, run_on, wait_for_nodes

# Importing `qarl_nemo.config` shows that our package's dependencies are installed.
MODULES = ("qarl_nemo", "qarl_nemo.config", "qarl_formats", "qarl_kernels")
# A network file system shows other nodes' files late.
VISIBLE_WITHIN_S = 20.0


def check(config: ClusterConfig, job_env: dict[str, str], say: Callable[[str], None]) -> list[Node]:
    """Wait for the cluster and check every node.

    Args:
        config: what is expected.
        job_env: variables the job will hand to its workers, as NeMo-RL does with PYTHONPATH.
        say: prints a line for the user.

    Returns:
        The cluster's nodes.

    Raises:
        ClusterError: nodes are missing, or any check failed on any node; all problems are listed.
    """
    nodes = wait_for_nodes(config, say)
    problems, answers = inspect(config, nodes, job_env)
    for node, answer in answers.items():
        say(_summary(node, answer))
    if problems:
        raise ClusterError(f"the cluster is not healthy, {len(problems)} problem(s):\n  " + "\n  ".join(problems))
    say(f"healthy: {len(nodes)} nodes, {sum(node.gpus for node in nodes)} GPUs")
    return nodes


def inspect(config: ClusterConfig, nodes: list[Node], job_env: dict[str, str]) -> tuple[list[str], dict[Node, Any]]:
    """Ask every node what it imports and what it can do with the shared folders.

    Args:
        config: folders, patterns of worker environments and the time to answer.
        nodes: the nodes to ask.
        job_env: see `check`.

    Returns:
        All problems, and the answer of each node that gave one.
    """
    token = f".qarl-check-{secrets.token_hex(8)}"
    folders = list(dict.fromkeys((config.checkpoint_dir, config.log_dir)))
    problems = [problem for folder in folders for problem in _leave_token(Path(folder), token)]
    request = {
        "program": Path(environment.__file__).read_text(),
        "modules": list(MODULES),
        "env": job_env,
        "worker_envs": list(config.health.worker_envs),
        "timeout_s": config.health.check_timeout_s,
        "paths": folders,
        "token": token,
    }
    try:
        started = run_on(nodes, on_node.look, lambda node: ({**request, "node_id": node.node_id},))
        answers, silent = results(started, config.health.check_timeout_s + 30)
        problems += [f"{node.name}: {reason}" for node, reason in silent.items()]
        problems += _package_problems(answers)
        problems += [problem for folder in folders for problem in _path_problems(folder, token, answers)]
    finally:
        for folder in folders:
            for path in Path(folder).glob(f"{token}*"):
                path.unlink(missing_ok=True)
    return problems, answers


def _package_problems(answers: dict[Node, Any]) -> list[str]:
    """Name failed imports, sources other than the first node's, and versions that differ within one interpreter."""
    problems: list[str] = []
    packages: dict[str, tuple[str, str]] = {}
    versions: dict[tuple[str, str], tuple[str, str]] = {}
    for node, answer in answers.items():
        for env in answer["environments"]:
            where = f"{node.name}, {env['python']}"
            problems += [f"{where}: {problem}" for problem in env.get("problems", [])]
            for name, found in env["packages"].items():
                said = f"{name} {found['version']} ({found['digest']})"
                first = packages.setdefault(name, (said, f"{found['folder']} on {node.name}"))
                if said != first[0]:
                    problems.append(f"{where}: imports {said} from {found['folder']}, not {first[0]} as {first[1]}")
            for name, version in env["versions"].items():
                first = versions.setdefault((env["python"], name), (version, node.name))
                if version != first[0]:
                    problems.append(f"{where}: holds {name} {version}, not {first[0]} as on {first[1]}")
    return problems


def _leave_token(folder: Path, token: str) -> list[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / token).write_text(token)
    except OSError as error:
        return [f"head: {folder} cannot be written ({error.strerror})"]
    return []


def _path_problems(folder: str, token: str, answers: dict[Node, Any]) -> list[str]:
    problems = [f"{node.name}: {folder} {each}" for node, answer in answers.items() for each in answer["paths"][folder]]
    wrote = [node for node, answer in answers.items() if not answer["paths"][folder]]
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while wrote and time.monotonic() < deadline:
        wrote = [node for node in wrote if not (Path(folder) / f"{token}.{node.node_id}").exists()]
        if wrote:
            time.sleep(0.5)
    return problems + [f"{node.name}: the head does not see what it wrote into {folder}" for node in wrote]


def _summary(node: Node, answer: dict[str, Any]) -> str:
    lines = [f"{node.name} ({answer['host']}): {node.gpus} GPUs"]
    for env in answer["environments"]:
        packages = [f"{name} {each['version']} ({each['digest']})" for name, each in env["packages"].items()]
        versions = [f"{name} {version}" for name, version in env["versions"].items()]
        lines.append(f"  {env['python']}: {', '.join(packages + versions)}")
    return "\n".join(lines)
