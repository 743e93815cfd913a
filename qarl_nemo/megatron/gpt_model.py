"""An aligned Megatron-core GPTModel from a Qwen3-MoE's Hugging Face config."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.megatron.spec import align_spec
from qarl_nemo.megatron.translatable import require_translatable

# Embedding and head are split over tensor-parallel ranks in multiples of this many rows.
_VOCAB_MULTIPLE = 128


def gpt_model(
    hf: Any, alignment: Alignment, dtype: torch.dtype, *, transformer_engine: bool, **settings: Any
) -> GPTModel:
    """Build this rank's part, on the current device; its weights are random.

    Args:
        hf: Hugging Face config of a Qwen3-MoE.
        alignment: what the model executes.
        dtype: dtype of parameters and activations.
        transformer_engine: build from Transformer-Engine's layers; else from Megatron's local ones.
        settings: more of `TransformerConfig`'s, such as `moe_token_dispatcher_type`.

    Raises:
        ValueError: the model has features that are not translated, or settings rule out aligned experts; all are
            listed.
    """
    require_translatable(hf)
    config = TransformerConfig(**_settings(hf, dtype, transformer_engine) | settings)
    moe = {"num_experts": hf.num_experts, "qk_layernorm": True}
    if transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=True, **moe)
    else:
        spec = get_gpt_layer_local_spec(moe_grouped_gemm=False, normalization="RMSNorm", **moe)
    rows = _VOCAB_MULTIPLE * config.tensor_model_parallel_size
    model = GPTModel(
        config=config,
        transformer_layer_spec=align_spec(spec, config, alignment, transformer_engine=transformer_engine),
        vocab_size=-(-hf.vocab_size // rows) * rows,
        max_sequence_length=hf.max_position_embeddings,
        # Gather the logits of the whole vocabulary on every rank.
        parallel_output=False,
        position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
    )
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model = model.to(device, dtype)
    if hf.pad_token_id is not None and not hf.tie_word_embeddings:
        _leave_padding_alone(model.embedding.word_embeddings.weight, hf.pad_token_id)
    return model


def _leave_padding_alone(weight: nn.Parameter, pad_token_id: int) -> None:
    # As in transformers, the padding token's row gets no gradient: it is zero, and there the next norm would multiply
    # gradients by 1000.
    row = pad_token_id - parallel_state.get_tensor_model_parallel_rank() * len(weight)
    if 0 <= row < len(weight):
        index = torch.tensor([row], device=weight.device)
        weight.register_hook(lambda grad: grad.index_fill(0, index, 0))


def _settings(hf: Any, dtype: torch.dtype, transformer_engine: bool) -> dict[str, Any]:
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": hf.head_dim,
        "ffn_hidden_size": hf.moe_intermediate_size,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "num_moe_experts": hf.num_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_enable_routing_replay": True,
        "moe_grouped_gemm": True,
        "moe_permute_fusion": transformer_engine,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "tensor_model_parallel_size": tensor_parallel,
        "sequence_parallel": tensor_parallel > 1,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # The objective divides by global counts, so gradients are added over ranks, not averaged.
        "calculate_per_token_loss": True,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
