"""Turns NeMo-RL's arguments of `vllm.LLM` into those of an engine that serves packed weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from qarl_nemo.architecture import CONFIG_FILE, MEGATRON_FAMILIES, read_architecture
from qarl_nemo.checkpoints import model_quantization_config
from qarl_nemo.config import QarlConfig
from qarl_nemo.nemo_rl.checks.engine import argument_problems, plain_block
from qarl_nemo.nemo_rl.checks.engine_rules import NESTED
from qarl_nemo.refit.engine_settings import COMPILATION, kernel_choices, kernel_options

_EXTENSION = "qarl_nemo.nemo_rl.vllm_extension.QarlWorkerExtension"


def engine_arguments(given: Mapping[str, Any], qarl: QarlConfig) -> dict[str, Any]:
    """Return the arguments with which vLLM serves what the `qarl:` block says, in the arithmetic the learner follows.

    Args:
        given: NeMo-RL's arguments, including `vllm_kwargs`.
        qarl: the block.

    Raises:
        FileError: there is no config.json of a supported model.
        ValueError: settings under which another kernel, format or distribution would be served; all listed.
    """
    fmt, targets = qarl.served_format, qarl.targets
    problems = argument_problems(given, kernel_choices(fmt, targets))
    if problems:
        raise ValueError("policy.generation does not serve the `qarl:` block:\n  " + "\n  ".join(problems))
    arguments = dict(given) | {name: plain_block(given[name]) for name in NESTED if name in given}
    arguments |= kernel_options(fmt, targets)
    arguments["worker_extension_cls"] = _EXTENSION
    arguments["compilation_config"] = _compilation(given)
    # Logprobs of the distribution that was sampled from, at the sampling temperature, like the learner's.
    arguments["logprobs_mode"] = "processed_logprobs"
    quantization = model_quantization_config(fmt, _parameter_names(given["model"]), targets)
    if quantization is not None:
        arguments["hf_overrides"] = dict(given.get("hf_overrides") or {}) | {"quantization_config": quantization}
    return arguments


def _parameter_names(model: str) -> list[str]:
    file = Path(model) if Path(model).is_dir() else Path(hf_hub_download(model, CONFIG_FILE))
    return [name for name, _ in read_architecture(file, MEGATRON_FAMILIES).parameters()]


def _compilation(given: Mapping[str, Any]) -> dict[str, Any]:
    own = plain_block(given.get("compilation_config")) or {}
    # NeMo-RL's older switch for the compiler, which is off.
    own.pop("use_inductor", None)
    graphs = {} if given.get("enforce_eager") else {"cudagraph_mode": "FULL_DECODE_ONLY"}
    merged = graphs | own | COMPILATION
    merged["custom_ops"] = list(dict.fromkeys([*COMPILATION["custom_ops"], *(own.get("custom_ops") or [])]))
    return merged
