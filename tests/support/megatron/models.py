"""A Qwen3-MoE, or a dense Qwen3, as Hugging Face's model and as Megatron's on any layout, holding the same weights.

On GPUs Megatron's layers are Transformer-Engine's; without one they are its local ones, on a CPU.
"""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    from support.megatron import on_cpu  # noqa: F401 before any Megatron module

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.megatron.spec import align_spec

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; the smallest that every part of the code can run on a CPU.

    Attributes:
        scale: factor on the weights; above 1 a difference in the first layer's last bits grows in every layer.
    """

    hidden: int = 128
    inner: int = 128
    experts: int = 8
    top_k: int = 2
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 60
    padded_vocab: int = 64
    sequence: int = 16
    scale: float = 3.0


TINY, DENSE = Shape(), Shape(experts=0)


@dataclass(frozen=True)
class Layout:
    """How ranks share a model."""

    tp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1


@contextmanager
def parallel(layout: Layout) -> Iterator[None]:
    """Megatron's process groups of a layout, over all ranks there are."""
    _forget_models()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    if ON_GPU:
        model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        groups = parallel_state._global_process_group_list
        parallel_state.destroy_model_parallel()
        # Megatron forgets them, and communicators of many layouts would fill a GPU.
        for group in groups:
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        parallel_state._global_process_group_list = None


def _forget_models() -> None:
    # Groups live as long as the models of earlier layouts, each with three threads. A wrapper's gradient hooks hold it
    # in C++, where the collector does not see the cycle.
    for wrapper in [found for found in gc.get_objects() if isinstance(found, DistributedDataParallel)]:
        vars(wrapper).clear()
    gc.collect()


@functools.cache
def weights_of(dtype: torch.dtype, shape: Shape) -> dict[str, Tensor]:
    # On the host: a GPU has room for few models of whole layers.
    return {name: tensor.cpu() for name, tensor in hugging_face_model(dtype, shape).state_dict().items()}


def hugging_face_model(dtype: torch.dtype = torch.float32, shape: Shape = TINY) -> PreTrainedModel:
    """Weights of the size that quantization shows in, the same on every call."""
    torch.manual_seed(1)
    settings = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": shape.sequence,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    experts = {
        "moe_intermediate_size": shape.inner,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
    }
    with DEVICE:
        if shape.experts:
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, **experts))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**settings))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=shape.scale * parameter.shape[-1] ** -0.5)
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
    return model


def transformer_config(layout: Layout, dtype: torch.dtype, shape: Shape = TINY, **options) -> TransformerConfig:
    """The same architecture, in Megatron's words."""
    settings = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.inner,
        "moe_ffn_hidden_size": shape.inner if shape.experts else None,
        "num_moe_experts": shape.experts or None,
        "moe_router_topk": shape.top_k,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": bool(shape.experts),
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "tensor_model_parallel_size": layout.tp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": not ON_GPU,
        "moe_permute_fusion": ON_GPU,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**settings | options)


def plain_spec(num_experts: int = TINY.experts) -> ModuleSpec:
    """Megatron's own layer."""
    if ON_GPU:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts or None, moe_grouped_gemm=bool(num_experts), qk_layernorm=True
        )
    return get_gpt_layer_local_spec(
        num_experts=num_experts or None, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )


def gpt_model(config: TransformerConfig, spec: ModuleSpec, shape: Shape = TINY, **stage) -> GPTModel:
    """A model with random weights, or a stage of it."""
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.padded_vocab,
        max_sequence_length=shape.sequence,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=False,
        **stage,
    ).to(DEVICE)


