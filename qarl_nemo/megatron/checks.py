"""Refuses settings of Megatron under which an aligned model would not run, or not compute what the engine computes."""

from typing import Any

import torch

from qarl_kernels import QuantFormat, weight_problems
from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.parallelism import divisors, either

# Setting -> why it is refused. A setting that this Megatron version does not know counts as off.
_REFUSED = {
    "add_bias_linear": "expert biases are not published",
    "fp8": "Transformer-Engine would quantize a second time; alignment brings its own FP8",
    "fp4": "Transformer-Engine would quantize a second time",
    "fp8_param": "masters must stay BF16",
    "quant_recipe": "Transformer-Engine would quantize a second time",
    "moe_single_grouped_weight": "experts must stay separate parameters weight0, weight1, ...",
    "moe_use_grouped_tensor": "rows need no padding, and counts are read on the host",
    "moe_use_legacy_grouped_gemm": "its fused weights lie [in, out]",
    "use_transformer_engine_op_fuser": "its fused experts multiply the router weight before fc2",
    "moe_mlp_glu_interleave_size": "published rows are all gates, then all ups",
    "moe_apply_probs_on_input": "the engine multiplies router weights after fc2",
    "moe_latent_size": "experts would not see the hidden state",
    "moe_expert_capacity_factor": "the engine drops no token",
    "moe_pad_expert_input_to_capacity": "the engine drops no token",
    "moe_router_padding_for_quantization": "padded rows would be summed",
    "moe_input_jitter_eps": "the engine adds no noise",
    "moe_z_loss_coeff": "the aligned router computes no load-balancing loss",
    "moe_router_enable_expert_bias": "the aligned router has no expert bias",
    "moe_router_num_groups": "the aligned router chooses among all experts",
    "moe_router_topk_scaling_factor": "the aligned router does not scale its weights",
    "moe_router_force_load_balancing": "the engine routes by its router",
    "moe_router_force_biased": "the engine routes by its router",
    "moe_shared_expert_overlap": "the aligned sum does not add shared experts",
    "delay_wgrad_compute": "weight gradients are computed with input gradients",
    "overlap_dispatch_backward_with_experts_wgrad": "weight gradients are computed with input gradients",
    "overlap_moe_expert_parallel_comm": "a layer remembers one microbatch's routes at a time",
    "moe_paged_stash": "the experts' autograd saves tensors itself",
    "fine_grained_activation_offloading": "the experts' autograd saves tensors itself",
}
# The same for engine rounding: settings that its norms and rotation would not follow.
_REFUSED_BY_ROUNDING = {
    "layernorm_zero_centered_gamma": "the engine multiplies by the weight itself",
    "fp32_residual_connection": "the engine rounds the residual",
    "fused_residual_rmsnorm": "the engine's norm reads the rounded sum",
    "apply_residual_connection_post_layernorm": "the engine adds what was not normalized",
    "enable_mhc_connections": "the engine has one residual stream",
    "hidden_dropout": "the engine drops nothing",
    "qk_l2_norm": "the engine's norms of queries and keys have weights",
    "multi_latent_attention": "whole heads are rotated",
    "attention_output_gate": "Qwen's attention has none",
    "rotary_interleaved": "the engine's pairs are half a head apart",
    "fused_single_qkv_rope": "it rotates inside Transformer-Engine",
    "mrope_section": "tokens have one position",
    "no_rope_freq": "the engine rotates in every layer",
    "rope_scaling": "angles are the unscaled ones",
    "seq_len_interpolation_factor": "angles are the unscaled ones",
    "yarn_rotary_scaling_factor": "angles are the unscaled ones",
}
_DISPATCHERS = ("alltoall", "allgather")


def require_supported(config: Any, alignment: Alignment) -> None:
    """Raise unless an aligned model can be built with these settings.

    Args:
        config: Megatron's `TransformerConfig`.
        alignment: what the model would execute.

    Raises:
        ValueError: lists every setting that is refused and why, and every weight that cannot be stored.
    """
    problems = _refused(config, _REFUSED)
    if alignment.engine_rounding:
        problems += _rounding_problems(config)
    if not config.gated_linear_unit or config.activation_func is not torch.nn.functional.silu:
        problems.append("activation_func, gated_linear_unit: MLPs must be SwiGLU (silu, True)")
    if "experts" in alignment.targets:
        problems += _value_problems(config)
    problems += _graph_problems(config, alignment)
    problems += shard_problems(config, alignment)
    if problems:
        raise ValueError(f"{len(problems)} setting(s) rule out an aligned model:\n  " + "\n  ".join(problems))


def shard_problems(config: Any, alignment: Alignment) -> list[str]:
    """Say which weights' shards an aligned model could not store.

    Args:
        config: sizes of the model and of its parallelism, named as in Megatron's `TransformerConfig`.
        alignment: what the model would execute.
    """
    by_target = {"experts": _expert_problems, "attention": _attention_problems, "mlp": _mlp_problems}
    return [problem for target in alignment.targets for problem in by_target[target](config, alignment.format)]


def _refused(config: Any, refused: dict[str, str]) -> list[str]:
    return [f"{name}={getattr(config, name)!r}: {why}" for name, why in refused.items() if getattr(config, name, None)]


