"""Makes a checked config from a YAML file and the command line's overrides."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from qarl_nemo.config.overrides import merge_overrides
from qarl_nemo.config.problems import ConfigError, validate
from qarl_nemo.config.references import stale_references
from qarl_nemo.config.yaml_file import read_yaml
from qarl_nemo.secrets import is_secret

Model = TypeVar("Model", bound=BaseModel)
# `${a.b}`, or a resolver with the key it looks up, `${oc.select:a.b}`.
_REFERENCE = re.compile(r"\$\{(?:[\w.]+:)?([^${}:,]*)")
_SHELL_NAME = re.compile(r"key '([A-Z_][A-Z0-9_]*)' not found|interpolation type ([A-Z_][A-Z0-9_]*)$")
_MAX_CHARS = 1 << 20


def load_config(path: Path, overrides: Sequence[str], model: type[Model]) -> Model:
    """Read a YAML with its `defaults:`, apply `a.b=c` overrides and validate strictly.

    Args:
        path: the YAML file.
        overrides: dotted assignments, applied in order.
        model: the pydantic model of the whole file.

    Raises:
        ConfigError: unreadable file, malformed override, unknown key (with the nearest legal one) or illegal value;
            all problems of a file are listed at once. A `${...}` that some runs of a comparison would not follow.
    """
    merged = merge_overrides(read_yaml(path, model), overrides, model)
    # Their values may hold secrets.
    keys = ", ".join(dict.fromkeys(override.partition("=")[0] for override in overrides))
    source = f"{path} with {keys} from the command line" if keys else str(path)
    if problems := stale_references(merged):
        raise ConfigError("\n  ".join([f"{source}: {len(problems)} problem(s)", *problems]))
    return validate(_resolve(merged, path), model, source=source)


def _resolve(values: dict[str, Any], path: Path) -> Any:
    """Replace every `${...}` by what it refers to, unless the result would grow without bound."""
    if _Size(values).of(values, ()) > _MAX_CHARS:
        raise ConfigError(f"{path}: with every ${{...}} filled in, it would have more than {_MAX_CHARS} characters")
    try:
        return OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        key = f" ({error.full_key})" if getattr(error, "full_key", None) else ""
        said = str(error).splitlines()[0]
        raise ConfigError(f"{path}: {said}{key}{_of_environment(said)}") from error


def _of_environment(said: str) -> str:
    """Return what to write where OmegaConf was given a shell's `${HOME}` or `${HOME:-x}`, which it takes for a key."""
    named = _SHELL_NAME.search(said)
    if named is None:
        return ""
    name = named[1] or named[2]
    # A secret's value has no place in a config.
    now = "" if is_secret(name) else f"${{oc.env:{name}}} for this shell's variable, or "
    return f"; ${{...}} names a key of this config: write {now}\\${{{name}}} to leave it to the shell that runs it"


class _Size:
    """The lengths of values once every `${...}` is replaced by what it refers to; each is measured once."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.known: dict[tuple[str, ...], int] = {}

    def of(self, value: Any, keys: tuple[str, ...]) -> int:
        """Measure a value.

        Args:
            value: as parsed.
            keys: its place in the config.

        Returns:
            Its length, characters and values together.
        """
        if keys not in self.known:
            self.known[keys] = 0  # Ends a circular reference, which OmegaConf then names.
            self.known[keys] = self._measure(value, keys)
        return self.known[keys]

    def _measure(self, value: Any, keys: tuple[str, ...]) -> int:
        if isinstance(value, dict):
            return 1 + sum(self.of(item, (*keys, str(key))) for key, item in value.items())
        if isinstance(value, list):
            return 1 + sum(self.of(item, (*keys, str(place))) for place, item in enumerate(value))
        if not isinstance(value, str):
            return 1
        return 1 + len(value) + sum(self._referred(text, keys) for text in _REFERENCE.findall(value))

    def _referred(self, text: str, keys: tuple[str, ...]) -> int:
        dots = len(text) - len(text.lstrip("."))
        start = keys[: len(keys) - dots] if dots else ()
        found: Any = self.values
        parts = (*start, *(part for part in re.split(r"[.\[\]]", text.lstrip(".")) if part))
        for part in parts:
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            else:
                return 0
        return self.of(found, parts)