def megatron_chunks(
    layout: Layout, alignment: Alignment, dtype: torch.dtype = torch.float32, shape: Shape = TINY, **options
) -> list[GPTModel]:
    """This rank's stages of the aligned model, holding `hugging_face_model`'s weights."""
    config = transformer_config(layout, dtype, shape, **options)
    chunks = []
    for stage in range(layout.vpp or 1):
        virtual = {"ignore_virtual": False, "vp_stage": stage} if layout.vpp else {}
        chunk = gpt_model(
            config,
            align_spec(plain_spec(shape.experts), config, alignment, transformer_engine=ON_GPU, vp_stage=stage),
            shape,
            pre_process=parallel_state.is_pipeline_first_stage(**virtual),
            post_process=parallel_state.is_pipeline_last_stage(**virtual),
            vp_stage=stage if layout.vpp else None,
        )
        load(chunk, weights_of(dtype, shape), shape)
        chunks.append(chunk)
    return chunks


def megatron_model(
    layout: Layout, alignment: Alignment, dtype: torch.dtype = torch.float32, shape: Shape = TINY, **options
) -> GPTModel:
    """This rank's one stage."""
    (model,) = megatron_chunks(layout, alignment, dtype, shape, **options)
    return model


def _tensor_shard(whole: Tensor, dim: int) -> Tensor:
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return whole.chunk(size, dim)[rank]


def _expert_shard(whole: Tensor, dim: int) -> Tensor:
    group = parallel_state.get_expert_tensor_parallel_group()
    return whole.chunk(group.size(), dim)[group.rank()]


def interleave(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    """Megatron's rows: for each KV head its query heads, then its key and its value."""
    parts = [part.unflatten(0, (shape.kv_heads, -1)) for part in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 1)


@torch.no_grad()
def load(model: GPTModel, weights: dict[str, Tensor], shape: Shape) -> None:
    """Fill this rank's part from Hugging Face's weights."""

    def padded(name):
        return torch.nn.functional.pad(weights[name], (0, 0, 0, shape.padded_vocab - shape.vocab))

    if model.pre_process:
        model.embedding.word_embeddings.weight.copy_(_tensor_shard(padded("model.embed_tokens.weight"), 0))
    if model.post_process:
        model.decoder.final_layernorm.weight.copy_(weights["model.norm.weight"])
        model.output_layer.weight.copy_(_tensor_shard(padded("lm_head.weight"), 0))
    for layer in model.decoder.layers:
        prefix = f"model.layers.{layer.layer_number - 1}."
        attention = prefix + "self_attn."
        qkv = interleave(*(weights[f"{attention}{name}_proj.weight"] for name in "qkv"), shape)
        layer.self_attention.linear_qkv.weight.copy_(_tensor_shard(qkv, 0))
        layer.self_attention.linear_proj.weight.copy_(_tensor_shard(weights[f"{attention}o_proj.weight"], 1))
        layer.self_attention.q_layernorm.weight.copy_(weights[f"{attention}q_norm.weight"])
        layer.self_attention.k_layernorm.weight.copy_(weights[f"{attention}k_norm.weight"])
        # Transformer-Engine's own linear_qkv holds the norm before it.
        fused = getattr(layer.self_attention.linear_qkv, "layer_norm_weight", None)
        norm = layer.input_layernorm.weight if fused is None else fused
        norm.copy_(weights[f"{prefix}input_layernorm.weight"])
        layer.pre_mlp_layernorm.weight.copy_(weights[f"{prefix}post_attention_layernorm.weight"])
        if not shape.experts:
            gate_up = [_tensor_shard(weights[f"{prefix}mlp.{name}_proj.weight"], 0) for name in ("gate", "up")]
            layer.mlp.linear_fc1.weight.copy_(torch.cat(gate_up))
            layer.mlp.linear_fc2.weight.copy_(_tensor_shard(weights[f"{prefix}mlp.down_proj.weight"], 1))
            continue
        layer.mlp.router.weight.copy_(weights[f"{prefix}mlp.gate.weight"])
        gate_up, down = (weights[f"{prefix}mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
        for local, expert in enumerate(layer.mlp.local_expert_indices):
            gate, up = (_expert_shard(part, 0) for part in gate_up[expert].chunk(2))
            getattr(layer.mlp.experts.linear_fc1, f"weight{local}").copy_(torch.cat([gate, up]))
            getattr(layer.mlp.experts.linear_fc2, f"weight{local}").copy_(_expert_shard(down[expert], 1))
