"""How far Muon steps for a learning rate: the recipes' on NeMo-RL against the embedded engine's.

    python tests/campaign/muon_rms.py

The embedded engine takes a real step. The recipes' keys are carried out as Megatron-core 0.20 and Emerging-Optimizers
define them; where Emerging-Optimizers is installed, a test holds both against its own functions.
"""

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from qarl_nemo.train.config import MuonConfig
from qarl_nemo.train.optimizer import MasterOptimizer

RECIPES = Path(__file__).parents[2] / "examples" / "configs"
# What OptimizerConfig holds where a recipe is silent.
MEGATRON_DEFAULTS = {
    "muon_momentum": 0.95,
    "muon_nesterov": False,
    "muon_coefficient_type": "quintic",
    "muon_num_ns_steps": 5,
    "muon_scale_mode": "spectral",
    "muon_extra_scale_factor": 1.0,
}
COEFFICIENTS = {
    "simple": [(3.4445, -4.7750, 2.0315)],
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
}
SHAPES = ((256, 256), (512, 128), (128, 512))
_NAME = "model.layers.0.self_attn.o_proj.weight"
_LR = 1e-2


def measure() -> float:
    """Return the larger of quotient and inverse of the recipes' update and the embedded engine's, at its worst."""
    quotients = [
        rms(megatron_update(settings, gradient)) / rms(embedded_update(gradient))
        for settings in recipe_settings().values()
        for gradient in gradients()
    ]
    return max(max(quotient, 1 / quotient) for quotient in quotients)


def recipe_settings() -> dict[str, dict[str, Any]]:
    """Return every recipe's optimizer block that names a Muon, by file."""
    blocks = {}
    for path in sorted(RECIPES.glob("qarl-*.yaml")):
        policy = yaml.safe_load(path.read_text(encoding="utf-8")).get("policy") or {}
        block = (policy.get("megatron_cfg") or {}).get("optimizer") or {}
        if "muon" in str(block.get("optimizer")):
            blocks[path.name] = block
    return blocks


def gradients() -> list[Tensor]:
    """Return random gradients of several shapes, FP32."""
    source = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=source) for shape in SHAPES]


def rms(update: Tensor) -> float:
    """Return the root mean square of a matrix."""
    return float(update.square().mean().sqrt())


def embedded_update(gradient: Tensor) -> Tensor:
    """Return what one step of the embedded engine's optimizer takes off a weight, in units of the learning rate.

    Args:
        gradient: [N, K] FP32.

    Returns:
        [N, K].
    """
    weight = nn.Parameter(torch.zeros_like(gradient))
    other = nn.Parameter(torch.zeros(1))
    optimizer = MasterOptimizer(
        [(_NAME, weight), ("model.norm.weight", other)], MuonConfig(lr=_LR, weight_decay=0.0), max_grad_norm=1e9
    )
    weight.grad = gradient.clone()
    optimizer.step()
    return -weight.detach() / _LR


def megatron_update(settings: dict[str, Any], gradient: Tensor) -> Tensor:
    """Return what the first step of Megatron's Muon takes off a weight, in units of the learning rate.

    Args:
        settings: fields of `OptimizerConfig`; missing ones have Megatron's defaults.
        gradient: [N, K] FP32.

    Returns:
        [N, K].
    """
    settings = MEGATRON_DEFAULTS | settings
    momentum = settings["muon_momentum"]
    buffer = gradient * (1 - momentum)
    update = gradient.lerp(buffer, momentum) if settings["muon_nesterov"] else buffer
    scale = megatron_scale(settings["muon_scale_mode"], *gradient.shape) * settings["muon_extra_scale_factor"]
    return scale * orthogonalized(update, settings["muon_coefficient_type"], settings["muon_num_ns_steps"])


def megatron_scale(mode: str, rows: int, columns: int) -> float:
    """Return the factor that Emerging-Optimizers' `get_muon_scale_factor` gives."""
    factors = {
        "spectral": max(rows, columns),
        "shape_scaling": max(1, rows / columns),
        "unit_rms_norm": rows / columns,
    }
    return factors[mode] ** 0.5


def orthogonalized(matrix: Tensor, coefficients: str, steps: int) -> Tensor:
    """Return the Newton-Schulz iterate X <- a X + (b X X^T + c (X X^T)^2) X of a matrix, FP32.

    Args:
        matrix: [N, K].
        coefficients: the set's name; used in turn.
        steps: iterations.

    Returns:
        [N, K].
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm()
    chosen = COEFFICIENTS[coefficients]
    for step in range(steps):
        a, b, c = chosen[step % len(chosen)]
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


if __name__ == "__main__":
    print(f"muon_rms_ratio {measure():.4f}")
