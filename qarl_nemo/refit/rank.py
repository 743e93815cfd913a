"""One rank of vLLM in a refit: its layers, what they refuse, and how their weights are replaced."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qarl_kernels import QuantFormat, get_format
from qarl_nemo.names import TARGETS, module_kind
from qarl_nemo.refit.adapters import Adapters, is_adapter, rank_of
from qarl_nemo.refit.arrive import Arrivals
from qarl_nemo.refit.convert import (
    checkpoint_parameters,
    checkpoint_tensors,
    convert,
    is_converted,
    load_parts,
    overwrite,
)
from qarl_nemo.refit.convert_nvfp4 import PLAIN_TENSORS
from qarl_nemo.refit.engine_layout import engine_slots, expert_part, is_experts, layout, plain_name
from qarl_nemo.refit.engine_methods import chosen_methods, quantized_targets, refit_problems
from qarl_nemo.refit.forget import forget
from qarl_nemo.refit.manifest import Layout, Manifest
from qarl_nemo.refit.session import Parts, RankSession

# What adapters are installed as; no layer has this name.
_ADAPTERS = "adapters"


class RankRefit(RankSession):
    """Refits of one rank of vLLM.

    Args:
        worker: vLLM's worker.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.device = torch.device(worker.device)
        super().__init__(Arrivals(worker.rank, self.device))
        self.model: nn.Module = worker.model_runner.get_model()
        self._layers = {
            plain_name(name): layer for name, layer in self.model.named_modules() if checkpoint_parameters(layer)
        }
        own = {
            name: (layer, checkpoint_parameters(layer)) for name, layer in self._layers.items() if not _is_cache(name)
        }
        self._slots = engine_slots(own)
        self._methods = chosen_methods(self.model)
        self._checked: set[str] = set()
        self._adapters = Adapters.of(worker)
        # What an engine with adapters has been brought of its base, and has to be brought each time.
        self._brought: set[str] = set()

    def refusals(self, manifest: Manifest, *, rehearsed: bool) -> list[str]:
        """Return the reasons of this rank's layers, methods and settings against an update."""
        try:
            fmt = get_format(manifest.format)
        except ValueError as unknown:
            return [str(unknown)]
        problems = self._engine_problems(manifest, fmt) + manifest.layout_problems(self._layout(manifest))
        if self._adapters is not None:
            problems += self._adapters.problems(manifest)
        if rehearsed and (self.device.type == "cpu" or self._adapters is not None):
            what = "CPU layers are reloaded" if self._adapters is None else "adapters are replaced"
            problems.append(f"vLLM's {what} as a whole; send an update that is not rehearsed")
        return problems

    def layer_of(self, name: str) -> str:
        """Return vLLM's name of the layer that takes a tensor; adapters are installed together."""
        return _ADAPTERS if is_adapter(name) else self._slots[name].layer

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of its experts; other tensors are kept whole, and vLLM's loaders slice them."""
        if is_adapter(name) and self._adapters is not None:
            return self._adapters.part(name, whole)
        slot = self._slots[name]
        layer = self._layers[slot.layer]
        if self.device.type == "cpu" or not is_experts(layer):
            return whole
        return expert_part(layer, slot.parameter, checkpoint_parameters(layer)[slot.parameter], whole)

    def kernel_tensors(self) -> dict[str, Tensor]:
        """Return every tensor that this rank's kernels read, by name."""
        adapters = {} if self._adapters is None else self._adapters.buffers()
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers()) | adapters
        for layer, module in self.model.named_modules():
            tensors |= {f"{layer}.{name}": vars(module)[name] for name in PLAIN_TENSORS if name in vars(module)}
        return tensors

    def pieces(self, layers: Mapping[str, Parts]) -> list[str]:
        """Return the layers of which a message brings only a part, because vLLM converts layers as a whole."""
        absent: dict[str, list[str]] = {}
        for name, slot in self._slots.items():
            if name not in layers.get(slot.layer, {name}):
                absent.setdefault(slot.layer, []).append(name)
        return [
            f"{layer} comes in pieces, without {', '.join(names)}: each layer of a rehearsed update comes at once"
            for layer, names in absent.items()
        ]

    def stop_serving(self) -> None:
        """Answer requests with an error, not with a mixture of two policies."""
        super().stop_serving()
        self.worker.model_runner.execute_model = _refuse_to_serve

    def serve_again(self) -> None:
        """Answer requests with vLLM's own method again."""
        del self.worker.model_runner.execute_model
        super().serve_again()

    def brought(self) -> list[Tensor]:
        """Return the tensors that every refit writes from end to end: none of a CPU engine or a base under adapters."""
        if self._adapters is not None or self.device.type == "cpu":
            return []
        # A converted layer has them under the same names, made anew from what is brought.
        slots = dict.fromkeys((slot.layer, slot.parameter) for slot in self._slots.values())
        found = [getattr(self._layers[layer], parameter, None) for layer, parameter in slots]
        return [tensor for tensor in found if tensor is not None]

    def forget(self) -> int:
        """Let vLLM's next sleep free what every refit brings, and answer requests with an error until one has come.

        Returns:
            Bytes that the host need not hold; if 0, nothing has changed.
        """
        brought = self.brought()
        named = {id(tensor) for tensor in brought}
        forgotten = forget(brought, [tensor for tensor in self.kernel_tensors().values() if id(tensor) not in named])
        if forgotten:
            self.stop_serving()
        return forgotten

    def install(self, layers: dict[str, Parts]) -> None:
        """Convert parts, layer by layer, into the tensors that kernels read; `layers` is emptied on the way."""
        if self.device.type == "cpu":
            # CPU layers have packed copies that are not among their tensors; vLLM's own reload makes them again.
            arguments = {"weights_iterator": checkpoint_tensors(layers.values()), "is_checkpoint_format": True}
            self.worker.model_runner.reload_weights(**arguments)
        else:
            with self._as_vllm_loads():
                if self._adapters is not None:
                    self._adapters.install(layers.pop(_ADAPTERS))
                    self._brought = {name for layer in layers.values() for name in layer}
                self._replace_layers(layers)

    def _replace_layers(self, layers: dict[str, Parts]) -> None:
        for name, layer in self._layers.items():
            if name not in layers:
                continue
            loads = [(self._slots[published], part) for published, part in layers.pop(name).items()]
            if is_converted(layer):
                method = type(layer.quant_method).__name__
                overwrite(layer, convert(layer, loads, self.device, check=method not in self._checked))
                self._checked.add(method)
            else:
                load_parts(layer, loads)

    def _layout(self, manifest: Manifest) -> Layout:
        if self._adapters is None:
            return layout(self._slots)
        # The base is frozen but for what is trained beside the adapters, such as norms: every update brings the same.
        unconverted = {name for name, slot in self._slots.items() if not is_converted(self._layers[slot.layer])}
        brought = self._brought | unconverted.intersection(manifest.records)
        own = layout({name: self._slots[name] for name in brought})
        return {**self._adapters.layout(rank_of(manifest)), **own}

    def _engine_problems(self, manifest: Manifest, fmt: QuantFormat) -> list[str]:
        if self._adapters is None:
            kinds = {module_kind(name.rpartition(".")[0]) for name in manifest.records if _is_quantized(name)}
            targets, holder = [target for target in TARGETS if target in kinds], "the update"
        else:
            targets, holder = quantized_targets(self._methods), "this engine's base"
        problems = refit_problems(self._methods, fmt, targets)
        if not targets and fmt.is_quantized:
            problems.append(f"the update is called {fmt.name} and {holder} holds no quantized tensor")
        config = self.worker.vllm_config
        if config.parallel_config.pipeline_parallel_size > 1:
            problems.append("refits do not support pipeline_parallel_size > 1; use tensor or expert parallelism")
        operator = fmt.vllm.custom_op
        if operator and self.device.type == "cuda" and not _enabled(config.compilation_config.custom_ops, operator):
            problems.append(
                f"{fmt.name} needs vLLM's CUDA quantizer: compilation_config={{'custom_ops': ['{operator}']}}"
            )
        if self.device.type == "cpu" and not self.whole:
            problems.append("vLLM's reload on a CPU does not recover from one that broke off; start the engine anew")
        if _asleep(self.model):
            problems.append(
                "vLLM's weights are asleep; wake_up(tags=['weights']) first. Where that has no effect, falling asleep "
                "broke off: another program took memory of this GPU meanwhile"
            )
        return problems

    @contextmanager
    def _as_vllm_loads(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        # CUTLASS's W4A8 operators work on the default stream, but with several workers vLLM calls from another one.
        torch.cuda.synchronize(self.device)
        stream = torch.cuda.stream(torch.cuda.default_stream(self.device))
        with torch.no_grad(), set_current_vllm_config(self.worker.vllm_config), self.device, stream:
            yield
        torch.cuda.synchronize(self.device)


def _refuse_to_serve(*_: Any, **__: Any) -> None:
    raise RuntimeError("this engine's last refit broke off: its weights are of no version; push a whole update first")


def _is_cache(layer: str) -> bool:
    return layer.endswith(".attn")


def _is_quantized(name: str) -> bool:
    return name.endswith((".weight_packed", ".weight_scale", ".weight_scale_inv"))


def _enabled(custom_ops: list[str], operator: str) -> bool:
    return operator in custom_ops or ("all" in custom_ops and operator.replace("+", "-") not in custom_ops)


def _asleep(model: nn.Module) -> bool:
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    if allocator is None:
        return False
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    asleep = [(start, start + data.handle[1]) for start, data in allocator.pointer_to_data.items() if data.is_asleep]
    return any(start <= pointer < end for pointer in pointers for start, end in asleep)
