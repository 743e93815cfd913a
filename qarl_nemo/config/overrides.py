"""The command line's `a.b=c` overrides: values are read by their key's type, and a block may change its kind."""

from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from qarl_nemo.config.kinds import without_meaningless
from qarl_nemo.config.models import annotations
from qarl_nemo.config.problems import ConfigError
from qarl_nemo.config.yaml_file import check_yaml, merge_mappings, quote_numbers

# `compare.arms={...}` replaces all arms, as in a file; an assignment that goes deeper means one of them.
_INTO_AN_ARM = "compare.arms."


def merge_overrides(config: dict[str, Any], overrides: Sequence[str], model: type[BaseModel]) -> dict[str, Any]:
    """Apply `a.b=c` assignments; as in a file, `a._override_=true` empties block `a` first.

    Values are YAML, but text stays text if the key holds text. If an assignment turns a block into another kind
    (`loss_fn.objective=gspo`), the file's keys that only other kinds have are dropped; those that both have keep the
    file's values, unlike where a file or an arm changes the kind. A leading `+` or `++`, as NeMo-RL's command line has
    it, means nothing.

    Args:
        config: the config they apply to.
        overrides: the assignments, in order.
        model: the pydantic model of the whole config.

    Raises:
        ConfigError: assignments without `=` or with a value that is not YAML, all listed, or one that grows too large.
    """
    # NeMo-RL's command line marks keys that its YAML lacks by a plus; here no key needs it.
    overrides = [text.removeprefix("+").removeprefix("+") for text in overrides]
    unwritable = [ascii(text.partition("=")[0]) for text in overrides if not _is_unicode(text)]
    if unwritable:
        raise ConfigError(f"overrides whose text is not UTF-8, which no config can hold: {', '.join(unwritable)}")
    assigned, malformed, arms = [], [], _arms(config)
    for text in overrides:
        try:
            assigned.append(_assignment(text, model, arms))
        except ConfigError as error:
            raise ConfigError(f"the override of {text.partition('=')[0]}: {error}") from None
        except (OmegaConfBaseException, yaml.YAMLError, ValueError):
            malformed.append(text)
    if malformed:
        raise ConfigError(f"overrides must look like a.b=c, c being YAML; not usable: {', '.join(malformed)}")
    said: dict[str, Any] = {}
    for assignment in assigned:
        said = merge_mappings(said, assignment)
    merged = without_meaningless(config, said, [model], anew=False)
    for key, assignment in zip(overrides, assigned, strict=True):
        merge = _merge_marked if key.startswith(_INTO_AN_ARM) else merge_mappings
        merged = merge(merged, assignment)
    return merged


def _merge_marked(below: Any, above: Any) -> Any:
    """Merge as `merge_mappings` does, but keep `_override_` marks and what else the file has on arms."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merge_marked(below.get(key), value) for key, value in above.items()}


def _is_unicode(text: str) -> bool:
    # The command line's other bytes reach Python as halves of surrogate pairs.
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _arms(config: dict[str, Any]) -> list[str]:
    compare = config.get("compare")
    arms = compare.get("arms") if isinstance(compare, dict) else None
    return [str(arm) for arm in arms] if isinstance(arms, dict) else []


def _parts(key: str, arms: list[str]) -> list[str]:
    # Arms have names in plain words, in which a dot is no separator (`lr 1.5`).
    rest = key.removeprefix(_INTO_AN_ARM)
    named = [arm for arm in arms if rest != key and f"{rest}.".startswith(f"{arm}.")]
    if not named:
        return key.split(".")
    arm = max(named, key=len)
    inside = rest.removeprefix(arm).split(".")[1:]
    return [*_INTO_AN_ARM.rstrip(".").split("."), arm, *inside]


def _assignment(text: str, model: type[BaseModel], arms: list[str]) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    keys = _parts(key, arms)
    if text.startswith("-") or not equals or not all(part.strip() for part in keys):
        raise ValueError(text)
    if _is_text(value, annotations(keys, [model])):
        return _nested(keys, value)
    check_yaml(value)
    value = quote_numbers(value, model, keys)
    if keys != key.split("."):
        only: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
        return _nested(keys, only["value"])
    values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={value}"]))
    return values


def _is_text(value: str, kinds: list[Any]) -> bool:
    """Tell whether a key of these types takes a value as it is written; quoted text and null are read as YAML."""
    holds = {part for kind in kinds for part in (get_args(kind) if isinstance(kind, UnionType) else (kind,))}
    if not holds or not holds <= {str, Path, type(None)}:
        return False
    return not value.startswith(("'", '"')) and (value != "null" or type(None) not in holds)


def _nested(keys: list[str], value: Any) -> dict[str, Any]:
    return {keys[0]: _nested(keys[1:], value) if len(keys) > 1 else value}
