"""Attention's linears on quantized weights, for targets that include `attention`.

The parameters stay those of the Megatron class that is subclassed, local or Transformer-Engine's; around the aligned
GEMM, tensor- and sequence-parallel communication is Megatron's own. Transformer-Engine would fuse the norm into
linear_qkv; here it is a module of its own, because the format quantizes the norm's output. Checkpoints have the fused
module's keys all the same.
"""

import functools
from typing import Any

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from qarl_kernels import one_group
from qarl_nemo.layers.autograd import aligned_grouped_gemm
from qarl_nemo.megatron.alignment import Alignment


class _AlignedLinear(nn.Module):
    # With `partition_dim` this tells Bridge, which does not know this class, how its weight is split.
    tensor_model_parallel = True

    def __init__(self, *arguments: Any, alignment: Alignment, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.aligned = alignment.weight(type(self).__name__, self.weight)
        self.backward = alignment.backward
        self.returns_bias = named["skip_bias_add"] and named["bias"]
        self.register_load_state_dict_post_hook(lambda *_: alignment.changes.bump())

    def _multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = aligned_grouped_gemm(rows, self.aligned, one_group(rows), backward=self.backward, bias=bias)
        return out.view(*x.shape[:-1], out.shape[-1])

    def _biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the bias that this layer adds and the one that its caller does."""
        if self.returns_bias:
            return None, self.bias
        # Transformer-Engine holds an empty tensor in the place of none.
        return (self.bias if self.bias is not None and self.bias.numel() else None), None


class _AlignedColumn(_AlignedLinear):
    partition_dim = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply all tokens by this rank's rows of the weight: [S / TP, B, K] -> [S, B, N / TP]."""
        if self.config.sequence_parallel:
            x = gather_from_sequence_parallel_region(x)
        else:
            x = copy_to_tensor_model_parallel_region(x)
        added, returned = self._biases()
        return self._multiply(x, added), returned


class _AlignedRow(_AlignedLinear):
    partition_dim = 1

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply by this rank's columns of the weight and sum over ranks: [S, B, K / TP] -> [S / TP, B, N]."""
        out = self._multiply(x)
        if self.config.sequence_parallel:
            out = reduce_scatter_to_sequence_parallel_region(out)
        else:
            out = reduce_from_tensor_model_parallel_region(out)
        added, returned = self._biases()
        return (out if added is None else out + added), returned


class AlignedColumnParallelLinear(_AlignedColumn, ColumnParallelLinear):
    """linear_qkv on Megatron's local parameters."""


class AlignedRowParallelLinear(_AlignedRow, RowParallelLinear):
    """linear_proj on Megatron's local parameters."""


@functools.cache
def transformer_engine_linears() -> tuple[type, type]:
    """Return the classes of linear_qkv and linear_proj with Transformer-Engine's parameters."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    column = type("AlignedTEColumnParallelLinear", (_AlignedColumn, TEColumnParallelLinear), {})
    row = type("AlignedTERowParallelLinear", (_AlignedRow, TERowParallelLinear), {})
    return column, row


class SeparateTENorm:
    """Transformer-Engine's norm without `_extra_state`, which checkpoints of a fused norm do not have."""

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        """Return the norm itself."""
        from megatron.core.extensions.transformer_engine import TENorm

        return without_extra_state(TENorm(*arguments, **named))


def without_extra_state(module: nn.Module) -> nn.Module:
    """Keep a module from saving or asking for extra state, which must not matter; return the module."""
    if type(module).get_extra_state is not nn.Module.get_extra_state:

        def drop(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
            state.pop(f"{prefix}_extra_state", None)

        def put_none(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
            state[f"{prefix}_extra_state"] = None

        module.register_state_dict_post_hook(drop)
        module.register_load_state_dict_pre_hook(put_none)
    return module
