"""NeMo-RL settings that contradict a `qarl:` block: they run unquantized, quantize twice, or use another objective."""

import os
from collections.abc import Mapping
from typing import Any

from qarl_formats import get_format, served_formats
from qarl_nemo.files import FileError
from qarl_nemo.nemo_rl.checks.attention import attention_conflicts
from qarl_nemo.nemo_rl.checks.batches import count_problems
from qarl_nemo.nemo_rl.checks.data import data_conflicts
from qarl_nemo.nemo_rl.checks.engine import (
    argument_problems,
    environment_problems,
    given_arguments,
    malformed_blocks,
    repeated_arguments,
)
from qarl_nemo.nemo_rl.checks.folders import folder_conflicts
from qarl_nemo.nemo_rl.checks.layout import layout_conflicts
from qarl_nemo.nemo_rl.checks.learning_rate import schedule_conflicts
from qarl_nemo.nemo_rl.checks.lines import problem_line, yaml_text
from qarl_nemo.nemo_rl.checks.loop import loop_conflicts
from qarl_nemo.nemo_rl.checks.memory import memory_conflicts
from qarl_nemo.nemo_rl.checks.model_overrides import override_conflicts
from qarl_nemo.nemo_rl.checks.muon import muon_conflicts
from qarl_nemo.nemo_rl.checks.objective import objective_conflicts
from qarl_nemo.nemo_rl.checks.optimizer import optimizer_conflicts
from qarl_nemo.nemo_rl.checks.resume import metric_conflicts, resume_conflicts, save_time_conflicts
from qarl_nemo.nemo_rl.checks.rewards import reward_conflicts
from qarl_nemo.nemo_rl.checks.sequence_lengths import length_conflicts
from qarl_nemo.nemo_rl.checks.validation import stop_metric_conflicts, validation_batch_conflicts
from qarl_nemo.nemo_rl.lookup import ABSENT, look_up
from qarl_nemo.nemo_rl.model_shapes import read_model, shape_conflicts, tokenizer_conflicts
from qarl_nemo.nemo_rl.optimizer_dtypes import OPTIMIZER, dtype_conflicts
from qarl_nemo.refit.engine_settings import kernel_choices

_OFF = (None, False)
# Key -> (legal values, why); a key that is absent has NeMo-RL's default, which is legal.
_REQUIRED: dict[str, tuple[tuple[Any, ...], str]] = {
    "policy.megatron_cfg.enabled": ((True,), "the aligned learner is a Megatron model"),
    "policy.dtensor_cfg.enabled": (_OFF, "the aligned learner is a Megatron model"),
    "policy.precision": (("bfloat16",), "master weights and activations are BF16"),
    "policy.quant_cfg": ((None,), "ModelOpt would quantize a second time"),
    "policy.megatron_cfg.fp8_cfg.enabled": (_OFF, "Transformer-Engine would quantize a second time"),
    "policy.megatron_cfg.optimizer.fp16": (_OFF, "FP16 with loss scaling gives NaN gradients; masters are BF16"),
    # Megatron's Muon would step the BF16 weights themselves, in which small steps round away, and say nothing.
    "policy.megatron_cfg.optimizer.bf16": ((True,), "the optimizer would keep no FP32 masters of the BF16 weights"),
    "policy.megatron_cfg.peft.enabled": (
        _OFF,
        "NeMo-RL merges adapters into BF16 weights before each refit; adapters on a packed base are policy.lora of "
        "qarl train",
    ),
    "policy.megatron_cfg.mtp_num_layers": ((None, 0), "multi-token prediction layers are not published"),
    "policy.megatron_cfg.virtual_pipeline_model_parallel_size": ((None, 1), "weights are published from one chunk"),
    "policy.draft.enabled": (_OFF, "draft weights are not published"),
    "policy.generation.backend": (("vllm",), "packed weights are refitted into vLLM"),
    "policy.generation.real_quant": (_OFF, "ModelOpt would quantize a second time"),
    "policy.generation.quant_cfg": ((None, "qarl"), "ModelOpt would quantize a second time; QaRL sets this key itself"),
    "policy.generation.bad_words": ((None, []), "the learner's distribution has them"),
    "policy.generation.refit_transport": ((None,), "this transport carries BF16 weights only"),
    "policy.generation.vllm_cfg.kv_cache_dtype": (("auto",), "the learner's attention is BF16"),
    "policy.generation.vllm_cfg.use_deep_gemm": (_OFF, "DeepGEMM rounds scales to powers of two"),
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": ((None, 0), "qarl.targets says what is quantized"),
    "policy.generation.vllm_cfg.num_last_layers_in_bf16": ((None, 0), "qarl.targets says what is quantized"),
    "policy.generation.vllm_kwargs.hf_overrides": (
        (None, {}),
        "NeMo-RL replaces it by policy.hf_config_overrides: set that one",
    ),
    "policy.hf_config_overrides.quantization_config": ((None,), "the learner would be converted with it"),
    "policy.refit_buffer_size_gb": ((None,), "qarl.layerwise_refit bounds what a refit holds beside the weights"),
    "env.should_use_nemo_gym": (_OFF, "NeMo-Gym's environments have a launcher of their own, which this is not"),
    "on_policy_distillation.enabled": (
        _OFF,
        "only NeMo-Gym's environments have teachers, and a launcher of their own, which this is not",
    ),
    "grpo.invalid_tool_call_advantage": ((None,), "only NeMo-Gym's environments find such answers"),
    "grpo.malformed_thinking_advantage": ((None,), "only NeMo-Gym's environments find such answers"),
    "grpo.async_grpo.in_flight_weight_updates": (_OFF, "a response is of one weight version only"),
    "data_plane.enabled": (_OFF, "packed refits go through NeMo-RL's own policy class"),
}
# What NeMo-RL requires where logits and log-probabilities are computed in one, except for the last: it would divide
# log-probabilities by the temperature, as it divides logits.
_FUSED_LOGPROBS = {
    "policy.sequence_packing.enabled": False,
    "policy.megatron_cfg.context_parallel_size": 1,
    "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather": False,
    "policy.generation.temperature": 1.0,
}
# vLLM 0.25.1 samples at this temperature where a lower one is asked for (`SamplingParams.__post_init__`).
_LOWEST_TEMPERATURE = 0.01
# Sampling that leaves no token out, first in the words of its default.
_UNFILTERED = {"policy.generation.top_p": (1.0, None), "policy.generation.top_k": (None, -1)}
_FUSED = "policy.megatron_cfg.use_fused_linear_logprobs"
_PACKING = "policy.sequence_packing.enabled"
# NeMo-RL's, in whatever case; it looks for one when the first batch is packed, after its rollouts.
_PACKERS = ("concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing")
# What NeMo-RL requires of dynamic batches, once workers start.
_DYNAMIC = {_PACKING: False, "policy.megatron_cfg.pipeline_model_parallel_size": 1}


