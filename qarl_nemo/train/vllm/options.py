"""How vLLM is started as the rollout engine of `qarl train`: its environment and the arguments of `vllm.LLM`."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from qarl_kernels import QuantFormat
from qarl_nemo.layers.lora import LoraSettings
from qarl_nemo.refit import engine_settings
from qarl_nemo.train.rollout_config import VllmRolloutConfig

_EVERYWHERE = {
    # Compiling the sampler would delay the first rollout by more than it saves.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# What vLLM's layers with a target's projections are called.
_MODULES = {
    "attention": ("qkv_proj", "o_proj"),
    "mlp": ("gate_up_proj", "down_proj"),
    "experts": ("experts",),
}
_ENVIRONMENT = {
    # Use the learner's threads.
    "cpu": _EVERYWHERE | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    "cuda": _EVERYWHERE | engine_settings.ENVIRONMENT,
}


def engine_environment(device: torch.device, settings: VllmRolloutConfig) -> dict[str, str]:
    """Return the environment that vLLM reads when it is imported.

    Args:
        device: the learner's.
        settings: the rollout block.
    """
    # In this process, a refit passes tensors without a copy. An engine in another process takes the first GPU it sees.
    processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if settings.own_gpu:
        processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    return _ENVIRONMENT[device.type] | processes


def engine_options(
    model: PreTrainedModel,
    fmt: QuantFormat,
    targets: Sequence[str],
    settings: VllmRolloutConfig,
    *,
    device: torch.device,
    capture_routes: bool,
    lora: LoraSettings | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.LLM`.

    Args:
        model: the learner's.
        fmt: the rollout format.
        targets: which layers are quantized.
        settings: the rollout block.
        device: the engine's device, a GPU or the CPU.
        capture_routes: let the engine return the experts it chose.
        lora: settings of the adapters that refits bring.
    """
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        # The checkpoint's sampling defaults would change the distribution.
        "generation_config": "vllm",
        "dtype": str(model.dtype).removeprefix("torch."),
        "use_tqdm_on_load": False,
        "enable_prefix_caching": False,
        "logprobs_mode": "processed_logprobs",
        "distributed_executor_backend": "uni",
        "async_scheduling": settings.async_scheduling,
        "worker_extension_cls": engine_settings.WORKER_EXTENSION,
        "max_model_len": settings.max_model_len or model.config.max_position_embeddings,
        "max_num_seqs": settings.batch_size,
        "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30),
        "enforce_eager": settings.enforce_eager or device.type == "cpu",
        "seed": 0,
    }
    if capture_routes:
        options["enable_return_routed_experts"] = True
    if device.type == "cuda":
        options["compilation_config"] = compilation_options(
            None if settings.enforce_eager else settings.batch_size, lora
        )
        # The utilization only says how much must be free at the start; kv_cache_gib says how much is taken.
        options["gpu_memory_utilization"] = 0.01
        options |= engine_settings.kernel_options(fmt, targets)
    return options if lora is None else options | adapter_options(lora)


def adapter_options(lora: LoraSettings) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.LLM` for one adapter; other layers than the targets stay as they are."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": lora.rank,
        "lora_target_modules": [module for target in lora.targets for module in _MODULES[target]],
    }


def compilation_options(batch_size: int | None, lora: LoraSettings | None) -> dict[str, Any]:
    """Return the `compilation_config` of an engine on a GPU.

    Args:
        batch_size: the largest batch that a CUDA graph decodes; None: no graphs.
        lora: settings of the adapters that every request names.
    """
    options = dict(engine_settings.COMPILATION)
    if lora is not None:
        # Every request has the adapter, so graphs without it would be captured for nothing.
        options["cudagraph_specialize_lora"] = False
    if batch_size is not None:
        options |= {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": capture_sizes(batch_size)}
    return options


def capture_sizes(batch_size: int) -> list[int]:
    """Return the sizes to capture as CUDA graphs, up to the largest: a decoding batch is padded by at most half."""
    sizes = {size for power in range(batch_size.bit_length()) for size in (2**power, 3 * 2**power)}
    return sorted({size for size in sizes if size < batch_size} | {batch_size})
