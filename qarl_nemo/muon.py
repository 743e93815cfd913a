"""The Muon rule that every learner uses, and its settings in torch and Megatron. Imports no torch.

    B <- lerp(B, G, 1 - momentum)                                  momentum of the gradient G
    U <- orthogonalized(lerp(G, B, momentum))                      Nesterov; Newton-Schulz
    W <- W - lr * weight_decay * W - lr * 0.2 * sqrt(max(rows, columns)) * U

A matrix with orthonormal rows or columns has a root mean square of 1 / sqrt(max(rows, columns)). Whatever the shape, an
update therefore has a root mean square of 0.2 learning rates, about as much as AdamW's (0.185 in fact, because five
Newton-Schulz steps leave singular values between 0.7 and 1.2). This is Moonshot's Muon. The paper says only "Muon",
with a learning rate of 1e-6 and a weight decay of 0.01; those are AdamW's numbers, and with this rule steps have
AdamW's size. Two other rules have the same name: Megatron's default lacks the factor and steps five times as far;
Keller Jordan's, lr * sqrt(max(1, rows / columns)), takes steps whose root mean square shrinks as the matrix grows.

Source: arXiv 2502.16982, Eq. 4; arXiv 2604.07853, appendix B.
"""

from typing import Any

# The version with which Megatron-core 0.20 has run.
MEGATRONS_PACKAGE = "emerging-optimizers==0.3.0"
"""What Megatron's Muon is made of, for Python 3.12 and newer, as pip installs it."""
MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.95)
"""AdamW's betas for the embeddings, head, norms and routers, which Muon does not step."""

TORCH: dict[str, Any] = {
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "ns_steps": 5,
    # 0.2 * sqrt(max(rows, columns)).
    "adjust_lr_fn": "match_rms_adamw",
}
"""The rule in `torch.optim.Muon`'s words."""

MEGATRON: dict[str, Any] = {
    "muon_momentum": MOMENTUM,
    "muon_nesterov": True,
    # torch's coefficients.
    "muon_coefficient_type": "simple",
    "muon_num_ns_steps": 5,
    "muon_fp32_matmul_prec": "medium",
    # sqrt(max(rows, columns)), times the factor below.
    "muon_scale_mode": "spectral",
    "muon_extra_scale_factor": 0.2,
    # q, k and v are separate matrices; one that tensor-parallel ranks share is orthogonalized as a whole.
    "muon_split_qkv": True,
    "muon_tp_mode": "duplicated",
    "muon_scalar_optimizer": "adam",
    "adam_beta1": ADAM_BETAS[0],
    "adam_beta2": ADAM_BETAS[1],
}
"""The rule for Megatron-core 0.20's `OptimizerConfig`, which NeMo-RL builds from `policy.megatron_cfg.optimizer`."""


def different_settings(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the rule's settings that a NeMo-RL optimizer block does not have.

    Args:
        optimizer: `policy.megatron_cfg.optimizer`.

    Returns:
        Key -> the rule's value, where the block has another one, or has none and Megatron's default differs.
    """
    return {key: value for key, value in MEGATRON.items() if optimizer.get(key) != value}
