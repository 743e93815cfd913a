"""Checks vLLM's arguments, wherever they come from, and a running engine's settings against `engine_rules.py`."""

import difflib
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from qarl_nemo.nemo_rl.checks.engine_rules import ENVIRONMENT_RULES, GIVEN_BY_NEMO_RL, NESTED, NO_MATTER, RULES, Rule
from qarl_nemo.nemo_rl.checks.lines import yaml_text
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.refit.engine_settings import COMPILATION, ENVIRONMENT

_VLLM_KWARGS = "policy.generation.vllm_kwargs"
_VLLM_CFG = "policy.generation.vllm_cfg"
# NeMo-RL's own key -> the argument of vLLM that NeMo-RL makes from it.
_FROM_VLLM_CFG = {
    "precision": "dtype",
    "logprobs_mode": "logprobs_mode",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "enforce_eager": "enforce_eager",
}
# Blocks of an engine's settings, and whether NeMo-RL takes null for none.
_MAPPINGS = {_VLLM_CFG: False, f"{_VLLM_CFG}.env_vars": True, _VLLM_KWARGS: False}
_BLOCKS = (*NESTED, "hf_overrides")
_KNOWN = {*RULES, *NESTED, "hf_overrides", *(name for names in NO_MATTER.values() for name in names)}
# The values that switch off a pass of vLLM's compiler.
_OFF = (None, False, 0)


def malformed_blocks(config: Mapping[str, Any]) -> list[str]:
    """Say which blocks of engine settings are no mappings; nothing else can be checked with such a one.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        One line each: key, value, and what to set.
    """
    return [
        f"{key}={_text(value)}: not a mapping of settings; set one"
        for key, null in _MAPPINGS.items()
        if not isinstance(value := look_up(config, key, {}), Mapping) and not (null and value is None)
    ]


