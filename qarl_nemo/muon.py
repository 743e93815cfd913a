"""Which Muon is meant, said once for every learner. Imports no torch.

    B <- lerp(B, G, 1 - momentum)                                  momentum of the gradient G
    U <- orthogonalized(lerp(G, B, momentum))                      Nesterov; Newton-Schulz
    W <- W - lr * weight_decay * W - lr * 0.2 * sqrt(max(rows, columns)) * U

A matrix with orthonormal rows or columns has the root mean square 1 / sqrt(max(rows, columns)), so an update has 0.2 of
the learning rate: about what AdamW's have, whatever the shape. This is Moonshot's Muon. The paper says "Muon" with a
learning rate of 1e-6 and a weight decay of 0.01, numbers of an AdamW; with this rule they are steps of its size. Five
Newton-Schulz steps leave singular values between 0.7 and 1.2, so that it is 0.185 in fact. Two other rules go by the
same name: Megatron's default, without the factor, steps five times as far, and Keller Jordan's, lr * sqrt(max(1, rows /
columns)), by a root mean square that shrinks with the matrix.

Source: arXiv 2502.16982, Eq. 4; arXiv 2604.07853, appendix B.
"""

from typing import Any

MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.95)
"""Of embeddings, head, norms and routers, which are AdamW's."""

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
    # sqrt(max(rows, columns)), times the factor.
    "muon_scale_mode": "spectral",
    "muon_extra_scale_factor": 0.2,
    # q, k and v each alone; a matrix that tensor parallel ranks share as a whole, whatever their number.
    "muon_split_qkv": True,
    "muon_tp_mode": "duplicated",
    "muon_scalar_optimizer": "adam",
    "adam_beta1": ADAM_BETAS[0],
    "adam_beta2": ADAM_BETAS[1],
}
"""The rule for Megatron-core 0.20's `OptimizerConfig`, which NeMo-RL makes of `policy.megatron_cfg.optimizer`."""


def different_settings(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the rule's settings that a NeMo-RL optimizer block does not have.

    Args:
        optimizer: `policy.megatron_cfg.optimizer`.

    Returns:
        Key -> the rule's value, where the block says another one or none and Megatron's own default would hold.
    """
    return {key: value for key, value in MEGATRON.items() if optimizer.get(key) != value}
