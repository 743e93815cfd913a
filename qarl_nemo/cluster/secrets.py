"""Secrets of a cluster run: named in its config, never written there, and refused where their values would be."""

import os
import re
from collections.abc import Iterable, Mapping

from qarl_nemo.config import ConfigError

_SECRET = r"(?:[A-Z0-9]+_)*(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_[A-Z0-9]+)*"
# These say where a secret lies.
_PLACES = ("_FILE", "_PATH", "_DIR", "_HOME")
_ASSIGNED = re.compile(rf"(?<![A-Z0-9_])({_SECRET})=(?![\"']?\$)[\"']?[^\s\"']", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Say whether an environment variable of this name is likely to hold a secret, as WANDB_API_KEY does."""
    return re.fullmatch(_SECRET, name.upper()) is not None and not name.upper().endswith(_PLACES)


def plain_secrets(env: Iterable[str], texts: Mapping[str, str]) -> list[str]:
    """Say where secrets would be written down.

    Args:
        env: names in the config's `env`.
        texts: keys whose values are shell words or lines, with those values.

    Returns:
        One sentence for each; no value is in it.
    """
    places = [f"env.{name}" for name in env if is_secret(name)]
    for key, text in texts.items():
        places += [f"{key} ({name}=...)" for name in _ASSIGNED.findall(text) if is_secret(name)]
    return [
        f"{place} looks like a secret, which job files and manifests would hold in plain text; name it in env_from"
        for place in places
    ]


def caller_values(names: Iterable[str]) -> dict[str, str]:
    """Take variables from the environment of the shell that launches.

    Args:
        names: which variables.

    Returns:
        Their values by name.

    Raises:
        ConfigError: some are not set; all are named.
    """
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(
            f"env_from.caller: {', '.join(missing)} not set in this shell; export them and launch again, or remove them"
        )
    return {name: os.environ[name] for name in names}
