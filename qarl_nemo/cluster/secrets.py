"""Secrets of a cluster run: the config names them and never holds their values, which are refused there."""

import os
from collections.abc import Iterable, Mapping

from qarl_nemo.config import ConfigError
from qarl_nemo.secrets import assigned_secrets, is_secret


def plain_secrets(env: Iterable[str], texts: Mapping[str, str]) -> list[str]:
    """Say where secrets would be written down.

    Args:
        env: names in the config's `env`.
        texts: shell words and lines of the config, by key.

    Returns:
        One sentence for each, without any value.
    """
    places = [f"env.{name}" for name in env if is_secret(name)]
    for key, text in texts.items():
        places += [f"{key} ({name}{' ' if name.startswith('-') else '='}...)" for name in assigned_secrets(text)]
    return [
        f"{place} looks like a secret, which job files and manifests would hold in plain text; name it in env_from"
        for place in places
    ]


def not_set(names: Iterable[str]) -> list[str]:
    """Return those variables that the launching shell does not have."""
    return [name for name in names if name not in os.environ]


def caller_values(names: Iterable[str]) -> dict[str, str]:
    """Take variables from the environment of the launching shell.

    Raises:
        ConfigError: variables are not set; all are named.
    """
    if missing := not_set(names):
        raise ConfigError(
            f"env_from.caller: {', '.join(missing)} not set in this shell; export them and launch again, or remove them"
        )
    return {name: os.environ[name] for name in names}
