"""The experts' weights as Megatron keeps them, `weight0`, `weight1`, ... [out, in], with their quantized form.

With Transformer-Engine, its grouped linears are subclassed: parameters, names, RNG, attributes, `_extra_state` and
checkpoints are theirs. Without it, `LocalGroupedLinear` has the same. Neither multiplies, because the expert MLP does,
except for `backend="transformer_engine"`, with which Transformer-Engine's linears multiply themselves.
"""

import functools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu, _initialize_affine_weight_gpu
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from qarl_nemo.installation import pip_command
from qarl_nemo.megatron.alignment import Alignment

COLUMN, ROW = 0, 1


class AlignedGroupedLinear(nn.Module):
    """What both kinds share: the quantized weight, made anew when the masters have changed.

    Args:
        alignment: the model's.
        arguments: passed to the class this is mixed into.
    """

    # With `partition_dim` this tells Bridge, which does not know this class, how its weights are split.
    tensor_model_parallel = True

    def __init__(self, *arguments: Any, alignment: Alignment, **named: Any) -> None:
        super().__init__(*arguments, **named)
        masters = [getattr(self, f"weight{expert}") for expert in range(self.num_gemms)]
        self.aligned = alignment.weight(type(self).__name__, masters)
        self.backward, self.backend = alignment.backward, alignment.backend
        # Makes Transformer-Engine quantize at each use, so that it keeps nothing an offload would have to drop.
        self.disable_parameter_transpose_cache = True
        self.register_load_state_dict_post_hook(lambda *_: alignment.changes.bump())

    def forward(self, *rows_and_splits: Any) -> Any:
        """Return the weight to multiply by or, given rows and their counts, Transformer-Engine's product."""
        return super().forward(*rows_and_splits) if rows_and_splits else self.aligned

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed."""


class LocalGroupedLinear(nn.Module):
    """The parameters of Transformer-Engine's grouped linear, without Transformer-Engine.

    Args:
        num_gemms: E_local.
        input_size: in-features of the whole weight.
        output_size: out-features of the whole weight.
        partition_dim: the dimension that expert tensor parallelism splits.
        config: the model's.
        init_method: initializes a weight in place.
        pg_collection: the model's process groups.
        unused: further arguments that Transformer-Engine's class takes.

    Source: Megatron-core 0.20 extensions/transformer_engine.py, TEGroupedLinear.
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        partition_dim: int,
        config: Any,
        init_method: Any,
        pg_collection: Any,
        **unused: Any,  # noqa: ARG002
    ) -> None:
        super().__init__()
        self.config, self.num_gemms, self.partition_dim = config, num_gemms, partition_dim
        self._groups = pg_collection
        whole = [output_size, input_size]
        shard = list(whole)
        shard[partition_dim] //= pg_collection.expt_tp.size()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        for expert in range(num_gemms):
            weight = nn.Parameter(torch.empty(shard, dtype=config.params_dtype, device=device))
            self.register_parameter(f"weight{expert}", weight)
            self._initialize(weight, whole, init_method)
            weight.allreduce = not self._uses_expert_groups()
        # Checkpoints hold one extra state per expert; the module loads only one.
        self.register_load_state_dict_pre_hook(
            lambda _, state, prefix, *__: [
                state.pop(f"{prefix}_extra_state{expert}", None) for expert in range(1, num_gemms)
            ]
        )

    def _initialize(self, weight: nn.Parameter, whole: list[int], init_method: Any) -> None:
        group = self._groups.expt_tp
        if not self.config.use_cpu_initialization:
            _initialize_affine_weight_gpu(weight, init_method, partition_dim=self.partition_dim, is_expert=True)
            return
        _initialize_affine_weight_cpu(
            weight,
            *whole,
            weight.shape[self.partition_dim],
            self.partition_dim,
            init_method,
            params_dtype=self.config.params_dtype,
            rank=group.rank(),
            world_size=group.size(),
        )

    def _uses_expert_groups(self) -> bool:
        config = self.config
        etp, tp = config.expert_tensor_parallel_size, config.tensor_model_parallel_size
        return config.expert_model_parallel_size > 1 or etp != tp

    def get_extra_state(self) -> None:
        """Return nothing, under the key that Transformer-Engine's checkpoints have."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore what Transformer-Engine wrote."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Describe the shards under the keys that Transformer-Engine's and Megatron's sequential experts use.

        Args:
            prefix: prefix of the keys.
            sharded_offsets: offsets that the enclosing modules add.
            metadata: Megatron's metadata, passed on.

        Returns:
            Keys of this module -> shards.
        """
        groups, shards = self._groups, {}
        singleton = (metadata or {}).get("singleton_local_shards", False)
        for expert in range(self.num_gemms):
            number = groups.ep.rank() * self.num_gemms + expert
            offset = (len(sharded_offsets), number, groups.ep.size() * self.num_gemms)
            described = make_sharded_tensors_for_checkpoint(
                {"weight": getattr(self, f"weight{expert}"), "_extra_state": None},
                f"{number}.{prefix}" if singleton else prefix,
                {"weight": self.partition_dim},
                sharded_offsets if singleton else (*sharded_offsets, offset),
                tp_group=groups.expt_tp,
                dp_cp_group=(metadata or {}).get("dp_cp_group"),
            )
            for key, shard in described.items():
                pipeline, tensor, _ = shard.replica_id
                shard.replica_id = (pipeline, tensor, parallel_state.get_expert_data_parallel_rank())
                name = key.rpartition(".")[2]
                shards[prefix + (f"weight{expert}" if name == "weight" else f"{name}{expert or ''}")] = shard
        return shards


class AlignedLocalColumnGroupedLinear(AlignedGroupedLinear, LocalGroupedLinear):
    """fc1 without Transformer-Engine: rows [gate shard; up shard] of each expert."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, partition_dim=COLUMN, **named)


class AlignedLocalRowGroupedLinear(AlignedGroupedLinear, LocalGroupedLinear):
    """fc2 without Transformer-Engine."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, partition_dim=ROW, **named)


@functools.cache
def transformer_engine_grouped_linears() -> tuple[type, type]:
    """Return the classes of fc1 and fc2 with Transformer-Engine.

    Returns:
        Subclasses of Megatron's `TEColumnParallelGroupedLinear` and `TERowParallelGroupedLinear`.

    Raises:
        ImportError: Transformer-Engine is not installed.
    """
    from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear

    if TEColumnParallelGroupedLinear is None:
        raise ImportError(
            f"Transformer-Engine is not installed: {pip_command('megatron')}, or build the model from "
            "Megatron's local layer spec"
        )
    column = type(
        "AlignedTEColumnGroupedLinear", (AlignedGroupedLinear, TEColumnParallelGroupedLinear), {"partition_dim": COLUMN}
    )
    row = type("AlignedTERowGroupedLinear", (AlignedGroupedLinear, TERowParallelGroupedLinear), {"partition_dim": ROW})
    return column, row
