"""The learner's attention over packed sequences: torch's kernel, or the rollout engine's own, FlashAttention 3.

The engine's forward is the kernel that vLLM decodes with, bit for bit; the backward is torch's for both, on the same
queries, keys and values. Torch's kernels take rectangles: sequences are padded for them, and for nothing else. vLLM's
library is loaded without importing vLLM, which would change settings of the whole process.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qarl_nemo.train.packing import Packing
from qarl_nemo.train.vllm.host import vllm_problem

ATTENTIONS = ("torch", "engine")
# Without cuDNN's, which prepares anew for every shape: each micro-batch has another.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_LIBRARY = Path("vllm_flash_attn") / "_vllm_fa3_C.abi3.so"


def engine_attention_problem() -> str | None:
    """Say what is missing for the engine's kernel to run here, if anything is."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "vLLM's FlashAttention 3 needs a Hopper GPU"
    return vllm_problem("cuda", quantized=False)


def require_attention(attention: str) -> None:
    """Refuse an attention kernel that cannot run here.

    Args:
        attention: `torch`, or `engine` for vLLM's own.

    Raises:
        ValueError: it is vLLM's; says what is missing for it.
    """
    problem = engine_attention_problem() if attention == "engine" else None
    if problem:
        raise ValueError(f"attention=engine does not run here: {problem}; set attention=torch")


@cache
def _kernel() -> Any:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None, "engine_attention_problem was not asked"
    assert spec.origin is not None
    torch.ops.load_library(Path(spec.origin).parent / _LIBRARY)
    return torch.ops._vllm_fa3_C.fwd


def _engine_kernel(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None
) -> Tensor:
    # Source: vLLM 0.25.1 vllm_flash_attn/flash_attn_interface.py.
    if window is not None and packing.longest > window:
        raise ValueError(
            f"attention=engine reads at most this model's sliding window of {window} tokens, and a sequence has "
            f"{packing.longest}; set policy.attention=torch"
        )
    # Positional arguments of the C++ function; those that are None or 0 are for paged caches, rotation inside the
    # kernel, FP8 and sliding windows.
    settings = (scale, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None)
    bounds = packing.bounds
    lengths = (bounds, bounds, None, None, None, packing.longest, packing.longest)
    inputs = [tensor.contiguous() for tensor in (query, key, value)]
    return _kernel()(*inputs, *[None] * 4, *lengths, *[None] * 9, *settings)[0]


def _torch_kernel(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None
) -> Tensor:
    query, key, value = (packing.pad(tensor) for tensor in (query, key, value))
    return packing.pack(_attend_rectangles(query, key, value, scale, window))


def _attend_rectangles(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    # Each [B, S, heads, D]. With all padding on the right, where no token attends, causal attention needs no mask.
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    length, mask = query.shape[2], None
    if window is not None and length > window:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        # Kernels that take masks want as many heads of keys and values as of queries.
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    with sdpa_kernel(_BACKENDS):
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    return out.transpose(1, 2)


_KERNELS = {"torch": _torch_kernel, "engine": _engine_kernel}


class _PackedAttention(torch.autograd.Function):
    # Query [T, heads, D], key and value [T, KV heads, D] -> [T, heads, D]; no sequence sees another.
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packing: Packing,
        scale: float,
        window: int | None,
        attention: str,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.packing, ctx.scale, ctx.window = packing, scale, window
        return _KERNELS[attention](query, key, value, packing, scale, window)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override] torch's decorator takes the name of ctx away
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        packing = ctx.packing
        with torch.enable_grad():
            query, key, value = (packing.pad(tensor).detach().requires_grad_() for tensor in ctx.saved_tensors)
            out = _attend_rectangles(query, key, value, ctx.scale, ctx.window)
            grads = torch.autograd.grad(out, (query, key, value), packing.pad(grad_out.contiguous()))
        return *[packing.pack(grad) for grad in grads], None, None, None, None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention: str,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    # Query [B, heads, S, D], key and value [B, KV heads, S, D] -> [B, S, heads, D]; B is 1 if they are packed.
    assert attention_mask is None, "the learner's kernels read whole sequences, filler on the right"
    assert query.shape[2] == key.shape[2], "the learner's kernels read whole sequences, without a cache"
    size, length = query.shape[0], query.shape[2]
    if packing is None:
        packing = Packing.of(torch.full((size,), length, device=query.device))
    tokens_first = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    out = _PackedAttention.apply(*tokens_first, packing, module.scaling, sliding_window, attention)
    return out.unflatten(0, (size, length)), None


def use_attention(model: PreTrainedModel, attention: str) -> None:
    """Choose the attention kernel of a model that reads whole sequences, packed or with filler on the right.

    Args:
        model: a model with the rollout engine's rounding points, see `follow_engine`.
        attention: `torch`, or `engine` for vLLM's own.

    Raises:
        ValueError: vLLM's kernel cannot run here.
    """
    require_attention(attention)
    model.config._attn_implementation = _implementation(attention)


@contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Make a model attend with torch's matrix products and softmax, its most exact kernel, inside the block."""
    before = model.config._attn_implementation
    model.config._attn_implementation = "sdpa"
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        model.config._attn_implementation = before


def _implementation(attention: str) -> str:
    return f"packed_{attention}"


for _name in ATTENTIONS:
    ALL_ATTENTION_FUNCTIONS.register(_implementation(_name), partial(_attention, attention=_name))
