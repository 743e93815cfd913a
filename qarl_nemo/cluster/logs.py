"""Copies every node's Ray logs into the run's folder while the job runs, and once more at its end."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from qarl_nemo.cluster import on_node
from qarl_nemo.cluster.nodes import Node, results, run_on


class LogCollector:
    """Copies the logs of nodes that are alive; the last copy of a dead node's logs stays.

    Args:
        nodes: the cluster's nodes.
        folder: the run's shared folder; a node's logs go to `nodes/<node>` in it.
        period_s: seconds between copies.
        say: reports what went wrong, once for each node.
    """

    def __init__(self, nodes: list[Node], folder: Path, period_s: float, say: Callable[[str], None]) -> None:
        self._nodes, self._folder, self._period_s, self._say = nodes, folder, period_s, say
        self._started: dict[Node, Any] = {}
        self._next_s = time.monotonic()
        self._failed: set[Node] = set()

    def poll(self) -> None:
        """Start a copy on every node when it is due; never waits."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + self._period_s
        done = {node: copy for node, copy in self._started.items() if ray.wait([copy], timeout=0)[0]}
        self._report(*results(done, timeout_s=0))
        going_on = self._started.keys() - done.keys()
        self._started.update(self._start([node for node in self._nodes if node not in going_on]))

    def finish(self, lost: dict[Node, str], timeout_s: float = 120.0) -> None:
        """Copy one last time.

        Args:
            lost: nodes that are no longer asked.
            timeout_s: time limit for all nodes together.
        """
        alive = [node for node in self._nodes if node not in lost]
        self._report(*results(self._start(alive), timeout_s))

    def _start(self, nodes: list[Node]) -> dict[Node, Any]:
        return run_on(nodes, on_node.copy_ray_logs, lambda node: (str(self._folder / "nodes" / node.name),))

    def _report(self, _copied: dict[Node, int], silent: dict[Node, str]) -> None:
        for node in silent.keys() - self._failed:
            self._failed.add(node)
            self._say(f"logs of {node.name} are not complete: {silent[node]}")
