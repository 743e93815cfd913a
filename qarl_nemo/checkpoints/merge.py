"""A frozen base and what was trained on it as one BF16 checkpoint, made tensor by tensor as it is read.

W' = bf16(W + B A) with B scaled by alpha / r, summed in FP32. W is what the run executed: the base's own weight, or the
dequantized one where the base was quantized.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from qarl_kernels import QuantFormat, QuantizedWeight, largest, quantize_weight, stored_layout
from qarl_nemo.architecture import CONFIG_FILE, Architecture
from qarl_nemo.checkpoints.reader import FLOAT_DTYPES, Checkpoint, TensorInfo, TensorReader
from qarl_nemo.checkpoints.stored import in_engine_dtype, stored_infos
from qarl_nemo.names import fused_groups, target_of


@dataclass(frozen=True, slots=True)
class Training:
    """What a run trained, and what it executed beside it.

    Attributes:
        fmt: format of the frozen targets.
        targets: which layers were executed in it.
        adapters: A [r, K] and B [N, r] by the module that they are added to.
        scaling: alpha / r.
        parameters: other trained parameters, by their names in a checkpoint.
        files: where they were read from.
    """

    fmt: QuantFormat
    targets: tuple[str, ...]
    adapters: Mapping[str, tuple[Tensor, Tensor]]
    scaling: float
    parameters: Mapping[str, Tensor]
    files: tuple[Path, ...]

    def change(self, module: str) -> Tensor | None:
        """Return B A of a module in FP32, as it was executed: B scaled in its dtype; None without an adapter."""
        if module not in self.adapters:
            return None
        a, b = self.adapters[module]
        scaled = b if self.scaling == 1 else b * self.scaling
        return scaled.float() @ a.float()


class MergedReader:
    """Reads the tensors of a merged model."""

    def __init__(self, base: Checkpoint, training: Training) -> None:
        self._reader: TensorReader = base.open_reader()
        self._infos = stored_infos(base)
        self._training = training
        groups = fused_groups(self._infos) if training.fmt.tensor_scaled else []
        self._fused = {name: group for group in groups for name in group}

    def __enter__(self) -> Self:
        self._reader.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._reader.__exit__(*exception)

    def read(self, info: TensorInfo) -> Tensor:
        """Return one tensor of the merged model in BF16."""
        trained = self._training.parameters.get(info.name)
        if trained is not None:
            return trained.to(torch.bfloat16)
        weight = self.executed(info)
        change = self._training.change(info.name.removesuffix(".weight"))
        return weight if change is None else (weight.float() + change).to(torch.bfloat16)

    def executed(self, info: TensorInfo) -> Tensor:
        """Return one weight of the base in BF16, dequantized where the run executed it so."""
        fmt, name = self._training.fmt, info.name
        quantized = fmt.is_quantized and target_of(name) in self._training.targets
        if name in self._infos and not (quantized and self._infos[name].dtype not in FLOAT_DTYPES):
            weight = self._reader.read(self._infos[name]).to(torch.bfloat16)
            if not quantized:
                return weight
            return quantize_weight(weight, fmt, name=name, amax=self._amax(name)).dequantize()
        module = name.removesuffix(".weight")
        tensors = {}
        for suffix, (_, dtype) in stored_layout(info.shape, fmt).items():
            stored = self._infos[f"{module}.{suffix}"]
            # The run that was trained on it has found no scale that is lost.
            tensors[suffix] = in_engine_dtype(stored, self._reader.read(stored), dtype, [])
        return QuantizedWeight(fmt, info.shape, tensors).dequantize()

    def _amax(self, name: str) -> Tensor | None:
        """Return the largest magnitude of the weights that share a format's global scale; None if none does."""
        if name not in self._fused:
            return None
        weights = (self._reader.read(self._infos[one]) for one in self._fused[name])
        return torch.stack([largest(weight) for weight in weights]).amax(0)


def merged_checkpoint(base: Checkpoint, training: Training) -> Checkpoint:
    """Return a BF16 checkpoint of the merged model, none of which has been read.

    Returns:
        A source for `quantize_checkpoint`.
    """
    config = {key: value for key, value in base.config.items() if key != "quantization_config"}
    architecture = Architecture.parse(config, str(base.companions / CONFIG_FILE))
    files: dict[str, set[str]] = {}
    for info in base.tensors:
        files.setdefault(info.name.rpartition(".")[0], set()).update(info.files)
    for group in fused_groups(info.name for info in base.tensors) if training.fmt.tensor_scaled else []:
        # The run's weights of a group share a scale, which all of them decide.
        modules = [name.rpartition(".")[0] for name in group]
        together = set().union(*(files[module] for module in modules))
        files |= dict.fromkeys(modules, together)
    trained = tuple(str(path.absolute()) for path in training.files)

    def described(name: str, shape: tuple[int, ...]) -> TensorInfo:
        return TensorInfo(name, shape, "BF16", (*sorted(files.get(name.rpartition(".")[0], ())), *trained))

    infos = tuple(described(name, shape) for name, shape in architecture.parameters())
    return replace(base, config=config, tensors=infos, open_reader=lambda: MergedReader(base, training))


def rounding_loss(
    reader: MergedReader, info: TensorInfo, fused: Sequence[TensorInfo], training: Training
) -> tuple[float, float]:
    """Say what would remain of an adapter if the merged weight were quantized: Q(W + B A) beside Q(W).

    Args:
        reader: reads the merged model.
        info: an adapted weight in a quantized layer.
        fused: it and the weights that share its scale, if the format has one for a whole weight.
        training: the run.

    Returns:
        The share of weights that the adapter would move to another value of the grid, and the norm of what it would be
        wrong by over that of what it learned: 1 if nothing of it arrives, and infinite before anything was learned.
    """
    change = training.change(info.name.removesuffix(".weight"))
    assert change is not None, "the weight has no adapter"
    amax = None
    if training.fmt.tensor_scaled:
        amax = torch.stack([largest(reader.read(one)) for one in fused]).amax(0)
    before, after = (
        quantize_weight(weight, training.fmt, name=info.name, amax=amax).dequantize().float()
        for weight in (reader.executed(info), reader.read(info))
    )
    moved = float((after != before).float().mean())
    return moved, float((after - before - change).norm() / change.norm()) if change.any() else math.inf
