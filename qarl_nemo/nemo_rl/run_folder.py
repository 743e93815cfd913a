"""Writes to NeMo-RL's log folder what reports and records need: the run's config, and what it ran on."""

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pynvml
from nemo_rl.package_info import __version__ as nemo_rl_version

from qarl_nemo.config import write_yaml
from qarl_nemo.files import write_atomic
from qarl_nemo.installation import installed_version
from qarl_nemo.metrics.nemo_rl_logs import CONFIG_FILE
from qarl_nemo.metrics.recorded import FACTS_FILE
from qarl_nemo.secrets import without_secrets, words_without_secrets

_PACKAGES = ("torch", "vllm", "megatron-core", "transformer-engine", "ray", "transformers")


def describe_run(log_dir: Path, config: Mapping[str, Any]) -> None:
    """Write `config.yaml` and `run.json`: command, hardware, and versions of the packages that this process sees.

    Secrets in `env_vars` are left out of both.

    Args:
        log_dir: NeMo-RL's folder of this start.
        config: the checked config, as nested dictionaries.
    """
    cluster = config["cluster"]
    gpus = cluster["gpus_per_node"] * cluster["num_nodes"]
    facts = {
        "command": shlex.join(["python", *words_without_secrets(sys.argv)]),
        "hardware": f"{gpus}x {_gpu_name()}",
        "versions": {"nemo-rl": nemo_rl_version}
        | {name: found for name in _PACKAGES if (found := installed_version(name))},
    }
    write_atomic(log_dir / FACTS_FILE, json.dumps(facts, indent=1) + "\n")
    write_yaml(log_dir / CONFIG_FILE, without_secrets(config))


def _gpu_name() -> str:
    # Asking torch would create a context, which takes memory on the device.
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except pynvml.NVMLError:
        return "GPU"
