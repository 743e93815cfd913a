"""Says where this machine's NeMo-RL is not the one that the plug-in was made for and has run with."""

import hashlib
import importlib
from argparse import ArgumentParser
from pathlib import Path

from qarl_nemo.config import ConfigError
from qarl_nemo.installation import installed_version

COMMIT = "7ea279ab"
_TESTED = f"commit {COMMIT} of 2026-08-22"
_VLLM = "0.25.1"
# What ours extends, replaces or is called by -> how the SHA-256 of that commit's file begins.
FILES = {
    "examples/run_grpo.py": "537dab42abb3",
    "nemo_rl/algorithms/grpo.py": "e4c0719cfaea",
    "nemo_rl/data/datasets/raw_dataset.py": "a8e7583f5a1e",
    "nemo_rl/data/processors.py": "2bc95127cb46",
    "nemo_rl/distributed/ray_actor_environment_registry.py": "a90e1b49adbf",
    "nemo_rl/distributed/virtual_cluster.py": "e8636d9d35c0",
    "nemo_rl/distributed/worker_group_utils.py": "7594db8ec419",
    "nemo_rl/environments/interfaces.py": "c04d1aa997bd",
    "nemo_rl/environments/math_environment.py": "34bacd2e248a",
    "nemo_rl/environments/utils.py": "1d7d1a28af54",
    "nemo_rl/models/generation/vllm/utils.py": "c8b9a46fa69b",
    "nemo_rl/models/generation/vllm/vllm_backend.py": "19dcd40b44a0",
    "nemo_rl/models/generation/vllm/vllm_generation.py": "c37916f23a5b",
    "nemo_rl/models/generation/vllm/vllm_worker.py": "8db1bbf71f50",
    "nemo_rl/models/generation/vllm/vllm_worker_async.py": "aa8bf10543b9",
    "nemo_rl/models/megatron/setup.py": "f14efc215287",
    "nemo_rl/models/megatron/train.py": "ca5ebc90966e",
    "nemo_rl/models/policy/lm_policy.py": "fcf194cff8c6",
    "nemo_rl/models/policy/utils.py": "42e314116ed5",
    "nemo_rl/models/policy/workers/megatron_policy_worker.py": "b18760db79c1",
    "nemo_rl/utils/config.py": "6ea2f21904b5",
    "nemo_rl/weight_sync/interfaces.py": "571efea10818",
}


def launcher_arguments() -> ArgumentParser:
    """Return the parser of `examples/run_qarl_grpo.py`, whose help needs no NeMo-RL."""
    parser = ArgumentParser(
        usage="%(prog)s [-h] [--config FILE] [--check] [a.b=c ...]",
        description="NeMo-RL's GRPO with quantized rollouts: docs/guide/nemo_rl.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="a NeMo-RL recipe with a `qarl:` block")
    parser.add_argument(
        "--check", action="store_true", help="stop before Ray starts, and say what would run or conflicts"
    )
    return parser


def not_importable(error: ImportError | AssertionError) -> str:
    """Say in one line that NeMo-RL, or a package that it needs, cannot be imported, and where it belongs.

    Args:
        error: what its import raised.
    """
    cause: BaseException = error
    # transformers names only what asked for the missing package.
    while isinstance(cause.__cause__, ImportError):
        cause = cause.__cause__
    reason = " ".join(str(cause).split())
    return (
        f"NeMo-RL is not importable ({reason}); put its repository and what it needs on PYTHONPATH (NEMO_RL_ROOT alone "
        "only says where its configs are): docs/guide/nemo_rl.md, step 1"
    )


def require_fitting(version: str) -> None:
    """Require that NeMo-RL's loop can call our refit, which it would otherwise find out with engines running.

    Args:
        version: NeMo-RL's.

    Raises:
        ConfigError: NeMo-RL has no such refits, or asks more of them than ours have; says what, and which to take.
    """
    if differs := _difference():
        raise ConfigError(
            f"NeMo-RL {version} on PYTHONPATH is another than this package was made for: {differs}. Take {_TESTED}, of "
            f"its main branch: git checkout {COMMIT} in NeMo-RL's repository"
        )


def _difference() -> str:
    try:
        module = importlib.import_module("qarl_nemo.nemo_rl.synchronizer")
    except ImportError as error:
        return str(error)
    # What Python would refuse to make an instance for.
    lacks = sorted(module.PackedWeightSynchronizer.__abstractmethods__)
    return f"its refits ask for {', '.join(lacks)}" if lacks else ""


def upstream_hints(root: Path, version: str) -> list[str]:
    """Say which files that ours builds on are others than in the tested commit, and which vLLM is.

    Args:
        root: holds `nemo_rl/` and `examples/`.
        version: NeMo-RL's.

    Returns:
        No line, or up to two.
    """
    other = [name for name, begins in FILES.items() if not _sha256(root / name).startswith(begins)]
    hints = []
    if other:
        shown = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
        hints.append(
            f"NeMo-RL {version} in {root}: {len(other)} of the {len(FILES)} files that this package builds on are not "
            f"those of {_TESTED}, the only one that it has run with: {shown}"
        )
    vllm = installed_version("vllm")
    if vllm is not None and vllm.partition("+")[0] != _VLLM:
        hints.append(f"vLLM {vllm} is installed here; engines have run with {_VLLM} alone")
    return hints


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
