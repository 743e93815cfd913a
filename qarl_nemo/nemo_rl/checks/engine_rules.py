"""A decision on every argument of vLLM 0.25.1: which values the learner's arithmetic and the refits need or allow.

`engine.py` applies the tables, `python -m qarl_nemo.nemo_rl.checks.engine_rules` prints the copy in
docs/design/vllm_settings.md. An argument in none of them is refused, because its effect on the arithmetic is unknown.
"""

from typing import Any, NamedTuple


class Rule(NamedTuple):
    """The legal values of an argument.

    Attributes:
        legal: values, in lower case; an empty or absent value or None is always legal.
        why: why another value would break alignment or refits.
        served: where the value is in the `VllmConfig` of a running engine, whose worker checks it again.
    """

    legal: tuple[Any, ...]
    why: str
    served: str | None = None


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_LAYERS = "experts and layers would not stay where refits write them"
_DRAFT = "draft weights are not published"
_OLDER = "keys and values of older weights would be found again after a refit"
_SPLIT = "refits and the learner know tensor and expert parallel ranks only"
_ADAPTERS = "adapters are not published"
_COMPILER = "vLLM's compiler would fuse away roundings that the learner follows"
_WEIGHTS = "weights come with refits alone"
_OFFLOADED = "refits write weights where kernels read them, on the GPU"
_QUANTIZED = "qarl.format says how vLLM quantizes"
_CACHE = "the learner's attention reads keys and values in BF16"

RULES: dict[str, Rule] = {
    "dtype": Rule(("bfloat16",), "activations are BF16", "model_config.dtype"),
    "quantization": Rule((), _QUANTIZED),
    "quantization_config": Rule((), _QUANTIZED),
    "hf_overrides.quantization_config": Rule((), _QUANTIZED),
    "kv_cache_dtype": Rule(("auto", "bfloat16"), _CACHE, "cache_config.cache_dtype"),
    "kv_cache_dtype_skip_layers": Rule((), _CACHE),
    "calculate_kv_scales": Rule((False,), _CACHE, "cache_config.calculate_kv_scales"),
    "override_attention_dtype": Rule((), _CACHE, "model_config.override_attention_dtype"),
    "attention_config.use_prefill_query_quantization": Rule((False,), _CACHE),
    "attention_config.use_trtllm_attention": Rule((False,), "its kernels were not compared with the learner's"),
    "attention_config.use_non_causal": Rule((False,), "the learner's attention is causal"),
    "disable_cascade_attn": Rule(
        (True,), "shared prefixes would be summed apart in some batches", "model_config.disable_cascade_attn"
    ),
    "disable_sliding_window": Rule((False,), "the learner's attention is the checkpoint's"),
    "logprobs_mode": Rule(
        ("processed_logprobs",),
        "the learner's log-probabilities are of the distribution that was sampled",
        "model_config.logprobs_mode",
    ),
    "logits_processors": Rule((), "the learner does not apply them", "model_config.logits_processors"),
    "override_generation_config": Rule((), "policy.generation has the sampling parameters"),
    "compilation_config.mode": Rule((0, "none"), _COMPILER, "compilation_config.mode"),
    "compilation_config.backend": Rule(("eager",), _COMPILER),
    "compilation_config.use_inductor": Rule((False,), _COMPILER),
    "compilation_config.cudagraph_mode": Rule(
        (0, 2, "none", "full", "full_decode_only"), "piecewise graphs need vLLM's compiler"
    ),
    "ir_op_priority": Rule((), "norms would run by another kernel than the learner follows"),
    "kernel_config.ir_op_priority": Rule((), "norms would run by another kernel than the learner follows"),
    "speculative_config": Rule((), _DRAFT, "speculative_config"),
    "spec_method": Rule((), _DRAFT),
    "spec_model": Rule((), _DRAFT),
    "spec_tokens": Rule((0,), _DRAFT),
    "diffusion_config": Rule((), "the learner predicts the next token"),
    "enable_lora": Rule((False,), _ADAPTERS, "lora_config"),
    "default_mm_loras": Rule((), _ADAPTERS),
    "cpu_offload_gb": Rule((0,), _OFFLOADED, "offload_config.uva.cpu_offload_gb"),
    "cpu_offload_params": Rule((), _OFFLOADED),
    "offload_backend": Rule(("auto",), _OFFLOADED),
    "offload_group_size": Rule((0,), _OFFLOADED, "offload_config.prefetch.offload_group_size"),
    "offload_params": Rule((), _OFFLOADED),
    "enable_eplb": Rule((False,), _LAYERS, "parallel_config.enable_eplb"),
    "enable_elastic_ep": Rule((False,), _LAYERS, "parallel_config.enable_elastic_ep"),
    "expert_placement_strategy": Rule(("linear",), _LAYERS, "parallel_config.expert_placement_strategy"),
    "all2all_backend": Rule(
        ("allgather_reducescatter",), "others may quantize rows they send", "parallel_config.all2all_backend"
    ),
    "enable_dbo": Rule((False,), "it needs another all2all_backend", "parallel_config.enable_dbo"),
    "pipeline_parallel_size": Rule((1,), _SPLIT, "parallel_config.pipeline_parallel_size"),
    "prefill_context_parallel_size": Rule((1,), _SPLIT, "parallel_config.prefill_context_parallel_size"),
    "decode_context_parallel_size": Rule((1,), _SPLIT, "parallel_config.decode_context_parallel_size"),
    "data_parallel_size": Rule((1,), "NeMo-RL starts an engine for each data parallel rank"),
    "kv_sharing_fast_prefill": Rule((False,), "it skips layers of a prompt", "cache_config.kv_sharing_fast_prefill"),
    "kv_offloading_size": Rule((0,), _OLDER),
    "kv_transfer_config": Rule((), _OLDER, "kv_transfer_config"),
    "ec_transfer_config": Rule((), _OLDER),
    "model_weights": Rule((), _WEIGHTS),
    "weight_transfer_config": Rule((), _WEIGHTS),
    "model_loader_extra_config": Rule((), _WEIGHTS),
    "model_impl": Rule(("auto", "vllm"), "refits know vLLM's own layers"),
    "model_class_overrides": Rule((), "refits know vLLM's own layers"),
    "convert": Rule(("auto", "none"), "the learner predicts the next token"),
    "runner": Rule(("auto", "generate"), "the learner predicts the next token"),
    "pooler_config": Rule((), "the learner predicts the next token"),
    "enable_prompt_embeds": Rule((False,), "the learner sees tokens"),
    "tokens_only": Rule((False,), "NeMo-RL's worker asks with prompts and sampling parameters"),
    "worker_cls": Rule(("auto",), "refits extend vLLM's own worker"),
    "additional_config": Rule((), "plug-ins of vLLM read it, and what they change is not known"),
}
"""Argument, with its block if it is nested -> its legal values."""