def given_arguments(generation: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments that NeMo-RL's worker will give vLLM, as far as a config determines them.

    Args:
        generation: NeMo-RL's `policy.generation` block.

    Returns:
        Arguments of `vllm.LLM` by name, and the config key from which each of them comes.
    """
    kwargs, own = generation.get("vllm_kwargs") or {}, generation.get("vllm_cfg") or {}
    arguments = dict(kwargs)
    places = {name: f"{_VLLM_KWARGS}.{name}" for name in kwargs}
    speculative = arguments.get("speculative_config")
    if isinstance(speculative, Mapping) and speculative.get("num_speculative_tokens") == 0:
        # NeMo-RL's way to switch it off.
        arguments["speculative_config"] = None
    for key, name in _FROM_VLLM_CFG.items():
        if own.get(key) is not None:
            arguments[name], places[name] = own[key], f"{_VLLM_CFG}.{key}"
    return arguments, places


def argument_problems(
    arguments: Mapping[str, Any], kernels: Mapping[str, tuple[str, ...]], places: Mapping[str, str] | None = None
) -> list[str]:
    """Say which arguments of `vllm.LLM` break the alignment of learner and engine, or refits.

    Args:
        arguments: arguments by name; blocks may be mappings, JSON, or the integer that vLLM takes for a compilation
            mode.
        kernels: `kernel_choices` of the format.
        places: the key that each comes from; `vllm_kwargs` for a missing name.

    Returns:
        One line each: key, value, why, and what to set.
    """
    places = places or {}
    problems = []
    for name, value in arguments.items():
        place = places.get(name, f"{_VLLM_KWARGS}.{name}")
        if name in _BLOCKS:
            problems += _block_problems(name, value, place, kernels)
        else:
            problems += _value_problems(name, name, value, place, kernels)
    return problems


def repeated_arguments(generation: Mapping[str, Any]) -> list[str]:
    """Say which arguments NeMo-RL would give vLLM twice (`policy.generation`), which ends the worker in a TypeError."""
    kwargs = generation.get("vllm_kwargs") or {}
    return [
        f"{_VLLM_KWARGS}.{name}={_text(kwargs[name])}: NeMo-RL gives vLLM this argument itself; set {instead}"
        for name, instead in GIVEN_BY_NEMO_RL.items()
        if name in kwargs
    ]


def environment_problems(environment: Mapping[str, str], where: str, *, forced: bool = False) -> list[str]:
    """Say which environment variables make vLLM compute in a way that the learner does not follow.

    Args:
        environment: variables that an engine will see.
        where: where they come from, for the message.
        forced: include those that QaRL's worker overwrites.
    """
    own = {name: Rule((value,), "QaRL's engines set it") for name, value in ENVIRONMENT.items()} if forced else {}
    return [
        f"{where}{name}={value}: {rule.why}; {_advice(rule.legal)}"
        for name, rule in (ENVIRONMENT_RULES | own).items()
        if (value := str(environment.get(name) or "")) and value.lower() not in rule.legal
    ]


def served_problems(vllm_config: Any, kernels: Mapping[str, str]) -> list[str]:
    """Say where a running engine's settings are not the required ones.

    Args:
        vllm_config: vLLM's `VllmConfig`, as its worker has it.
        kernels: `kernel_options` of the format.

    Returns:
        One line each: the place in `VllmConfig`, what was found, why it is wrong, and what is needed.
    """
    rules = [rule for rule in RULES.values() if rule.served]
    rules += [Rule((value,), "the learner follows it", f"kernel_config.{name}") for name, value in kernels.items()]
    problems = []
    for rule in rules:
        found: Any = vllm_config
        for part in str(rule.served).split("."):
            found = getattr(found, part, None)
        if not _is_legal(found, rule.legal):
            problems.append(f"VllmConfig.{rule.served}={_text(found)}: {rule.why}; needed: {_words(rule.legal)}")
    operators = vllm_config.compilation_config.custom_ops
    problems += _operator_problems(operators, "VllmConfig.compilation_config.custom_ops")
    missing = [name for name in COMPILATION["custom_ops"] if name not in operators]
    return problems + [f"VllmConfig.compilation_config.custom_ops: {name} is not among {operators}" for name in missing]


def plain_block(value: Any) -> dict[str, Any] | None:
    """Return a block of arguments as a dictionary.

    Args:
        value: a mapping, its JSON, None, or the integer that vLLM takes for `compilation_config.mode`.

    Returns:
        A new dictionary; None for any other kind of value.
    """
    if value is None or value == "":
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None
    return {"mode": value} if isinstance(value, int) and not isinstance(value, bool) else None


def _block_problems(name: str, value: Any, place: str, kernels: Mapping[str, tuple[str, ...]]) -> list[str]:
    block = plain_block(value)
    if block is None:
        return [f"{place}={_text(value)}: not a mapping of settings; set one"]
    problems = []
    for key, item in block.items():
        inner = f"{place}.{key}"
        if key == "custom_ops":
            problems += _operator_problems(item or (), inner)
        elif key == "pass_config":
            on = [each for each, chosen in (plain_block(item) or {}).items() if chosen not in _OFF]
            problems += [
                f"{inner}.{each}: {RULES['compilation_config.mode'].why}; remove it"
                for each in on
                if each != "eliminate_noops"
            ]
        elif name != "hf_overrides" or f"{name}.{key}" in RULES:
            problems += _value_problems(f"{name}.{key}", key, item, inner, kernels)
    return problems


def _value_problems(name: str, last: str, value: Any, place: str, kernels: Mapping[str, tuple[str, ...]]) -> list[str]:
    if last in kernels:
        why = "the learner follows another kernel for this format"
        legal = _is_legal(value, ("auto", *kernels[last]))
        return [] if legal else [f"{place}={_text(value)}: {why}; {_advice(kernels[last])}"]
    rule = RULES.get(name)
    if rule is not None:
        ok = _is_legal(value, rule.legal)
        return [] if ok else [f"{place}={_text(value)}: {rule.why}; {_advice(rule.legal)}"]
    block = name.partition(".")[0]
    if name in _KNOWN or (block != name and last in NESTED.get(block, ())) or _plain(value) is None:
        return []
    known = NESTED[block] if block != name else _KNOWN
    near = difflib.get_close_matches(last, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "remove it"
    return [f"{place}={_text(value)}: what it does to vLLM's arithmetic is not known; {hint}"]


def _operator_problems(operators: Iterable[Any], place: str) -> list[str]:
    wrong = [str(name) for name in operators if str(name) == "none" or str(name).startswith("-")]
    why = "the learner follows vLLM's own operators"
    return [f"{place}={wrong}: {why}, which this switches off; remove it"] if wrong else []


def _is_legal(value: Any, legal: tuple[Any, ...]) -> bool:
    plain = _plain(value)
    # A command line's 0 is an integer where vLLM has a float; a bool does not count as a number.
    return plain is None or any(plain == each and isinstance(plain, bool) == isinstance(each, bool) for each in legal)


def _plain(value: Any) -> Any:
    """Return a value in the form that rules use: enumerations by name, in lower case; None for anything empty."""
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, str):
        return value.lower() or None
    if isinstance(value, bool | int | float) or value is None:
        return value
    if isinstance(value, Iterable):
        return value if list(value) else None
    return str(value).removeprefix("torch.")


def _advice(legal: tuple[Any, ...]) -> str:
    return f"set {_words(legal)}" if legal else "remove it"


def _words(legal: tuple[Any, ...]) -> str:
    return " or ".join(map(_text, legal)) or "none"


def _text(value: Any) -> str:
    return yaml_text(value if value is None or isinstance(value, bool) else str(_plain(value)))
