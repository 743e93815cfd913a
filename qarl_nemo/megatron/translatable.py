"""Which models the embedded engine's Megatron learner takes, by their Hugging Face config; imports no Megatron."""

from typing import Any


def require_translatable(hf: Any) -> None:
    """Refuse a model that `gpt_model` does not build.

    Args:
        hf: its Hugging Face config.

    Raises:
        ValueError: it is no plain Qwen3-MoE; lists every difference.
    """
    if hf.model_type != "qwen3_moe":
        raise ValueError(
            f"no Megatron model for model_type={hf.model_type!r}: the embedded engine's is a 'qwen3_moe'; set "
            "policy.megatron_cfg=null"
        )
    wrong = {
        "mlp_only_layers": (list(hf.mlp_only_layers or []), []),
        "decoder_sparse_step": (hf.decoder_sparse_step, 1),
        "attention_bias": (hf.attention_bias, False),
        "use_sliding_window": (hf.use_sliding_window, False),
        "hidden_act": (hf.hidden_act, "silu"),
        "rope_parameters.rope_type": (hf.rope_parameters.get("rope_type", "default"), "default"),
    }
    problems = [f"{name}={found!r}: legal is {legal!r}" for name, (found, legal) in wrong.items() if found != legal]
    if hf.num_experts_per_tok == 1 and hf.norm_topk_prob:
        problems.append("num_experts_per_tok=1: Megatron does not renormalize one choice; legal is 2 or more")
    if problems:
        raise ValueError("no Megatron model for this one:\n  " + "\n  ".join(problems))
