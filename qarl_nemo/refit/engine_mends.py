"""Mends vLLM 0.25.1 where it runs INT8 experts otherwise than their checkpoint says, and adapters otherwise each time.

INT8 experts ask for activations quantized per token and get a configuration without (vLLM's pull request 50833): they
silently multiply BF16 rows. With the right one, the kernel's caller refuses INT8 rows (pull request 51411). vLLM mended
both after that release. `engine_methods` refuses an engine that has not been mended.

Adapters of dense layers multiply their rows by A in up to 64 parts, which are added in the order in which they finish:
the same prompts and seed give other last bits, and now and then another token.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@functools.cache
def mend_int8_experts() -> None:
    """Make vLLM's INT8 experts in this process quantize their activations; calling it again changes nothing.

    Models that were built before keep what they have. On a CPU, where they are not served, nothing is changed.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.model_executor.layers.fused_moe.experts import triton_moe
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_int8 as method,
    )

    method.make_int8_moe_quant_config = _quantizing(method.make_int8_moe_quant_config)
    triton_moe.TritonExperts.apply = _taking_int8(triton_moe.TritonExperts.apply)
    triton_moe.invoke_fused_moe_triton_kernel = _multiplying_int8(triton_moe.invoke_fused_moe_triton_kernel)


@functools.cache
def mend_adapter_sums() -> None:
    """Make adapters in this process add in one order; calling it again changes nothing.

    Source: vLLM 0.25.1 lora/ops/triton_ops/utils.py, which does so itself with VLLM_BATCH_INVARIANT=1.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.lora.ops.triton_ops import lora_shrink_op

    lora_shrink_op.get_lora_op_configs = _in_one_part(lora_shrink_op.get_lora_op_configs)


def _in_one_part(choose: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(choose)
    def one(*asked: Any, **named: Any) -> dict[str, Any]:
        return choose(*asked, **named) | {"split_k": 1}

    return one


def _quantizing(make_config: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.model_executor.layers.fused_moe.config import int8_w8a8_moe_quant_config

    @functools.wraps(make_config)
    def make(*, int8_backend: Any, layer: Any, **asked: Any) -> Any:
        config = make_config(int8_backend=int8_backend, layer=layer, **asked)
        return int8_w8a8_moe_quant_config(**asked) if config.use_int8_w8a16 else config

    return make


def _taking_int8(apply: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(apply)
    def take(experts: Any, output: Tensor, hidden_states: Tensor, *others: Any, **named: Any) -> None:
        # Of 8-bit rows it lets only FP8 pass, which it handles as INT8 has to be.
        rows = hidden_states.view(torch.float8_e4m3fn) if hidden_states.dtype == torch.int8 else hidden_states
        apply(experts, output, rows, *others, **named)

    return take


def _multiplying_int8(invoke: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(invoke)
    def multiply(rows: Tensor, *others: Any, use_int8_w8a8: bool, **named: Any) -> None:
        invoke(rows.view(torch.int8) if use_int8_w8a8 else rows, *others, use_int8_w8a8=use_int8_w8a8, **named)

    return multiply