NO_MATTER: dict[str, tuple[str, ...]] = {
    "how requests are batched: the same sums, up to the shapes of batches": _names(
        "enable_chunked_prefill max_num_batched_tokens max_num_partial_prefills max_long_partial_prefills "
        "max_num_seqs long_prefill_token_threshold async_scheduling scheduling_policy scheduler_cls "
        "scheduler_reserve_full_isl prefill_schedule_interval watermark stream_interval performance_mode ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold disable_chunked_mm_input"
    ),
    "memory, cache blocks and prefixes: refits reset the prefix cache": _names(
        "gpu_memory_utilization kv_cache_memory_bytes block_size num_gpu_blocks_override enable_prefix_caching "
        "prefix_caching_hash_algo disable_hybrid_kv_cache_manager enable_sleep_mode enable_cumem_allocator "
        "max_model_len kv_offloading_backend kv_events_config offload_num_in_group offload_prefetch_step"
    ),
    "graphs replay the same kernels; without the compiler the level of optimization names no pass": _names(
        "enforce_eager cudagraph_capture_sizes max_cudagraph_capture_size optimization_level enable_flashinfer_autotune"
    ),
    "parallel ranks and their connections, which refits read off the engine": _names(
        "tensor_parallel_size enable_expert_parallel enable_ep_weight_filter eplb_config distributed_executor_backend "
        "master_addr master_port nnodes node_rank distributed_timeout_seconds cpu_distributed_timeout_seconds "
        "numa_bind numa_bind_nodes numa_bind_cpus device_ids dcp_comm_backend dcp_kv_cache_interleave_size "
        "data_parallel_rank cp_kv_cache_interleave_size data_parallel_start_rank data_parallel_size_local "
        "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb "
        "data_parallel_backend data_parallel_multi_port_external_lb disable_nccl_for_dp_synchronization "
        "disable_custom_all_reduce max_parallel_loading_workers ray_workers_use_nsight _api_process_count "
        "_api_process_rank"
    ),
    "attention in BF16 by another kernel: sums in another order": ("attention_backend",),
    "what QaRL sets or checks itself: kernels of qarl.format, and what receives refits": (
        "moe_backend",
        "linear_backend",
        "worker_extension_cls",
    ),
    "which checkpoint, tokenizer and default stop tokens; NeMo-RL gives every request its sampling parameters": _names(
        "model served_model_name tokenizer hf_config_path skip_tokenizer_init tokenizer_mode trust_remote_code "
        "revision code_revision tokenizer_revision hf_token config_format load_format download_dir "
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size ignore_patterns "
        "use_tqdm_on_load seed pt_load_map_location allow_deprecated_quantization generation_config max_logprobs "
        "use_fp64_gumbel chat_template enable_return_routed_experts allowed_local_media_path allowed_media_domains"
    ),
    "images, other kinds of models, and adapters where there are none": _names(
        "language_model_only limit_mm_per_prompt enable_mm_embeds interleave_mm_strings media_io_kwargs mamba_config "
        "mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
        "mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin mm_tensor_ipc mm_ipc_gpu_memory_gb "
        "skip_mm_profiling video_pruning_rate io_processor_plugin renderer_num_workers mamba_cache_dtype "
        "mamba_backend mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode enable_mamba_cache_stochastic_rounding "
        "max_loras mamba_cache_philox_rounds gdn_prefill_backend max_lora_rank fully_sharded_loras max_cpu_loras "
        "lora_dtype lora_target_modules enable_tower_connector_lora specialize_active_lora "
        "enable_mixed_moe_lora_format"
    ),
    "what requests may ask for and do not, logs and profiles": _names(
        "structured_outputs_config reasoning_parser reasoning_parser_plugin reasoning_config disable_log_stats "
        "aggregate_engine_logging show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
        "kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics "
        "enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats "
        "profiler_config shutdown_timeout fail_on_environ_validation enable_log_requests"
    ),
}
"""Why it is legal -> arguments."""

