"""Adapters in one rank of vLLM: published like weights, and copied into the buffers that its LoRA kernels read.

vLLM by itself reads an adapter from a folder, as many small tensors that it stacks, scales in place and keeps twice. A
refit brings them stacked, as the buffers have them, and writes them with each layer's own `set_lora`, which slices them
for tensor parallelism. Buffers keep their addresses, so that captured CUDA graphs go on.

vLLM knows one adapter, `ADAPTER_NAME`, which every request has to name. It counts as loaded, so vLLM never looks for
its folder. B comes multiplied by alpha / r (`scaled`), as vLLM keeps it. The base is frozen: an update brings all
adapters, and of the base what the update before it brought, such as norms.

Source: vLLM 0.25.1 `lora/model_manager.py` (`activate_adapter`), `lora/layers` (`set_lora`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qarl_nemo.refit.engine_layout import FUSED, output_size
from qarl_nemo.refit.manifest import Layout, Manifest

ADAPTER_NAME, ADAPTER_ID = "qarl", 1
# The order in which vLLM's experts take their three projections.
_EXPERTS = ("gate", "down", "up")
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdapterSlot:
    """Where one published factor goes.

    Attributes:
        module: vLLM's layer, without its wrapper.
        part: which of the layer's projections.
        batch: number of experts, if it has any.
        size: K of a factor A, N of a factor B.
    """

    module: str
    part: int
    batch: tuple[int, ...]
    size: int


class Adapters:
    """The adapters of one rank.

    Args:
        manager: vLLM's `LoRAModelManager`.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.slots: dict[str, AdapterSlot] = {}
        for module, wrapper in manager.modules.items():
            for part, (name, batch, inner, outer) in enumerate(_projections(module, wrapper)):
                self.slots[name + _A] = AdapterSlot(module, part, batch, inner)
                self.slots[name + _B] = AdapterSlot(module, part, batch, outer)

    @classmethod
    def of(cls, worker: Any) -> "Adapters | None":
        """Return the adapters of a worker of vLLM; None if it was started without."""
        manager = getattr(worker.model_runner, "lora_manager", None)
        return None if manager is None else cls(manager._adapter_manager)

    def problems(self, manifest: Manifest) -> list[str]:
        """Say why this rank does not take adapters of the announced rank, or none at all."""
        rank, most = rank_of(manifest), self._manager.lora_config.max_lora_rank
        if not self.slots:
            return ["this engine has adapters on none of its layers; start vLLM with other lora_target_modules"]
        return [f"its adapters have rank {rank}, this engine was started with max_lora_rank={most}"] * (rank > most)

    def layout(self, rank: int) -> Layout:
        """Return shape and dtype of every factor of adapters of this rank."""
        dtype = self._manager.lora_config.lora_dtype
        shapes = {
            name: (*slot.batch, *((rank, slot.size) if name.endswith(_A) else (slot.size, rank)))
            for name, slot in self.slots.items()
        }
        return {name: (shape, dtype) for name, shape in shapes.items()}

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return the factors of this rank's experts; of other layers the whole, which vLLM slices."""
        wrapper = self._manager.modules[self.slots[name].module]
        if not self.slots[name].batch or not wrapper.use_ep:
            return whole
        first = wrapper.ep_rank * wrapper.local_num_experts
        return whole[first : first + wrapper.local_num_experts]

    def install(self, factors: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of all factors into the buffers that the kernels read, and let vLLM serve them."""
        place = self._place(_rank((name, factor.shape) for name, factor in factors.items()))
        by_module: dict[str, tuple[dict[int, Tensor], dict[int, Tensor]]] = {}
        for name, factor in factors.items():
            slot = self.slots[name]
            by_module.setdefault(slot.module, ({}, {}))[name.endswith(_B)][slot.part] = factor
        for module, sides in by_module.items():
            a, b = ([side[part] for part in sorted(side)] for side in sides)
            whole = len(a) == 1
            self._manager.modules[module].set_lora(place, a[0] if whole else a, b[0] if whole else b)

    def buffers(self) -> dict[str, Tensor]:
        """Return the tensors that vLLM's kernels read, by their layer's name and their own."""
        found = {}
        for module, wrapper in self._manager.modules.items():
            layers = ("w13_", "w2_") if _is_moe(wrapper) else ("",)
            for kind in (f"{layer}lora_{factor}_stacked" for layer in layers for factor in "ab"):
                found |= {f"{module}.{kind}.{part}": one for part, one in enumerate(getattr(wrapper, kind))}
        return found

    def _place(self, rank: int) -> int:
        manager = self._manager
        if ADAPTER_ID not in manager._registered_adapters:
            from vllm.lora.lora_model import LoRAModel

            # Without tensors of its own: vLLM zeroes the buffers, and holds no second copy of what they get.
            manager._registered_adapters[ADAPTER_ID] = LoRAModel(ADAPTER_ID, rank, {})
        manager.activate_adapter(ADAPTER_ID)
        return manager.lora_index_to_id.index(ADAPTER_ID)


def is_adapter(name: str) -> bool:
    """Return whether a published tensor is a factor of an adapter."""
    return name.endswith((_A, _B))


def rank_of(manifest: Manifest) -> int:
    """Return the rank of an update's adapters; 0 if it has none."""
    return _rank((name, record.shape) for name, record in manifest.records.items())


def scaled(layers: Iterable[Mapping[str, Tensor]], scaling: float) -> list[dict[str, Tensor]]:
    """Return an update's layers with every factor B multiplied by alpha / r, as vLLM keeps it.

    Args:
        layers: tensors by published name, B as PEFT stores it.
        scaling: alpha / r.

    Returns:
        The layers; the learner's own tensors are not changed.
    """
    return [
        {name: one * scaling if name.endswith(_B) and scaling != 1 else one for name, one in layer.items()}
        for layer in layers
    ]


def _rank(shapes: Iterable[tuple[str, Sequence[int]]]) -> int:
    return next((shape[-2] for name, shape in shapes if name.endswith(_A) and len(shape) > 1), 0)


def _is_moe(wrapper: Any) -> bool:
    return hasattr(wrapper, "w13_lora_a_stacked")


def _projections(module: str, wrapper: Any) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Yield each projection's published name, number of experts, K and N, in the order in which vLLM takes them."""
    if _is_moe(wrapper):
        config = wrapper.moe_config
        hidden, inner = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded * wrapper.tp_size
        for name in _EXPERTS:
            sizes = (inner, hidden) if name == "down" else (hidden, inner)
            yield f"{module}.{name}_proj", (wrapper.global_num_experts,), *sizes
        return
    base = wrapper.base_layer
    parent, _, leaf = module.rpartition(".")
    fused = FUSED.get(leaf)
    if fused is None:
        yield module, (), base.input_size, base.output_size
        return
    for index, name in enumerate(fused):
        yield f"{parent}.{name}_proj", (), base.input_size, output_size(base, index)
