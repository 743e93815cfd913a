"""LoRA: trained low-rank adapters beside frozen weights, executed where the rollout engine's kernels add them.

A layer with adapters has a child `lora`, whose parameters are named as PEFT names them once that word is left out:
`...q_proj.lora.lora_A.weight` [r, K]. The experts of a layer, each with its own, have one parameter for all,
`...experts.lora.gate_proj.lora_A.weight` [E, r, K]. The learner's layers and the built-in sampler's take the same
module.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qarl_kernels.low_rank import ExpertAdapters, LowRank
from qarl_nemo.names import module_kind

PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """What is adapted, and how.

    Attributes:
        rank: r.
        alpha: the adapters' products are multiplied by alpha / r.
        targets: `experts`, `attention`, `mlp`.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]


class Adapter(nn.Module):
    """The factors A [..., r, K] and B [..., N, r] of one projection; B starts at zero.

    Args:
        shape: [..., N, K] of the adapted weight.
        settings: rank and alpha.
        dtype: the factors'.
        device: where they are.
    """

    def __init__(
        self, shape: Sequence[int], settings: LoraSettings, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        *batch, rows, columns = shape
        options = {"dtype": dtype, "device": device}
        a = nn.Parameter(torch.zeros(*batch, settings.rank, columns, **options))
        b = nn.Parameter(torch.zeros(*batch, rows, settings.rank, **options))
        self.lora_A, self.lora_B = nn.ParameterDict({"weight": a}), nn.ParameterDict({"weight": b})
        self.scaling = settings.alpha / settings.rank

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Draw A uniformly from +-1 / sqrt(K), as PEFT does, in FP32."""
        a = self.lora_A["weight"]
        bound = 1 / math.sqrt(a.shape[-1])
        drawn = torch.rand(a.shape, generator=generator, device=generator.device) * 2 * bound - bound
        a.copy_(drawn)

    def factors(self) -> LowRank:
        """Return A, and B times alpha / r rounded to its dtype, as vLLM keeps it."""
        b = self.lora_B["weight"]
        return self.lora_A["weight"], b if self.scaling == 1 else b * self.scaling

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to a dense layer's output: x [..., K] -> [..., N], rounded after each product."""
        a, b = self.factors()
        return (x @ a.mT) @ b.mT


class AdaptersOfExperts(nn.Module):
    """The adapters of one layer's experts.

    Args:
        gate_proj: adapters of [E, I, H].
        up_proj: likewise.
        down_proj: adapters of [E, H, I].
    """

    def __init__(self, *, gate_proj: Adapter, up_proj: Adapter, down_proj: Adapter) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def factors(self) -> ExpertAdapters:
        """Return the factors of all three."""
        return ExpertAdapters(self.gate_proj.factors(), self.up_proj.factors(), self.down_proj.factors())


def add_adapters(model: nn.Module, settings: LoraSettings, *, seed: int | None = None) -> None:
    """Give every targeted layer its adapters.

    Args:
        model: has aligned or packed layers wherever a target is; changed in place.
        settings: what is adapted.
        seed: draws A; None leaves all at zero, for an engine that a refit fills.
    """
    device = next(model.parameters()).device
    drawn = seed is not None and device.type != "meta"
    generator = torch.Generator(device).manual_seed(seed) if drawn else None
    for name, module in list(model.named_modules()):
        if module_kind(name) not in settings.targets or not hasattr(module, "lora"):
            continue
        module.lora = added = _adapters_of(module, settings, device)
        for adapter in added.modules():
            if isinstance(adapter, Adapter) and generator is not None:
                adapter.draw(generator)


def _adapters_of(module: nn.Module, settings: LoraSettings, device: torch.device) -> "Adapter | AdaptersOfExperts":
    weights = getattr(module, "aligned", None) or getattr(module, "slots", {})
    first, *others = weights.values()
    if not others:
        return Adapter(first.shape, settings, first.dtype, device)
    *batch, rows, columns = first.shape
    shapes = {"gate_proj": (*batch, rows // 2, columns), "up_proj": (*batch, rows // 2, columns)}
    shapes["down_proj"] = others[0].shape
    return AdaptersOfExperts(**{key: Adapter(shape, settings, first.dtype, device) for key, shape in shapes.items()})


def adapters(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield every single adapter as PEFT and vLLM know it, one expert after another.

    Yields:
        The adapted module's name (`model.layers.3.self_attn.q_proj`, `model.layers.3.mlp.experts.7.gate_proj`), A
        [r, K] and B [N, r] without alpha: views of the model's own parameters.
    """
    for name, module in model.named_modules():
        if not isinstance(module, Adapter):
            continue
        owner, _, projection = name.partition(".lora")
        a, b = module.lora_A["weight"].detach(), module.lora_B["weight"].detach()
        if a.ndim == 2:
            yield owner, a, b
            continue
        for expert, factors in enumerate(zip(a, b, strict=True)):
            yield f"{owner}.{expert}{projection}", *factors


def peft_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what PEFT's adapter_model.safetensors holds: views of the adapters by PEFT's names."""
    return {
        f"{PREFIX}{name}.lora_{letter}.weight": factor
        for name, *factors in adapters(model)
        for letter, factor in zip("AB", factors, strict=True)
    }
