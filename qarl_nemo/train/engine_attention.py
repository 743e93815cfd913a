"""The rollout engine's own attention kernel in the learner: FlashAttention 3 as vLLM ships it.

The forward is the kernel that vLLM decodes with, bit for bit; the backward is torch's, on the same queries, keys and
values. The library is loaded without importing vLLM, which would change settings of the whole process.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qarl_nemo.train.vllm.host import vllm_problem

ATTENTIONS = ("torch", "engine")
_NAME = "engine"
_LIBRARY = Path("vllm_flash_attn") / "_vllm_fa3_C.abi3.so"


def engine_attention_problem() -> str | None:
    """Say why the engine's kernel cannot run here.

    Returns:
        What is missing, or None.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "vLLM's FlashAttention 3 needs a Hopper GPU"
    return vllm_problem("cuda", quantized=False)


@cache
def _kernel() -> Any:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None, "engine_attention_problem was not asked"
    assert spec.origin is not None
    torch.ops.load_library(Path(spec.origin).parent / _LIBRARY)
    return torch.ops._vllm_fa3_C.fwd


class _EngineAttention(torch.autograd.Function):
    # Query [B, S, heads, D], key and value [B, S, KV heads, D] -> [B, S, heads, D].
    # Source: vLLM 0.25.1 vllm_flash_attn/flash_attn_interface.py.
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        batch, length = query.shape[:2]
        # vLLM builds the kernel only for packed sequences.
        bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=query.device)
        inputs = [tensor.flatten(0, 1).contiguous() for tensor in (query, key, value)]
        # Positional arguments of the C++ function; those that are None or 0 are for paged caches, rotation inside the
        # kernel, FP8 and sliding windows.
        settings = (scale, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None)
        lengths = (bounds, bounds, None, None, None, length, length)
        return _kernel()(*inputs, *[None] * 4, *lengths, *[None] * 9, *settings)[0].view_as(query)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            heads_first = [tensor.transpose(1, 2) for tensor in inputs]
            out = nn.functional.scaled_dot_product_attention(
                *heads_first, is_causal=True, scale=ctx.scale, enable_gqa=True
            )
            return *torch.autograd.grad(out.transpose(1, 2), inputs, grad_out), None


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    # Query [B, heads, S, D], key and value [B, KV heads, S, D], each BF16 -> [B, S, heads, D].
    assert attention_mask is None, "the engine's kernel reads whole sequences, filler on the right"
    assert query.shape[2] == key.shape[2], "the engine's kernel reads whole sequences, without a cache"
    heads_last = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return _EngineAttention.apply(*heads_last, module.scaling), None


def use_attention(model: PreTrainedModel, attention: str) -> None:
    """Choose the attention kernel of a model that reads whole sequences.

    Args:
        model: a model with the rollout engine's rounding points, see `follow_engine`.
        attention: `torch`, or `engine` for vLLM's own.

    Raises:
        ValueError: vLLM's kernel cannot run here.
    """
    if attention == "torch":
        return
    problem = engine_attention_problem()
    if problem:
        raise ValueError(f"attention=engine does not run here: {problem}; set attention=torch")
    model.config._attn_implementation = _NAME


@contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Make a model attend with torch's matrix products and softmax, its most exact kernel, inside the block.

    Args:
        model: any.
    """
    before = model.config._attn_implementation
    model.config._attn_implementation = "sdpa"
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        model.config._attn_implementation = before


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
