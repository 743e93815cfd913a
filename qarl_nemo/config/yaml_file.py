"""Reads a YAML file with its `defaults:`, in bounded time and memory whatever it holds; writes one."""

import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from qarl_nemo.config.kinds import without_meaningless
from qarl_nemo.config.models import annotations
from qarl_nemo.config.problems import ConfigError
from qarl_nemo.files import FileError, read_text, write_atomic
from qarl_nemo.installation import shipped_config, shipped_configs

# Arms of a comparison are merged onto the rest of the config later, so their `_override_` marks must survive.
_MERGED_LATER = ("arms",)
# Labels say which run a file is, and one that builds on it is another.
_NOT_INHERITED = ("run",)
# For comparison: NeMo-RL's largest config has 20 kB, 400 values and 6 levels, and builds on 3 others.
_MAX_CHARS, _MAX_VALUES, _MAX_LEVELS, _MAX_FILES = 1 << 18, 20_000, 40, 20

# A reference's begin, and the backslashes before it, of which two stand for one there.
_REFERENCE = re.compile(r"(\\*)\$\{")
# The same behind what `literal` puts before it: an odd number of backslashes.
_ESCAPED = re.compile(r"((?:\\\\)*)\\\$\{")
# To YAML 1.1 the first is octal, or text where it has an 8 or a 9, and the second counts in sixties.
_NOT_DECIMAL = re.compile(r"[-+]?(?:0[0-9_]+|[1-9][0-9_]*(?::[0-5]?[0-9])+)")
# Whatever any of YAML's versions reads as a number; also dates and such, which are text in quotes or without.
_NUMBER = re.compile(r"[-+]?\.?[0-9][\w.+-]*")
# A plain `<<`.
_MERGE = "tag:yaml.org,2002:merge"
# What PyYAML calls the text that it parses.
_UNNAMED = 'in "<unicode string>", '

# libyaml's loader parses a hundred times as fast, if PyYAML was built with it.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path, model: type[BaseModel] | None = None) -> dict[str, Any]:
    """Read a YAML; its `defaults:` are merged below it, and `_override_` replaces a block.

    They are one path or a list, relative to the file, or names of shipped configs without `.yaml`, such as `demo`.
    Their `run:` block, how reports call a run, is theirs alone.

    Args:
        path: the file.
        model: the pydantic model of the whole file. Where the file chooses another kind of block than its defaults
            (`objective: gspo`), that block starts anew, without the defaults' keys; None keeps them.

    Returns:
        The merged, unvalidated config, with its `${...}` as they are written.

    Raises:
        ConfigError: the file or one of its defaults is missing, malformed, too large, or refers to itself.
    """
    return _read(_resolved(path), (), {}, [model] if model else [])


def write_yaml(path: Path, values: Mapping[str, Any]) -> None:
    """Write a config that `read_yaml` reads.

    Args:
        path: final place; its folder must exist.
        values: plain values.

    Raises:
        FileError: the disk is full, or the folder may not be written.
    """
    write_atomic(path, OmegaConf.to_yaml(OmegaConf.create(dict(values))))


def literal(value: Any) -> Any:
    """Return what `load_config` reads as this value, in which `${...}` refers to nothing.

    Args:
        value: plain values, as a checked config holds them.
    """
    if isinstance(value, dict):
        return {key: literal(each) for key, each in value.items()}
    if isinstance(value, list):
        return [literal(each) for each in value]
    return _REFERENCE.sub(r"\1\1\${", value) if isinstance(value, str) else value


def plain(value: Any) -> Any:
    """Return the value that `literal` was given; texts in which no `${...}` is escaped stay as they are.

    Args:
        value: plain values, as `read_yaml` returns them.
    """
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return _ESCAPED.sub(_unescaped, value) if isinstance(value, str) else value


