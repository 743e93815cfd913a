"""QuRL's update-aware quantization, as learning rates. Imports no torch.

QuRL divides the weights that read a norm's output by s before RL and multiplies that norm's weight by s. The model
computes what it computed, but gradients of the divided weights grow by s while the weights shrank by s, so that an
update is s^2 times as large beside them, and beside the steps of their grid. Every grid here scales with its weights:
codes stay as they are for a power of two, and nothing is gained but larger updates. AdamW and Muon divide a gradient
by its own size, which leaves s. The same trajectory comes from the weights as they are:

    q, k, v, gate, up            learning rate * s       weight decay / s
    the norm in front of them    learning rate / s       weight decay * s

No weight is touched, a checkpoint is anyone's, and s = 1.5 rounds nothing. One difference: QuRL's division of a router
behind the same norm would speed up the router, too, which here learns as before.

Source: arXiv 2602.13953, section on update-aware quantization.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field

UpdateAwareScale = Annotated[
    float,
    Field(
        ge=1,
        le=16,
        description="QuRL's s: quantized q, k, v, gate, up learn s times as fast, norms before them 1 / s times.",
    ),
]

# Target -> the projections that read a norm's output, and that norm, in Hugging Face's and in Megatron's names.
_BEHIND_NORMS = {
    "attention": (
        (r"self_attn\.[qkv]_proj\.weight", "input_layernorm.weight"),
        (r"self_attention\.linear_qkv\.weight", "input_layernorm.weight"),
    ),
    "experts": (
        (r"mlp\.experts\.gate_up_proj", "post_attention_layernorm.weight"),
        (r"mlp\.experts\.linear_fc1\.weight\d+", "pre_mlp_layernorm.weight"),
    ),
    "mlp": (
        (r"mlp\.(?:gate|up)_proj\.weight", "post_attention_layernorm.weight"),
        (r"mlp\.linear_fc1\.weight", "pre_mlp_layernorm.weight"),
    ),
}


def lr_factors(names: Iterable[str], targets: Sequence[str], scale: float) -> dict[str, float]:
    """Return what the learning rate of a parameter is multiplied by, and its weight decay divided by.

    Args:
        names: every parameter's name, Hugging Face's or Megatron's.
        targets: what is quantized; other projections, and norms in front of them alone, learn as before.
        scale: QuRL's s; 1 changes nothing.

    Returns:
        Name -> factor, for the parameters whose factor is not 1.
    """
    pairs = [pair for target in targets for pair in _BEHIND_NORMS[target]] if scale != 1 else []
    factors: dict[str, float] = {}
    for name in names:
        for projection, norm in pairs:
            found = re.fullmatch(rf"(.*layers\.\d+\.){projection}", name)
            if found:
                factors |= {name: scale, found[1] + norm: 1 / scale}
    return factors
