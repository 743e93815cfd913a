"""The `qarl:` block and how every YAML is read: `defaults:`, `a.b=c` overrides, strict models. Imports no torch."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Alignment = Literal["aligned", "rollout_only", "none"]


# Arms of a comparison are merged onto the rest of the config later, so their `_override_` marks must survive.
_MERGED_LATER = ("arms",)


class StrictModel(BaseModel):
    """A config block: unknown keys are errors, values are never rewritten."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class QarlConfig(StrictModel):
    """What is quantized, how, and whether the learner executes it."""

    alignment: Alignment = "aligned"
    """`aligned`: the learner executes what it publishes (QaRL); `rollout_only`: quantized rollouts, BF16 learner;
    `none`: BF16 on both sides."""
    format: str = Field("w4a16", pattern=r"^(w[2-8]a16|w4a8|fp8_block|fp8_channel|bf16)$")
    """w4a16 | w4a8 | fp8_block | fp8_channel | bf16, or an experimental w{2..8}a16."""
    group_size: int | None = Field(None, description="Elements per scale along K: 128, 64, 32; integer formats only.")
    scale_convention: Literal["narrow_range", "full_range"] | None = None
    """Integer grid: amax/7 on [-7, 7] (`narrow_range`) or amax/7.5 on [-8, 7] (`full_range`)."""
    targets: tuple[Literal["experts", "attention", "mlp"], ...] = Field(("experts",), min_length=1)
    """Which linears are quantized; router, norms, embeddings and lm_head never are."""
    backward: Literal["dequantized", "high_precision"] = "dequantized"
    """Weight of the input gradient: the one that ran, or the master."""
    keep_operand: bool = True
    """Keep what the learner's GEMMs multiply until the weights change; false unpacks it at each use, so that only the
    packed tensors stay in memory."""
    router_replay: bool = True
    """The learner uses the experts the rollout engine chose."""

    @model_validator(mode="after")
    def none_means_bf16(self) -> "QarlConfig":
        """Tie `alignment: none` to `format: bf16`."""
        if (self.alignment == "none") != (self.format == "bf16"):
            raise ValueError(
                f"alignment={self.alignment!r} with format={self.format!r}: `none` means BF16 on both sides, so "
                "alignment=none and format=bf16 go together"
            )
        return self


class ConfigError(ValueError):
    """A config that cannot be used; the message lists every problem."""


Model = TypeVar("Model", bound=BaseModel)


def load_config(path: Path, overrides: Sequence[str], model: type[Model]) -> Model:
    """Read a YAML with its `defaults:`, apply `a.b=c` overrides and validate strictly.

    Args:
        path: the YAML file.
        overrides: dotted assignments, applied in order.
        model: the pydantic model of the whole file.

    Returns:
        The validated config.

    Raises:
        ConfigError: unreadable file, malformed override, unknown key (with the nearest legal one) or illegal value;
            all problems of a file are listed at once.
    """
    merged = merge_overrides(read_yaml(path), overrides)
    try:
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error}") from error
    return validate(values, model, source=str(path))


def read_yaml(path: Path, _seen: tuple[Path, ...] = ()) -> DictConfig:
    """Read a YAML; `defaults:` (one path or a list, relative to the file) are merged below it, `_override_` replaces.

    Args:
        path: the YAML file.

    Returns:
        The merged, unvalidated config.

    Raises:
        ConfigError: the file or one of its defaults is missing, malformed or refers to itself.
    """
    path = path.resolve()
    if path in _seen:
        raise ConfigError(f"defaults form a circle: {' -> '.join(map(str, (*_seen, path)))}")
    if not path.is_file():
        raise ConfigError(f"no config file {path}" + (f", named in defaults of {_seen[-1]}" if _seen else ""))
    try:
        own = OmegaConf.load(path)
    except Exception as error:  # YAML scanners raise a family of unrelated types
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(own, DictConfig):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    parents = own.pop("defaults", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, Sequence) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"defaults of {path} must be one path or a list of paths, not {parents!r}")
    merged: dict[str, Any] = {}
    for parent in parents:
        merged = merge_mappings(merged, OmegaConf.to_container(read_yaml(path.parent / parent, (*_seen, path))))
    return OmegaConf.create(merge_mappings(merged, OmegaConf.to_container(own)))