def _unescaped(escaped: re.Match[str]) -> str:
    return escaped[1][: len(escaped[1]) // 2] + "${"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested config's values by their dotted keys, each with a prefix before it."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def merge_mappings(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings; one that holds `_override_: true` replaces what it covers, as in NeMo-RL's configs.

    Args:
        below: the defaults.
        above: values that win.

    Returns:
        A new mapping without `_override_` keys.

    Raises:
        ConfigError: an `_override_` is neither true nor false.
    """
    replace = above.get("_override_", False)
    if not isinstance(replace, bool):
        raise ConfigError(f"_override_ must be true or false, not {str(replace)[:80]!r}")
    merged = {} if replace else dict(below)
    for key, value in above.items():
        if key in _MERGED_LATER:
            merged[key] = value
        elif isinstance(value, dict):
            under = merged.get(key)
            merged[key] = merge_mappings(under if isinstance(under, dict) else {}, value)
        elif key != "_override_":
            merged[key] = value
    return merged


def check_yaml(text: str) -> None:
    """Refuse YAML that would grow without bound, before it is built, and numbers that it reads as nobody does.

    An alias counts each time it is used.

    Raises:
        ConfigError: it holds too many values, or nests too deep; or a number like 010, which is 8 to YAML.
        YAMLError: it is not YAML.
    """
    sizes: dict[str | None, int] = {}
    open_blocks: list[list[Any]] = [[None, 0]]
    for event in yaml.parse(text, Loader=_Loader):
        anchor, size = getattr(event, "anchor", None), 0
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _NOT_DECIMAL.fullmatch(event.value):
            raise ConfigError(
                f"line {event.start_mark.line + 1}: {event.value} is no decimal number in YAML; write one without "
                f"leading zeros and colons, or '{event.value}' in quotes for text"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            open_blocks.append([anchor, 0])
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_blocks.pop()
        elif isinstance(event, yaml.AliasEvent):
            anchor, size = None, sizes.get(anchor, 0)
        if isinstance(event, yaml.ScalarEvent | yaml.AliasEvent | yaml.CollectionEndEvent):
            open_blocks[-1][1] += size + 1
            sizes[anchor] = size
        if open_blocks[-1][1] > _MAX_VALUES or len(open_blocks) > _MAX_LEVELS:
            raise ConfigError(
                f"line {event.start_mark.line + 1}: a config has at most {_MAX_VALUES} values, aliases written out, "
                f"and {_MAX_LEVELS} levels"
            )


def quote_numbers(text: str, model: type[BaseModel], above: Sequence[str] = ()) -> str:
    """Return YAML whose blocks of texts under names of one's own, such as `env`, have numbers in quotes: 3.10 stays so.

    Args:
        text: YAML that `check_yaml` lets pass.
        model: the pydantic model of the whole config.
        above: the keys of the text's place in it.
    """
    text = text.removeprefix("\ufeff")  # libyaml does not count it
    found = {node.end_mark.index: node.value for node in _numbers(yaml.compose(text, _Loader), [*above], [model])}
    for end, number in sorted(found.items(), reverse=True):
        text = f"{text[: end - len(number)]}'{number}'{text[end:]}"
    return text


def _numbers(node: Any, keys: list[str], models: list[type[BaseModel]]) -> Iterator[yaml.ScalarNode]:
    kinds = annotations(keys, models)
    # The model ends what an alias to a block around it would repeat.
    if not isinstance(node, yaml.MappingNode) or (keys and not kinds):
        return
    for key, value in (pair for mapping in _with_merged(node) for pair in mapping.value):
        if dict[str, str] not in kinds:
            yield from _numbers(value, [*keys, str(key.value)], models)
        elif isinstance(value, yaml.ScalarNode) and not value.style and _NUMBER.fullmatch(value.value):
            yield value


def _with_merged(node: Any, around: tuple[Any, ...] = ()) -> Iterator[yaml.MappingNode]:
    """Yield a mapping, and those that its `<<` keys merge into it; YAML's reader refuses what cannot be merged."""
    if not isinstance(node, yaml.MappingNode) or node in around:
        return
    yield node
    for key, value in node.value:
        if key.tag == _MERGE:
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _with_merged(merged, (*around, node))


def _read(
    path: Path, above: tuple[Path, ...], known: dict[Path, dict[str, Any]], models: list[type[BaseModel]]
) -> dict[str, Any]:
    if path in above:
        raise ConfigError(f"defaults form a circle: {' -> '.join(map(str, (*above, path)))}")
    if path not in known:
        if len(above) + len(known) >= _MAX_FILES:
            raise ConfigError(
                f"{path}, named in defaults of {above[-1]}: a config builds on at most {_MAX_FILES} files"
            )
        own = _load(path, above, models)
        merged: dict[str, Any] = {}
        for parent in _parents(own, path):
            below = _read(parent, (*above, path), known, models)
            merged = _merge(merged, {key: below[key] for key in below if key not in _NOT_INHERITED}, models)
        # OmegaConf says what any container becomes; this one is a mapping.
        values: Any = OmegaConf.to_container(own)
        known[path] = _merge(merged, values, models)
    return known[path]


def _merge(below: dict[str, Any], above: dict[str, Any], models: list[type[BaseModel]]) -> dict[str, Any]:
    return merge_mappings(without_meaningless(below, above, models, anew=True), above)


def _load(path: Path, above: tuple[Path, ...], models: list[type[BaseModel]]) -> DictConfig:
    named = f", named in defaults of {above[-1]}" if above else ""
    if not os.path.lexists(path):
        raise ConfigError(f"no config file {path}{named}{_found_elsewhere(path) if above else ''}")
    try:
        text = read_text(path, "a YAML config")
    except FileError as error:
        raise ConfigError(f"{error}{named}") from error
    if len(text) > _MAX_CHARS:
        raise ConfigError(f"{path} has {len(text)} characters; a config has at most {_MAX_CHARS}")
    try:
        check_yaml(text)
        for model in models:
            text = quote_numbers(text, model)
        own = OmegaConf.load(io.StringIO(text))
    except ConfigError as error:
        raise ConfigError(f"{path}, {error}") from error
    except OSError:
        own = None  # a single word or number
    except Exception as error:  # YAML scanners raise unrelated types
        raise ConfigError(f"{path} is not valid YAML: {str(error).replace(_UNNAMED, '')}") from error
    if not isinstance(own, DictConfig):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    return own


def _found_elsewhere(path: Path) -> str:
    shipped = next((config for config in shipped_configs().values() if config.name == path.name), None)
    return f", relative to it{f'; the shipped one is {shipped}' if shipped else ''}"


def _parents(own: DictConfig, path: Path) -> list[Path]:
    """Take `defaults` out of a config and return the files it names."""
    try:
        named = own.pop("defaults", [])
        names = [named] if isinstance(named, str) else named
        legal = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: defaults: {str(error).splitlines()[0]}") from error
    if not legal:
        raise ConfigError(f"defaults of {path} must be one path or a list of paths, not {str(named)[:80]}")
    return [_parent(path, name) for name in names]


def _parent(path: Path, name: str) -> Path:
    beside = _resolved(path.parent / name)
    if os.path.lexists(beside) and not beside.is_dir():
        return beside
    # A file that is gone or misspelt must not turn into another one without a word.
    named_shipped = None if "/" in name or name.endswith(".yaml") else shipped_config(Path(name))
    return named_shipped or beside


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be a config file: {error}") from error