def _rounding_problems(config: Any) -> list[str]:
    # The last two are Bridge's settings, which only its providers have.
    legal = {"normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_percent": 1.0}
    problems = _refused(config, _REFUSED_BY_ROUNDING) + [
        f"{name}={getattr(config, name)!r}: legal is {value!r}"
        for name, value in legal.items()
        if getattr(config, name, value) != value
    ]
    return [f"{problem}; or leave norms and rotation to Megatron: engine_rounding=False" for problem in problems]


def _value_problems(config: Any) -> list[str]:
    problems = []
    if config.moe_token_dispatcher_type not in _DISPATCHERS:
        problems.append(
            f"moe_token_dispatcher_type={config.moe_token_dispatcher_type!r}: legal are {', '.join(_DISPATCHERS)}"
        )
    if config.moe_router_score_function != "softmax":
        problems.append(f"moe_router_score_function={config.moe_router_score_function!r}: legal is 'softmax'")
    balancing, coefficient = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    # Where NeMo-RL sets 'none', Bridge leaves a coefficient that is then not read.
    if balancing != "none" and (balancing != "aux_loss" or coefficient):
        problems.append(
            f"moe_router_load_balancing_type={balancing!r}, moe_aux_loss_coeff={coefficient}: the aligned router "
            "computes no load-balancing loss; set 'none'"
        )
    return problems


def _graph_problems(config: Any, alignment: Alignment) -> list[str]:
    graphs = getattr(config, "cuda_graph_impl", None) or "none"
    if graphs == "none":
        return []
    if "experts" in alignment.targets:
        why = "row counts are read on the host"
    elif alignment.format.is_quantized:
        # A replay runs no Python, which quantizes weights once they have changed.
        why = "a replayed graph would multiply by the quantized weights of its capture"
    else:
        return []
    return [f"cuda_graph_impl={graphs!r}: {why}; set 'none'"]


def _expert_problems(config: Any, fmt: QuantFormat) -> list[str]:
    return _gated_problems(config, fmt, ("fc1", "fc2"), "moe_ffn_hidden_size", "expert_tensor_parallel_size")


def _mlp_problems(config: Any, fmt: QuantFormat) -> list[str]:
    return _gated_problems(config, fmt, ("linear_fc1", "linear_fc2"), "ffn_hidden_size", "tensor_model_parallel_size")


def _gated_problems(config: Any, fmt: QuantFormat, names: tuple[str, str], width: str, split: str) -> list[str]:
    """Say which shards of two linears around SwiGLU cannot be stored; `width` and `split` are settings' names."""
    whole, parts = getattr(config, width), getattr(config, split) or 1
    inner, rest = divmod(whole, parts)
    if rest:
        legal = _storable(fmt, names[1], config.hidden_size, whole, divisors(whole))
        return [f"{split}={parts} does not divide {width}={whole}; it may be {legal}"]
    problems, where = [], f"({width}={whole}, {split}={parts})"
    for name, shape in zip(names, ((2 * inner, config.hidden_size), (config.hidden_size, inner)), strict=True):
        problems += [f"{name} shard {list(shape)} {where}: {problem}" for problem in weight_problems(shape, fmt)]
    if inner % fmt.scale_rows:
        rows = f"{names[0]} shard of {inner} gate rows {where}"
        problems.append(f"{rows}: a {fmt.scale_rows}-row block would hold gate and up")
    return problems + _cut_problems(fmt, names[1], f"{split}={parts}", parts)


def _storable(fmt: QuantFormat, name: str, rows: int, columns: int, sizes: list[int]) -> str:
    """Name the sizes, 1 included, by which the columns of a weight can be divided among ranks."""
    return either(
        size
        for size in sizes
        if size == 1 or not (_cut_problems(fmt, name, "", size) or weight_problems((rows, columns // size), fmt))
    )


def _cut_problems(fmt: QuantFormat, name: str, setting: str, parts: int) -> list[str]:
    if parts == 1:
        return []
    if fmt.tensor_scaled:
        return [f"{setting}: {fmt.name} has one scale for a whole weight, of which each rank would make its own; set 1"]
    # Packed codes of whole groups fill int32 words, so that nothing else is cut.
    if not fmt.row_scaled:
        return []
    return [f"{setting}: {fmt.name} scales whole rows of {name}, which it would cut; set 1"]


def _attention_problems(config: Any, fmt: QuantFormat) -> list[str]:
    tp, width = config.tensor_model_parallel_size, config.kv_channels
    heads, groups = config.num_attention_heads, config.num_query_groups
    if heads % tp or groups % tp:
        legal = _storable(fmt, "linear_proj", config.hidden_size, heads * width, divisors(heads, groups))
        return [
            f"tensor_model_parallel_size={tp} does not divide {heads} attention heads and {groups} KV heads; it may be "
            f"{legal}"
        ]
    problems = []
    shapes = {
        "linear_qkv": ((heads + 2 * groups) // tp * width, config.hidden_size),
        "linear_proj": (config.hidden_size, heads // tp * width),
    }
    for name, shape in shapes.items():
        where = f"{name} shard {list(shape)} (kv_channels={width}, tensor_model_parallel_size={tp})"
        problems += [f"{where}: {problem}" for problem in weight_problems(shape, fmt)]
    if width % fmt.scale_rows:
        problems.append(f"kv_channels={width}: a {fmt.scale_rows}-row block would hold several heads of fused q, k, v")
    return problems + _cut_problems(fmt, "linear_proj", f"tensor_model_parallel_size={tp}", tp)