def merge_mappings(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings; one that holds `_override_: true` replaces what it covers, as in NeMo-RL's configs.

    Args:
        below: the defaults.
        above: what wins.

    Returns:
        A new mapping without `_override_` keys.
    """
    replace = above.get("_override_", False)
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


def merge_overrides(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Apply `a.b=c` assignments; as in a file, `a._override_=true` empties block `a` first.

    Args:
        config: where they apply.
        overrides: the assignments, in order.

    Returns:
        The merged config.

    Raises:
        ConfigError: assignments without `=` or with a value that is not YAML; all are listed.
    """
    merged = OmegaConf.to_container(config)
    assert isinstance(merged, dict)
    malformed = []
    for text in overrides:
        try:
            assigned = None if text.startswith("-") else _assignment(text)
        except (OmegaConfBaseException, yaml.YAMLError):
            assigned = None
        if assigned is None:
            malformed.append(text)
        else:
            merged = merge_mappings(merged, assigned)
    if malformed:
        raise ConfigError(f"overrides must look like a.b=c, c being YAML; not usable: {', '.join(malformed)}")
    return OmegaConf.create(merged)


def _assignment(text: str) -> dict[str, Any] | None:
    key, equals, _ = text.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        return None
    return OmegaConf.to_container(OmegaConf.from_dotlist([text]))


def validate(values: Any, model: type[Model], *, source: str) -> Model:
    """Validate plain values against a strict model.

    Args:
        values: nested dictionaries and lists.
        model: the pydantic model.
        source: where the values come from, for the error.

    Returns:
        The validated config.

    Raises:
        ConfigError: every unknown key and illegal value, one a line.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [_explain(problem, model) for problem in error.errors()]
        raise ConfigError(f"{source}: {len(lines)} problem(s)\n  " + "\n  ".join(lines)) from error


def _explain(problem: Any, model: type[BaseModel]) -> str:
    location, models = _follow([str(part) for part in problem["loc"]], model)
    dotted, kind = ".".join(location), problem["type"]
    if kind == "extra_forbidden":
        return f"unknown key {dotted!r}: {_hint(location[-1], sorted({key for m in models for key in m.model_fields}))}"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        # Named by a key, or by the function that reads it, which is called like the key.
        key = problem["ctx"]["discriminator"].strip("'()")
        if kind == "union_tag_not_found":
            legal = [tag for m in models for tag in get_args(m.model_fields[key].annotation)]
            return f"{dotted}.{key} is missing and says which keys {dotted} has; legal: {', '.join(legal)}"
        legal = [tag.strip(" '") for tag in problem["ctx"]["expected_tags"].split(",")]
        return f"unknown {dotted}.{key} {problem['ctx']['tag']!r}: {_hint(problem['ctx']['tag'], legal)}"
    return f"{dotted or 'config'}: {problem['msg'].removeprefix('Value error, ')}"


def _hint(wrong: str, legal: list[str]) -> str:
    nearest = difflib.get_close_matches(wrong, legal, n=1, cutoff=0.0)
    return (f"did you mean {nearest[0]!r}? " if nearest else "") + f"legal here: {', '.join(legal)}"


def _follow(location: list[str], model: type[BaseModel]) -> tuple[list[str], list[type[BaseModel]]]:
    """Follow a pydantic error location to the keys a user wrote and the models around its last part."""
    keys, models = [], [model]
    for depth, part in enumerate(location):
        tagged = [m for m in models if any(part in get_args(f.annotation) for f in m.model_fields.values())]
        inside = [
            m for held in models if part in held.model_fields for m in _models_in(held.model_fields[part].annotation)
        ]
        if tagged and not inside and depth + 1 < len(location):
            # pydantic names a union's member by its tag (`loss_fn.tbpo.clip_low`), which the user's path does not hold.
            models = tagged
            continue
        keys.append(part)
        models = inside or models
    return keys, models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]