def find_conflicts(config: Mapping[str, Any], qarl: Any) -> list[str]:
    """Say which NeMo-RL settings conflict with a `qarl:` block.

    Args:
        config: the whole config, as nested dictionaries.
        qarl: its checked `NemoQarlConfig`.

    Returns:
        One line for each setting that has to change: key, value, why, and what to set.
    """
    if malformed := malformed_blocks(config):
        return malformed
    model, unknown = None, []
    try:
        model = read_model(config)
    except FileError as error:
        unknown = [str(error)]
    problems = [
        problem_line(key, value, why, " or ".join(map(yaml_text, legal)))
        for key, (legal, why) in _REQUIRED.items()
        if (value := look_up(config, key)) is not ABSENT and value not in legal
    ]
    # `layout_conflicts` tells which sizes are none; these compute with them.
    if not count_problems(config):
        problems += [
            *loop_conflicts(config, qarl.objective),
            *_packing_conflicts(config),
            *shape_conflicts(config, qarl, model),
        ]
    return [
        *problems,
        *objective_conflicts(config, qarl.objective),
        *reward_conflicts(config),
        *_engine_conflicts(config, qarl),
        *optimizer_conflicts(config, qarl.targets),
        *schedule_conflicts(config),
        *_recompute_conflicts(config),
        *muon_conflicts(config),
        *override_conflicts(config),
        *_fused_conflicts(config),
        *_sampling_conflicts(config),
        *_stage_conflicts(config, qarl),
        *data_conflicts(config),
        *validation_batch_conflicts(config),
        *stop_metric_conflicts(config),
        *dtype_conflicts(config),
        *metric_conflicts(config),
        *resume_conflicts(config),
        *save_time_conflicts(config),
        *folder_conflicts(config),
        *tokenizer_conflicts(config),
        *unknown,
        *([] if unknown else length_conflicts(config)),
        *([] if unknown else attention_conflicts(config, qarl)),
        *(layout := layout_conflicts(config, qarl, model)),
        # Memory can be computed only for a layout that is possible.
        *([] if unknown or layout else memory_conflicts(config, qarl)),
    ]


def _fused_conflicts(config: Mapping[str, Any]) -> list[str]:
    if not look_up(config, _FUSED, False):
        return []
    filtered = {key: off[0] for key, off in _UNFILTERED.items() if look_up(config, key, None) not in off}
    return _mismatches(config, _FUSED_LOGPROBS | filtered, f"{_FUSED}=true")


def _packing_conflicts(config: Mapping[str, Any]) -> list[str]:
    problems, key = [], "policy.megatron_cfg.context_parallel_size"
    ranks, dynamic = look_up(config, key, 1), "policy.dynamic_batching.enabled"
    if ranks > 1:
        # Of the two, context parallel ranks can only take packed sequences.
        problems += _mismatches(config, {_PACKING: True, dynamic: False}, f"{key}={ranks}")
    elif look_up(config, dynamic, False):
        problems += _mismatches(config, _DYNAMIC, f"{dynamic}=true")
    chosen = "policy.sequence_packing.algorithm"
    name = look_up(config, chosen, _PACKERS[-1])
    if look_up(config, _PACKING, False) and str(name).lower() not in _PACKERS:
        problems.append(problem_line(chosen, name, "NeMo-RL has no such algorithm", " or ".join(_PACKERS)))
    return problems


