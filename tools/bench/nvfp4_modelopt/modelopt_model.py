"""ModelOpt's NVFP4 of a Hugging Face model: calibrated, executed and exported as NeMo-RL's policy worker does it.

ModelOpt calibrates and exports on a CPU, too, but its dynamic NVFP4 blocks are fake-quantized on GPUs alone: it asserts
that the calibrated maximum lies on one, and imports its Triton kernel where it finds one. Without a GPU that very
kernel runs in Triton's interpreter (`tests` must be on the path), as a backend that ModelOpt lets users register.
Source: NeMo-RL's `modelopt/models/policy/workers/utils.py`, Megatron-Bridge's `conversion/modelopt_utils.py`.
"""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

# Before anything else imports Triton, which decides only once whether it interprets.
from support.triton_interpreter import INTERPRETED

# isort: split
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qarl_kernels import nvfp4
from qarl_nemo.names import fused_groups, target_of

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
_BACKEND = "triton_interpreter"
# Elements do not depend on the tile; the interpreter takes as long for a small one as for a large one.
_TILE = {"tile_rows": 1024, "tile_cols": 512}


class Exported(NamedTuple):
    """A weight [N, K] as ModelOpt exports it.

    Attributes:
        packed: [N, K / 2] uint8, two codes a byte.
        scale: [N, K / 16] float8_e4m3fn.
        global_scale: FP32 scalar that multiplies; ours divides.
    """

    packed: Tensor
    scale: Tensor
    global_scale: Tensor


def quantize(model: PreTrainedModel, recipe: Path) -> dict[str, Any]:
    """Insert ModelOpt's quantizers and calibrate them, weights that engines fuse together.

    In NeMo-RL's learner Megatron holds q, k and v, or gate and up, as one weight with one maximum; here ModelOpt's own
    exporter gives them one.

    Args:
        model: changed in place; a dense Hugging Face model.
        recipe: ModelOpt's YAML, e.g. NeMo-RL's `examples/modelopt/quant_configs/nvfp4_a16.yaml`.

    Returns:
        The quantized linears by name.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.recipe import load_config
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion

    mtq.quantize(model, load_config(str(recipe))["quantize"], None)
    # The recipe's patterns are for Megatron's modules, of which ModelOpt quantizes no embedding.
    embedding: Any = model.get_input_embeddings()
    embedding.weight_quantizer.disable()
    modules: dict[str, Any] = {name: one for name, one in model.named_modules() if target_of(f"{name}.weight")}
    linears = {name: one for name, one in modules.items() if one.weight_quantizer.is_enabled}
    for group in fused_groups(f"{name}.weight" for name in linears):
        preprocess_linear_fusion([linears[name.removesuffix(".weight")] for name in group])
    if INTERPRETED:
        mtq.nn.register_quant_backend(_BACKEND, _interpreted)
        for linear in linears.values():
            linear.weight_quantizer.backend = _BACKEND
    return linears


def export(linear: Any) -> Exported:
    """Return the tensors that ModelOpt's exporter writes for a linear that `quantize` returned."""
    from modelopt.torch.export import quant_utils

    scale, global_scale = quant_utils.get_weight_scaling_factor(linear), quant_utils.get_weight_scaling_factor_2(linear)
    fmt, block = quant_utils.get_quantization_format(linear), quant_utils.get_weight_block_size(linear)
    return Exported(
        quant_utils.to_quantized_weight(linear.weight, scale, fmt, global_scale, block), scale, global_scale
    )


def fake_weight(exported: Exported) -> Tensor:
    """Return the weight that ModelOpt's kernel makes of these codes before it rounds it, code * (s / G).

    Args:
        exported: what `export` returned.

    Returns:
        [N, K] FP32.
    """
    codes = nvfp4.unscaled(exported.packed, torch.ones_like(exported.scale)).float()
    scales = exported.scale.float() * exported.global_scale
    return (codes.unflatten(-1, (-1, nvfp4.GROUP)) * scales.unsqueeze(-1)).flatten(-2)


def fold(model: nn.Module) -> None:
    """Put each fake-quantized weight, rounded to BF16, in the place of its master, as a refit of NeMo-RL does.

    A forward would make the same weight again each time.

    Args:
        model: one that `quantize` changed.
    """
    import modelopt.torch.quantization as mtq

    mtq.fold_weight(model)


def _interpreted(weight: Tensor, quantizer: Any) -> Tensor:
    from modelopt.torch.kernels.quantization.gemm.fp4_kernel_hopper import fp4_fake_quant_block

    with patch("torch.cuda.device", contextlib.nullcontext):
        return fp4_fake_quant_block(weight, quantizer.amax, **_TILE)
