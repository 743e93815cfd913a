"""Prints as JSON what one Python interpreter on one node imports. A program of its own; standard library only."""

import hashlib
import importlib
import importlib.metadata
import json
import platform
import sys
from pathlib import Path

DISTRIBUTIONS = ("ray", "torch", "vllm", "megatron-core", "transformer-engine", "transformers", "nemo-rl")


def describe(modules: list[str]) -> dict:
    """Import modules and say which versions this Python holds.

    Args:
        modules: modules that must import; those without a dot are our packages, whose sources are digested.

    Returns:
        `python` (path), `versions` by distribution, `packages` (version, digest of the sources, folder) and `problems`.
    """
    packages, problems = {}, []
    for name in modules:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 whatever a broken installation raises is the finding
            problems.append(f"cannot import {name}: {type(error).__name__}: {error}")
            continue
        if "." not in name and module.__file__:
            folder = Path(module.__file__).parent
            version = getattr(module, "__version__", "without version")
            packages[name] = {"version": version, "digest": digest(folder), "folder": str(folder)}
    versions = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": sys.executable, "versions": versions, "packages": packages, "problems": problems}


def digest(folder: Path) -> str:
    """Return twelve digits of a package's sources: two checkouts of one version differ when their code does."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1:])))
