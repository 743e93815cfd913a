"""Spreads the runs of a comparison over this host's GPUs: each starts where the fewest are."""

import math
import os
import subprocess
from collections import Counter
from collections.abc import Sequence

from qarl_nemo.train.config import LocalConfig

# Tells a run which share of its GPUs' memory is its own.
SHARE = "QARL_GPU_SHARE"


def own_share() -> float:
    """Return the share of its GPUs' memory that this process may take, all of it unless `SHARE` says less."""
    return float(os.environ.get(SHARE, "1"))


def visible_gpus() -> list[str]:
    """Return the GPUs that processes started here may use, as CUDA_VISIBLE_DEVICES names them; asks no CUDA."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        # -1 hides every GPU.
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(index) for index in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


def num_gpus(config: LocalConfig) -> int:
    """Return how many GPUs a run takes: its learner's, and its engine's where that has one of its own."""
    if config.device == "cpu":
        return 0
    megatron = config.policy.megatron_cfg
    return (1 if megatron is None else megatron.num_gpus) + getattr(config.rollout, "own_gpu", False)


class GpuPool:
    """Which runs are on which GPUs.

    Args:
        gpus: names of those to use.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus, self._runs = list(gpus), Counter[str]()

    def take(self, config: LocalConfig) -> list[str]:
        """Return the GPUs for a run that starts now, those with the fewest runs; fewer than it takes if there are."""
        by_runs = sorted(self._gpus, key=lambda name: self._runs[name])
        taken = sorted(by_runs[: num_gpus(config)], key=self._gpus.index)
        self._runs.update(taken)
        return taken

    def share(self, runs: Sequence[LocalConfig], parallel: int) -> float:
        """Return the share of a GPU that each run can have, 1 / (runs on the fullest GPU).

        Args:
            runs: all that will take GPUs.
            parallel: how many run at a time.
        """
        taken = sum(sorted(map(num_gpus, runs))[-parallel:])
        return 1.0 / max(1, math.ceil(taken / max(1, len(self._gpus))))

    def give_back(self, gpus: Sequence[str]) -> None:
        """Note that the run which took these has ended."""
        self._runs.subtract(gpus)
