"""From NeMo-RL's arguments of `vllm.LLM` to those of an engine that serves packed weights."""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.checkpoints import model_quantization_config
from qarl_nemo.checkpoints.architecture import parameter_names
from qarl_nemo.nemo.rl.formats import served_format
from qarl_nemo.refit.engine_settings import COMPILATION, kernel_options

_EXTENSION = "qarl_nemo.nemo.rl.vllm_extension.QarlWorkerExtension"


def engine_arguments(given: Mapping[str, Any], qarl: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with which vLLM serves what the `qarl:` block says, by the arithmetic the learner follows.

    Args:
        given: NeMo-RL's arguments; `vllm_kwargs` are in them.
        qarl: the block, as a plain mapping.

    Returns:
        New arguments.

    Raises:
        ValueError: settings in `vllm_kwargs` under which another kernel or another format would be served; all listed.
    """
    fmt, targets = served_format(qarl), qarl["targets"]
    wanted: dict[str, Any] = dict(kernel_options(fmt, targets))
    _require_free(given, wanted)
    arguments = dict(given) | wanted
    arguments["worker_extension_cls"] = _EXTENSION
    arguments["compilation_config"] = _compilation(given)
    # Rewards are paid for what was sampled: at the sampling temperature, as the learner's log-probabilities are.
    arguments.setdefault("logprobs_mode", "processed_logprobs")
    quantization = model_quantization_config(fmt, parameter_names(given["model"]), targets)
    if quantization is not None:
        arguments["hf_overrides"] = dict(given.get("hf_overrides") or {}) | {"quantization_config": quantization}
    return arguments


def _require_free(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    problems = [
        f"vllm_kwargs.{name}={given[name]!r}: this format is served by {value!r}; remove the key or set 'auto'"
        for name, value in wanted.items()
        if given.get(name) not in (None, "auto", value)
    ]
    if given.get("quantization") is not None:
        problems.append(f"vllm_kwargs.quantization={given['quantization']!r}: `qarl.format` says what is served")
    if (given.get("hf_overrides") or {}).get("quantization_config"):
        problems.append("hf_overrides.quantization_config: `qarl.format` says what is served")
    if problems:
        raise ValueError("policy.generation does not serve the `qarl:` block:\n  " + "\n  ".join(problems))


def _compilation(given: Mapping[str, Any]) -> dict[str, Any]:
    own = dict(given.get("compilation_config") or {})
    merged = COMPILATION | ({} if given.get("enforce_eager") else {"cudagraph_mode": "FULL_DECODE_ONLY"}) | own
    merged["custom_ops"] = list(dict.fromkeys([*COMPILATION["custom_ops"], *own.get("custom_ops", [])]))
    return merged
