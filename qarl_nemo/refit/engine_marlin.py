"""Puts decode kernels of ours in the place of vLLM 0.25.1's Marlin operators, for the calls that they take."""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def take_place(name: str, switch: str, decoding: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
    """Replace one of vLLM's operators in this process, on CUDA and unless the environment says no.

    Args:
        name: the operator, in `vllm._custom_ops`.
        switch: the environment variable that leaves it as it is if it is 0.
        decoding: makes the new operator of vLLM's.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or os.environ.get(switch) == "0":
        return
    from vllm import _custom_ops as ops

    setattr(ops, name, decoding(getattr(ops, name)))


def trying(decode: Callable[..., Tensor | None], marlin: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an operator that takes what `marlin` takes, and leaves to it what `decode` does not take.

    Args:
        decode: gets x, out, words and scale, and what follows the workspace, where x and scale are BF16 and a layer
            has nothing else; returns None for what it does not take.
        marlin: one of vLLM's operators, all of which begin with the same eleven operands.
    """

    @functools.wraps(marlin)
    def multiply(*operands: Any, **named: Any) -> Tensor:
        # vLLM's FP4 and FP8 layers name theirs.
        if operands:
            x, out, words, bias, scale, x_scale, global_scale, zeros, group_index, order, _, *others = operands
            extras = (bias, x_scale, global_scale, zeros, group_index, order)
            plain = all(extra is None or not extra.numel() for extra in extras)
            if plain and x.dtype == scale.dtype == torch.bfloat16:
                done = decode(x, out, words, scale, *others, **named)
                if done is not None:
                    return done
        return marlin(*operands, **named)

    return multiply


def compiles(kernel: Callable[[Any, int], Any], config: Any, device: torch.device, layers: str) -> bool:
    """Tell whether a kernel can be compiled and loaded; where that fails, warn, because Marlin is slower.

    Args:
        kernel: makes it; returns None where the GPU does not take it.
        config: the kernel's constants; None: it does not take these sizes.
        device: the GPU.
        layers: what decodes by it, in words.
    """
    if config is None:
        return False
    try:
        return kernel(config, device.index) is not None
    except (OSError, RuntimeError) as failure:
        warnings.warn(f"{layers} decode by Marlin, since a kernel could not be compiled: {failure}", stacklevel=2)
        return False
