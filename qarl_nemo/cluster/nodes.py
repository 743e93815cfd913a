"""Ray's view of the cluster: who joined, who was lost, and running a function on one node."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from qarl_nemo.cluster import on_node
from qarl_nemo.cluster.config import ClusterConfig, ClusterError

# Pickled by value: a node whose checkout is missing or different must run this code, not its own.
ray.cloudpickle.register_pickle_by_value(on_node)


@dataclass(frozen=True)
class Node:
    """A Ray node."""

    node_id: str
    address: str
    gpus: int

    @property
    def name(self) -> str:
        """The node's address and, since one machine may hold several nodes, the start of its id."""
        return f"{self.address}-{self.node_id[:6]}"


def wait_for_nodes(config: ClusterConfig, say: Callable[[str], None], poll_s: float = 2.0) -> list[Node]:
    """Wait until every node has joined with all its GPUs.

    Args:
        config: how many nodes are expected, and how long to wait.
        say: prints a line whenever something has changed.
        poll_s: seconds between looks.

    Returns:
        The nodes, ordered by address; a head without GPUs counts only where none are expected.

    Raises:
        ClusterError: nodes are missing after `health.join_timeout_s`; names what joined and what each node lacks.
    """
    start, said = time.monotonic(), ""
    while True:
        joined = _alive()
        complete = [node for node in joined if node.gpus >= config.gpus_per_node]
        if len(complete) >= config.nodes:
            return complete
        waited = time.monotonic() - start
        gpus = f"{sum(node.gpus for node in joined)} of {config.nodes * config.gpus_per_node} GPUs"
        line = f"{len(complete)} of {config.nodes} nodes, {gpus}"
        if line != said:
            say(f"joined: {line} ({waited:.0f} s of at most {config.health.join_timeout_s:.0f} s)")
            said = line
        if waited > config.health.join_timeout_s:
            raise ClusterError(_missing(config, joined))
        time.sleep(poll_s)


def lost_nodes(nodes: Iterable[Node]) -> dict[Node, str]:
    """Return which of the nodes that the job started with are gone, and why Ray gave each one up."""
    now = {each["NodeID"]: each for each in ray.nodes()}
    dead = {node: now.get(node.node_id, {"Alive": False}) for node in nodes}
    return {node: each.get("DeathReasonMessage") or "gone" for node, each in dead.items() if not each["Alive"]}


def run_on(nodes: Iterable[Node], function: Callable[..., Any], arguments: Callable[[Node], tuple]) -> dict[Node, Any]:
    """Start a function on every node, beside whatever runs there.

    Args:
        nodes: where to run it.
        function: what to run; its module is pickled by value.
        arguments: returns the call's arguments for a node.

    Returns:
        Ray's reference to each result.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    return {
        node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote(
            *arguments(node)
        )
        for node in nodes
    }


def results(started: dict[Node, Any], timeout_s: float) -> tuple[dict[Node, Any], dict[Node, str]]:
    """Gather what `run_on` started.

    Args:
        started: the references it returned.
        timeout_s: time limit for all together.

    Returns:
        The results, and the reason for each node without one.
    """
    _, late = ray.wait(list(started.values()), num_returns=len(started), timeout=timeout_s)
    answers, silent = {}, {}
    for node, reference in started.items():
        if reference in late:
            ray.cancel(reference, force=True)
            silent[node] = f"did not answer in {timeout_s:.0f} s"
            continue
        try:
            answers[node] = ray.get(reference)
        except ray.exceptions.RayError as error:
            silent[node] = str(error).strip().splitlines()[-1]
    return answers, silent


def _alive() -> list[Node]:
    joined = [
        Node(each["NodeID"], each["NodeManagerAddress"], int(each["Resources"].get("GPU", 0)))
        for each in ray.nodes()
        if each["Alive"]
    ]
    return sorted(joined, key=lambda node: (node.address, node.node_id))


def _missing(config: ClusterConfig, joined: list[Node]) -> str:
    lines = [
        f"after {config.health.join_timeout_s:.0f} s the cluster is incomplete: expected {config.nodes} nodes with "
        f"{config.gpus_per_node} GPUs each"
    ]
    for node in joined:
        lacks = "" if node.gpus >= config.gpus_per_node else f", {config.gpus_per_node - node.gpus} too few"
        lines.append(f"  {node.name} joined with {node.gpus} GPUs{lacks}")
    if len(joined) < config.nodes:
        lines.append(
            f"  {config.nodes - len(joined)} node(s) never joined: see their own output; they must reach the head at "
            f"port {config.ray.port} and run the same Ray and Python"
        )
    return "\n".join(lines)