NESTED: dict[str, tuple[str, ...]] = {
    "compilation_config": _names(
        "custom_ops pass_config cudagraph_capture_sizes max_cudagraph_capture_size cudagraph_num_of_warmups "
        "cudagraph_copy_inputs cudagraph_specialize_lora debug_dump_path cache_dir compile_cache_save_format"
    ),
    "attention_config": _names(
        "backend flash_attn_version use_prefill_decode_attention flash_attn_max_num_splits_for_cuda_graph "
        "disable_flashinfer_q_quantization"
    ),
    "kernel_config": ("moe_backend", "linear_backend", "enable_flashinfer_autotune", "enable_cutedsl_warmup"),
}
"""Blocks of arguments -> what in them is legal or checked besides `RULES`; everything else in them is refused."""

# NeMo-RL passes these itself; repeated in vllm_kwargs, they end the worker with a TypeError.
GIVEN_BY_NEMO_RL = {
    "model": "policy.model_name",
    "served_model_name": "policy.model_name",
    "load_format": f"nothing: {_WEIGHTS}",
    "skip_tokenizer_init": "policy.generation.vllm_cfg.skip_tokenizer_init",
    "tensor_parallel_size": "policy.generation.vllm_cfg.tensor_parallel_size",
    "pipeline_parallel_size": "policy.generation.vllm_cfg.pipeline_parallel_size",
    "enable_expert_parallel": "policy.generation.vllm_cfg.expert_parallel_size",
    "gpu_memory_utilization": "policy.generation.vllm_cfg.gpu_memory_utilization",
    "enable_prefix_caching": "policy.generation.vllm_cfg.enable_prefix_caching",
    "dtype": "policy.generation.vllm_cfg.precision",
    "seed": "nothing: NeMo-RL gives each engine its own",
    "enforce_eager": "policy.generation.vllm_cfg.enforce_eager",
    "max_model_len": "policy.generation.vllm_cfg.max_model_len",
    "trust_remote_code": "nothing: NeMo-RL has it true",
    "worker_extension_cls": "nothing: QaRL's own extension receives the refits",
    "enable_sleep_mode": "nothing: NeMo-RL has it true",
    "disable_log_stats": "nothing: NeMo-RL has it false",
}

ENVIRONMENT_RULES: dict[str, Rule] = {
    "VLLM_MARLIN_INPUT_DTYPE": Rule((), "activations are BF16 in w4a16, w8a16 and nvfp4"),
    "VLLM_MARLIN_USE_ATOMIC_ADD": Rule(("0",), "sums would end in an order of their own"),
    "VLLM_FLOAT32_MATMUL_PRECISION": Rule(("highest",), "the router is computed in FP32"),
    "VLLM_USE_FLASHINFER_MOE_INT4": Rule(("0",), "the learner follows Marlin"),
    "VLLM_TEST_FORCE_FP8_MARLIN": Rule(
        ("0", "false"), "layers in FP8 would multiply activations that stay BF16; it is refused with every format"
    ),
    "VLLM_DISABLED_KERNELS": Rule((), "another linear kernel would take over"),
    "VLLM_ALLREDUCE_USE_FLASHINFER": Rule(("0",), "its sums were not compared with the learner's"),
    "VLLM_BATCH_INVARIANT": Rule(("0",), "it brings kernels that were not compared with the learner's"),
    "VLLM_USE_BREAKABLE_CUDAGRAPH": Rule(("0",), "piecewise graphs need vLLM's compiler"),
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": Rule((), _QUANTIZED),
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": Rule((), _QUANTIZED),
}
"""Environment variable -> its legal values; QaRL sets those of `refit/engine_settings.py`."""


def rules_table() -> str:
    """Return the decisions as tables in Markdown."""
    rows = ["| argument of vLLM | legal beside absent | otherwise |", "|---|---|---|"]
    for name, rule in (RULES | ENVIRONMENT_RULES).items():
        legal = ", ".join(f"`{value}`" for value in rule.legal)
        rows.append(f"| `{name}` | {legal} | {rule.why} |")
    rows += ["", "| any value | because |", "|---|---|"]
    rows += [f"| {', '.join(f'`{name}`' for name in names)} | {why} |" for why, names in NO_MATTER.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(rules_table())
