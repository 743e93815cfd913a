"""Cluster configs for tests, and substitutes for several hosts on one machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl_nemo.cluster.config import ClusterConfig
from qarl_nemo.config import load_config, validate

ROOT = Path(__file__).parents[2]
HEAD, WORKER = "127.0.0.2", "127.0.0.3"
EXAMPLES = sorted((ROOT / "docker" / "clusters").glob("*.yaml"))


def example(name: str, *overrides: str) -> ClusterConfig:
    return load_config(ROOT / "docker" / "clusters" / f"{name}.yaml", overrides, ClusterConfig)


def one_machine(
    folder: Path, *, connect: Sequence[str] = ("env", "HOST={host}", "bash", "-c"), **changes: Any
) -> ClusterConfig:
    """Two hosts that are loopback addresses, reached by bash."""
    values = {
        "nodes": 2,
        "gpus_per_node": 4,
        "workdir": str(folder),
        "checkpoint_dir": str(folder / "checkpoints"),
        "log_dir": str(folder / "logs"),
        "command": "true",
        "launcher": {
            "type": "hosts",
            "hosts": ["one", "two"],
            "addresses": {"one": HEAD, "two": WORKER},
            "connect": list(connect),
        },
    }
    return validate({**values, **changes}, ClusterConfig, source="test")
