"""A run's folder: new, to be resumed, or refused."""

from typing import Any

from omegaconf import OmegaConf

from qarl_nemo.config import ConfigError
from qarl_nemo.local.checkpoint import checkpoint_steps
from qarl_nemo.local.config import LocalConfig
from qarl_nemo.metrics.events import METRICS_FILE

# Keys that may change between the parts of a resumed run: they belong to no result. More or fewer threads are allowed,
# too, but sum in another order: bit-identical resumption needs the same num_threads.
_FREE_KEYS = (
    "run_dir",
    "grpo.max_num_steps",
    "policy.max_skipped_steps",
    "checkpointing.",
    "logger.",
    "num_threads",
    "compare",
)


def open_run_dir(config: LocalConfig) -> None:
    """Write config.yaml into a new run's folder, or check that one with results is of the same run.

    A run that failed before its first result (a wrong path, say) leaves a folder that a corrected config may take.

    Args:
        config: the resolved config.

    Raises:
        ConfigError: the folder holds another run; every key that differs is listed.
    """
    path = config.run_dir / "config.yaml"
    resolved = config.model_dump(mode="json", exclude={"compare"})
    if path.is_file() and _has_results(config):
        found = OmegaConf.to_container(OmegaConf.load(path))
        differing = _differences(_flatten(found), _flatten(resolved))
        if differing:
            raise ConfigError(
                f"{config.run_dir} holds a run with another config; resume it with the same one, or choose another "
                "run_dir=... Differing keys:\n  " + "\n  ".join(differing)
            )
    config.run_dir.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(OmegaConf.to_yaml(OmegaConf.create(resolved)))
    partial.replace(path)


def _has_results(config: LocalConfig) -> bool:
    metrics = config.run_dir / METRICS_FILE
    return bool(checkpoint_steps(config.run_dir)) or (metrics.is_file() and metrics.stat().st_size > 0)


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    keys = sorted(key for key in {*found, *wanted} if not key.startswith(_FREE_KEYS))
    return [
        f"{key}: there {found.get(key)!r}, now {wanted.get(key)!r}" for key in keys if found.get(key) != wanted.get(key)
    ]


def _flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix.removesuffix("."): values}
    return {k: v for key, value in values.items() for k, v in _flatten(value, f"{prefix}{key}.").items()}
