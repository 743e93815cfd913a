"""Megatron models with Qwen3-30B-A3B's layers for the benches: plain or aligned, wrapped and optimized as in a recipe.

With a GPU the layers are Transformer-Engine's; without one Megatron's local layers, for the tests.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.megatron.spec import align_spec
from qarl_nemo.memory import ModelSize
from qarl_nemo.metrics.machine import facts

QWEN3_30B_A3B = ModelSize.read(Path(__file__).parents[2] / "examples" / "models" / "qwen3-30b-a3b")
_MAX_SEQUENCE = 8192
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
STARTED = time.perf_counter()


@dataclass(frozen=True)
class Layout:
    """How ranks share a model."""

    tp: int = 1
    ep: int = 1
    etp: int = 1


@contextmanager
def parallel(layout: Layout) -> Iterator[None]:
    """Megatron's process groups of a layout, over all ranks there are."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    yield
    parallel_state.destroy_model_parallel()


def transformer_config(architecture: ModelSize, layout: Layout, **options: Any) -> TransformerConfig:
    """Return Megatron's settings, fused where Megatron-Bridge's Qwen3-MoE is."""
    settings = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden,
        "num_attention_heads": architecture.num_heads,
        "num_query_groups": architecture.num_kv_heads,
        "kv_channels": architecture.head_dim,
        "ffn_hidden_size": 3 * architecture.hidden,
        "moe_ffn_hidden_size": architecture.inner,
        "num_moe_experts": architecture.num_experts,
        "moe_router_topk": architecture.top_k,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.tp > 1,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
        "use_cpu_initialization": not ON_GPU,
        **dict.fromkeys(
            (
                "moe_permute_fusion",
                "gradient_accumulation_fusion",
                "bias_activation_fusion",
                "bias_dropout_fusion",
                "masked_softmax_fusion",
                "apply_rope_fusion",
                "persist_layer_norm",
            ),
            ON_GPU,
        ),
    }
    return TransformerConfig(**settings | options)


def gpt_model(
    architecture: ModelSize, config: TransformerConfig, alignment: Alignment | None, *, with_output: bool
) -> GPTModel:
    """Build this rank's part of a model with random weights, the same for every alignment.

    Args:
        architecture: the model.
        config: what `transformer_config` returned.
        alignment: what it executes; None for Megatron's own layers.
        with_output: build the head, too.

    Returns:
        The model, on this rank's device.
    """
    if ON_GPU:
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=architecture.num_experts, moe_grouped_gemm=True, qk_layernorm=True
        )
    else:
        torch.manual_seed(1)
        spec = get_gpt_layer_local_spec(
            num_experts=architecture.num_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
        )
    if alignment is not None:
        spec = align_spec(spec, config, alignment, transformer_engine=ON_GPU)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=architecture.vocab_size,
        max_sequence_length=_MAX_SEQUENCE,
        post_process=with_output,
        position_embedding_type="rope",
        rotary_base=1000000,
        share_embeddings_and_output_weights=False,
    ).to(DEVICE)


OPTIMIZERS = {
    "adam": {},
    "adam_bf16": {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
}


def with_optimizer(model: GPTModel, name: str) -> tuple[DistributedDataParallel, Any]:
    """Wrap a model for training: FP32 gradients, a distributed optimizer.

    Args:
        model: what `gpt_model` returned.
        name: one of `OPTIMIZERS`: Adam in FP32, or precision-aware with BF16 moments.

    Returns:
        The wrapped model, and its optimizer.
    """
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=True
    )
    wrapped = DistributedDataParallel(model.config, settings, model)
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-6,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        **OPTIMIZERS[name],
    )
    return wrapped, get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)


@contextmanager
def process_group() -> Iterator[int]:
    """Join the process group that torchrun describes, a GPU for each process; yields this process's rank."""
    device = None
    if ON_GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if ON_GPU else "gloo", device_id=device)
    yield dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()


def say(text: str) -> None:
    """Print on the first rank, with the seconds since the start."""
    if dist.get_rank() == 0:
        print(f"[{time.perf_counter() - STARTED:4.0f} s] {text}", flush=True)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


def memory_allocated() -> int:
    """Return the bytes of this rank's tensors on the GPU."""
    return torch.cuda.memory_allocated() if ON_GPU else 0


def ran_on(num_gpus: int) -> dict[str, Any]:
    """Return the hardware and versions of what so many ranks measure."""
    return facts("cuda" if ON_GPU else "cpu", num_gpus, ["megatron-core", "transformer-engine"])
