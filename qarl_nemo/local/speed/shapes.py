"""A model's parameter names and shapes from its config.json alone, and which formats vLLM's kernels take them in."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qarl_kernels import QuantFormat
from qarl_nemo.checkpoints.shapes import shape_problems
from qarl_nemo.local.model import SUPPORTED_MODEL_TYPES
from qarl_nemo.refit.names import TARGETS, module_kind


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """What a config says about a model.

    Attributes:
        config: content of config.json.
        parameters: name -> shape; a layer's experts are stacked, [num_experts, N, K].
        max_position_embeddings: longest context, tokens.
        num_attention_heads: query heads.
    """

    config: dict[str, Any]
    parameters: dict[str, tuple[int, ...]]
    max_position_embeddings: int
    num_attention_heads: int

    @property
    def targets(self) -> list[str]:
        """Targets that the model has weights of."""
        present = {_target(name) for name in self.parameters}
        return [target for target in TARGETS if target in present]


def read_shapes(path: Path) -> ModelShapes:
    """Read a config.json; no weight is allocated.

    Args:
        path: the file, or the folder that holds it.

    Returns:
        The model's shapes.

    Raises:
        ValueError: no readable config.json, or one of an unsupported or quantized model.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        model_type = raw.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not a readable config.json: {error}") from error
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(f"{file} is of a {model_type!r} model; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
    if "quantization_config" in raw:
        raise ValueError(f"{file} is of a quantized model; name the BF16 model that it was made from")
    try:
        config = AutoConfig.for_model(**raw)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} describes no model: {error}") from error
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return ModelShapes(raw, parameters, config.max_position_embeddings, config.num_attention_heads)


def shape_refusals(
    model: ModelShapes,
    fmt: QuantFormat,
    targets: Sequence[str],
    *,
    tensor_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
) -> list[str]:
    """Say why vLLM's kernels do not take a model in a format: N or K of a GPU's shard is not a multiple they need.

    Args:
        model: its shapes.
        fmt: the format.
        targets: what is quantized.
        tensor_parallel_size: GPUs that share each weight.
        enable_expert_parallel: experts are whole on each GPU.

    Returns:
        One sentence for each reason.
    """
    reasons: dict[str, None] = {}
    for name, shape in model.parameters.items():
        target = _target(name)
        if target is None or target not in targets:
            continue
        parts = 1 if target == "experts" and enable_expert_parallel else tensor_parallel_size
        split = f", on each of {parts} GPUs" if parts > 1 else ""
        for problem in shape_problems(_weight_name(name), target, _shard(name, shape, parts), fmt):
            reasons[f"{target}: {problem}{split}"] = None
    return list(reasons)


def _shard(name: str, shape: tuple[int, ...], parts: int) -> tuple[int, int]:
    rows, columns = shape[-2:]
    if "o_proj" in name or "down_proj" in name:
        return rows, math.ceil(columns / parts)
    return math.ceil(rows / parts / (2 if "gate_up_proj" in name else 1)), columns


def _weight_name(name: str) -> str:
    return name.removesuffix(".weight") + ".weight"


def _target(name: str) -> str | None:
    kind = module_kind(name.removesuffix(".weight"))
    return kind if kind in TARGETS else None