def _recompute_conflicts(config: Mapping[str, Any]) -> list[str]:
    checkpointing, key = "policy.megatron_cfg.activation_checkpointing", "policy.megatron_cfg.recompute_granularity"
    value = look_up(config, key, "full")
    if not look_up(config, checkpointing, False) or value in ("full", "selective"):
        return []
    return [problem_line(key, value, f"NeMo-RL knows no other with {checkpointing}=true", "full or selective")]


def _sampling_conflicts(config: Mapping[str, Any]) -> list[str]:
    generation = look_up(config, "policy.generation", {})
    temperature, top_p, top_k = (generation.get(key) for key in ("temperature", "top_p", "top_k"))
    problems = []
    if temperature is not None and not temperature >= _LOWEST_TEMPERATURE:
        why = f"the learner divides logits by it, and vLLM by {_LOWEST_TEMPERATURE} where less is set"
        problems.append(
            problem_line("policy.generation.temperature", temperature, why, f"{_LOWEST_TEMPERATURE} or more")
        )
    if top_p is not None and not 0 < top_p <= 1:
        problems.append(
            problem_line("policy.generation.top_p", top_p, "a share of probability", "more than 0 and at most 1")
        )
    if top_k not in (None, -1) and top_k < 1:
        problems.append(
            problem_line("policy.generation.top_k", top_k, "a number of tokens", "1 or more, or null for all")
        )
    return problems


def _engine_conflicts(config: Mapping[str, Any], qarl: Any) -> list[str]:
    problems = []
    served = get_format(qarl.format).served_on("cuda")
    sizes = served.group_sizes if served else ()
    if sizes and qarl.group_size not in (None, *sizes):
        problems.append(
            problem_line("qarl.group_size", qarl.group_size, f"vLLM's {qarl.format}", " or ".join(map(str, sizes)))
        )
    if served is None:
        return [
            *problems,
            problem_line("qarl.format", qarl.format, "vLLM takes no refits of it", " or ".join(served_formats("cuda"))),
        ]
    generation = look_up(config, "policy.generation", {})
    arguments, places = given_arguments(generation)
    problems += repeated_arguments(generation)
    problems += argument_problems(arguments, kernel_choices(get_format(qarl.format), qarl.targets), places)
    own = look_up(generation, "vllm_cfg.env_vars", None) or {}
    problems += environment_problems(own, "policy.generation.vllm_cfg.env_vars.", forced=True)
    # NeMo-RL copies this process's environment to every worker.
    problems += environment_problems(
        {name: os.environ[name] for name in os.environ if name not in own}, "environment: "
    )
    problems += _server_conflicts(config)
    replay = bool(look_up(config, "policy.router_replay.enabled", False))
    if qarl.router_replay is not None and qarl.router_replay != replay:
        why = f"policy.router_replay.enabled={yaml_text(replay)}"
        problems.append(
            problem_line("qarl.router_replay", qarl.router_replay, why, f"{yaml_text(replay)}, or change that one")
        )
    return problems


def _server_conflicts(config: Mapping[str, Any]) -> list[str]:
    key = "policy.generation.vllm_kwargs.generation_config"
    chosen = look_up(config, key, "auto")
    if not look_up(config, "policy.generation.vllm_cfg.expose_http_server", False) or chosen == "vllm":
        return []
    return [problem_line(key, chosen, "requests over HTTP would take the checkpoint's sampling defaults, too", "vllm")]


def _stage_conflicts(config: Mapping[str, Any], qarl: Any) -> list[str]:
    problems, optimizer = [], look_up(config, OPTIMIZER, {})
    if qarl.schedule and look_up(config, "grpo.async_grpo.enabled", False):
        why = "qarl.schedule would train responses of older weights on another grid than theirs"
        problems.append(problem_line("grpo.async_grpo.enabled", True, why, "false, or qarl.schedule=null"))
    if look_up(optimizer, "optimizer_cpu_offload", False) and any(one.reset_moments for one in qarl.schedule or ()):
        why = "qarl.schedule forgets moments, which are kept in several places then"
        problems.append(problem_line(f"{OPTIMIZER}.optimizer_cpu_offload", True, why, "false, or reset_moments: false"))
    if qarl.update_aware_scale is not None and qarl.alignment == "none":
        why = "it speeds up quantized weights, and qarl.alignment=none has none"
        problems.append(problem_line("qarl.update_aware_scale", qarl.update_aware_scale, why, "null"))
    if qarl.update_aware_scale is not None and look_up(optimizer, "optimizer", "") == "sgd":
        why = "SGD's steps grow with its gradients, so that rates mean something else"
        problems.append(
            problem_line("qarl.update_aware_scale", qarl.update_aware_scale, why, f"{OPTIMIZER}.optimizer=adam")
        )
    return problems


def _mismatches(config: Mapping[str, Any], required: Mapping[str, Any], by: str) -> list[str]:
    return [
        problem_line(key, value, f"{by} does not go with it", yaml_text(legal))
        for key, legal in required.items()
        if (value := look_up(config, key, legal)) != legal
    ]
