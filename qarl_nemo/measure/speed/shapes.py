"""A model's parameter names and shapes, from config.json only, and the formats in which vLLM's kernels take them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl_kernels import QuantFormat
from qarl_nemo.architecture import Architecture, config_file
from qarl_nemo.checkpoints.shapes import engine_problems
from qarl_nemo.files import read_json
from qarl_nemo.names import TARGETS, target_of


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """What a config says about a model.

    Attributes:
        config: content of config.json.
        architecture: its sizes.
        max_position_embeddings: longest context, tokens.
    """

    config: dict[str, Any]
    architecture: Architecture
    max_position_embeddings: int

    @property
    def targets(self) -> list[str]:
        """Targets for which the model has weights."""
        present = {target_of(name) for name, _ in self.architecture.parameters()}
        return [target for target in TARGETS if target in present]


def read_shapes(path: Path) -> ModelShapes:
    """Read a config.json; no weight is allocated.

    Args:
        path: the file, or the folder that holds it.

    Returns:
        The model's shapes.

    Raises:
        ValueError: no readable config.json, or the model is unsupported or quantized.
    """
    file = config_file(path)
    raw = read_json(file, "a model's config.json")
    model = Architecture.parse(raw, str(file))
    if raw.get("quantization_config") is not None:
        raise ValueError(f"{file} is of a quantized model; name the BF16 model that it was made from")
    context = raw.get("max_position_embeddings")
    if not isinstance(context, int) or isinstance(context, bool) or context < 1:
        raise ValueError(f"{file}: max_position_embeddings={json.dumps(context)} is not a whole number from 1")
    return ModelShapes(raw, model, context)


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
        model: the model's shapes.
        fmt: the format.
        targets: what is quantized.
        tensor_parallel_size: GPUs that share each weight.
        enable_expert_parallel: whether each GPU has whole experts.

    Returns:
        What speaks against it, a line for each target.
    """
    found = engine_problems(
        model.architecture, fmt, targets, tensor_parallel_size, whole_experts=enable_expert_parallel
    )
    split = f" (on each of {tensor_parallel_size} GPUs)" if tensor_parallel_size > 1 else ""
    whole = "experts" if enable_expert_parallel else None
    problems: dict[str, list[str]] = {}
    for target, problem in found:
        problems.setdefault(target, []).append(problem)
    return [f"{target}: {'; '.join(of)}{'' if target == whole else split}" for target, of in problems.items()]
