"""The rollout engine's side of a refit: what it expects, the check before the first weight, and checkpoint names."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from qarl_kernels import QuantFormat, stored_layout
from qarl_nemo.names import expert_names
from qarl_nemo.refit.manifest import Layout, version_problems
from qarl_nemo.refit.publish import PublishableWeight, RefitUpdate

_STACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_PACKED = "weight_packed"


def published_layout(
    weights: Mapping[str, PublishableWeight], parameters: Iterable[tuple[str, Tensor]], fmt: QuantFormat
) -> Layout:
    """Return the layout of every tensor that `publish` sends, without quantizing anything.

    Args:
        weights: aligned weights by parameter name.
        parameters: all parameters of the model by name.
        fmt: the rollout engine's format.

    Returns:
        name -> (shape, dtype).
    """
    stored = {
        f"{weight.name}.{suffix}": layout
        for weight in weights.values()
        for suffix, layout in stored_layout(tuple(weight.master.shape), fmt).items()
    }
    return stored | {name: (tuple(p.shape), p.dtype) for name, p in parameters if name not in weights}


def require_whole(update: RefitUpdate, expected: Layout, fmt: QuantFormat, *, serving: int | None) -> None:
    """Refuse an update that is not exactly as its manifest says and as the engine expects.

    Args:
        update: what arrived.
        expected: name -> (shape, dtype) of every tensor the engine takes.
        fmt: the format the engine serves.
        serving: the version it serves now; None before the first refit.

    Raises:
        ValueError: a tensor is missing, unexpected, different from the manifest or from what the engine expects, the
            format is another, or the version is not newer; all are listed.
    """
    problems = version_problems(update.manifest.version, serving)
    problems += update.manifest.problems(update.tensors) + update.manifest.layout_problems(expected)
    if update.manifest.format != fmt.name:
        problems.append(f"the update is in format {update.manifest.format}, this engine serves {fmt.name}")
    if problems:
        kept = "nothing" if serving is None else f"version {serving}"
        raise ValueError(
            f"refit to version {update.manifest.version} refused, {kept} keeps serving; {len(problems)} problem(s):\n  "
            + "\n  ".join(problems)
        )


def checkpoint_tensors(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield an update's tensors as a quantized checkpoint holds them: one expert and one projection each.

    Args:
        tensors: of a `RefitUpdate`.

    Yields:
        Checkpoint name and tensor (a view), and `weight_shape` beside every packed weight.
    """
    for name, tensor in tensors.items():
        for single, part in _single_weights(name, tensor):
            yield single, part
            owner, _, suffix = single.rpartition(".")
            if suffix == _PACKED:
                # 8 codes of 4 bits a word; engines of this layout serve no other width.
                yield f"{owner}.weight_shape", torch.tensor([part.shape[0], part.shape[1] * 8])


def _single_weights(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    # Experts that no target quantizes are published under their parameter's name, which has no suffix.
    stacked = f"{name}.weight" if name.endswith(_STACKED) else name
    if not stacked.rpartition(".")[0].endswith(_STACKED):
        yield name, tensor
        return
    for parts, expert in zip(expert_names(stacked, len(tensor)), tensor, strict=True):
        yield from zip(parts, expert.chunk(len(parts)), strict=True)
