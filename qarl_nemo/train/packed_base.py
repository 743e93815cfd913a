"""A checkpoint as the learner's frozen base: checked against the config, then read layer by layer.

The model is built without memory. Tensors of a quantized checkpoint go from the file to the device as they are stored;
targets of a BF16 one, under adapters, are quantized there, so that one layer's masters exist at a time. What is not
quantized (norms, router, embeddings, layers that are no target) is read as parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qarl_formats import BASELINE, FORMAT_NAMES
from qarl_kernels import TOO_LARGE, QuantizedWeight, largest, quantize_weight, stored_layout, unfit_values
from qarl_nemo.architecture import CONFIG_FILE, Architecture
from qarl_nemo.checkpoints import Checkpoint, open_checkpoint
from qarl_nemo.checkpoints.content import drop_reason, require_tied_copy, require_whole
from qarl_nemo.checkpoints.hf_config import require_no_adapters
from qarl_nemo.checkpoints.scheme import nearest_format
from qarl_nemo.checkpoints.stored import Layout, Stored, renaming, stored_infos, stored_layers, stored_names
from qarl_nemo.config import QarlConfig
from qarl_nemo.layers.frozen import hold, take_master
from qarl_nemo.layers.install import InstallReport
from qarl_nemo.layers.packed import PackedWeight
from qarl_nemo.names import GLOBAL_SCALE, fused_groups, parameter_name, published_name, summarize_names
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.lora import frozen_problems
from qarl_nemo.train.model import is_packed

_SHOWN = 8


def require_packed_base(config: LocalConfig) -> None:
    """Require that a run can train on the quantized checkpoint that it starts from, if it starts from one.

    Raises:
        ValueError: the config says another format or other targets than the checkpoint, or asks for what needs masters;
            every conflict is listed with its fix. Or the checkpoint lacks the adapters of a run.
    """
    path = config.policy.model_path
    if path is None or not is_packed(path):
        return
    require_no_adapters(path)
    problems = _format_problems(open_checkpoint(path), config.qarl) + _other_problems(config)
    if problems:
        raise ValueError(
            f"policy.model_path={path} is a quantized checkpoint, frozen in training: {'; '.join(problems)}"
        )


def _format_problems(checkpoint: Checkpoint, qarl: QarlConfig) -> list[str]:
    stored = Stored.of(checkpoint)
    assert stored is not None
    if stored.format is None:
        legal = ", ".join(name for name in FORMAT_NAMES if name != BASELINE)
        nearest = nearest_format(checkpoint.config["quantization_config"])
        return [f"its quantization_config is none that the learner executes ({legal}): {nearest}"]
    own, wanted = stored.format, qarl.served_format
    problems = []
    if qarl.alignment == "none":
        problems.append("qarl.alignment=none means BF16 weights; set qarl.alignment=aligned")
    if (own.name, own.group_size) != (wanted.name, wanted.group_size):
        sizes = f" qarl.group_size={own.group_size}" if own.group_sizes else ""
        problems.append(f"it is stored as {own.name}; set qarl.format={own.name}{sizes}")
    elif own.num_bits != wanted.num_bits:
        problems.append(
            f"its codes are stored in their own {own.num_bits} bits, and a run holds {own.name} in {wanted.num_bits}; "
            "make one with qarl quantize without --own-width"
        )
    if set(stored.targets) != set(qarl.targets):
        problems.append(f"its quantized layers are others; set qarl.targets=[{','.join(stored.targets)}]")
    if stored.left_out:
        problems.append(
            f"{summarize_names(stored.left_out, _SHOWN)} are not quantized, and others of {', '.join(stored.targets)} "
            "are; a target is quantized in every layer or in none: make one with qarl quantize"
        )
    if qarl.scale_convention is not None:
        problems.append("its scales are given; set qarl.scale_convention=null")
    if qarl.nested_in is not None:
        problems.append("its codes are given; set qarl.nested_in=null")
    return problems


def _other_problems(config: LocalConfig) -> list[str]:
    problems = [] if config.policy.lora else frozen_problems(config)
    if config.policy.warm_start.steps:
        problems.append("policy.warm_start trains all weights; set policy.warm_start.steps=0")
    if config.rollout.engine == "vllm" and config.policy.lora is None:
        problems.append(
            "refits of vLLM leave weights out only beside adapters; set policy.lora or rollout.engine=packed"
        )
    return problems


@dataclass(frozen=True, slots=True)
class PackedBase:
    """What a checkpoint fills.

    Attributes:
        model: a model on the meta device with aligned layers.
        weights: its empty packed weights, by the name of the module that owns them.
    """

    model: PreTrainedModel
    weights: Mapping[str, PackedWeight]

    @classmethod
    def of(cls, model: PreTrainedModel, report: InstallReport) -> "PackedBase":
        """Put empty packed weights in the place of all aligned ones.

        Args:
            model: on the meta device; changed in place.
            report: what `install` returned for it; changed likewise.

        Returns:
            What is to be filled.
        """
        slots = [take_master(model, report, key) for key in list(report.weights)]
        return cls(model, {slot.name: slot for slot in slots})

    def _layout(self, *, quantized: bool) -> Layout:
        """Name -> shape and dtype of every tensor that is needed."""
        packed = {
            f"{name}.{suffix}": layout
            for name, slot in self.weights.items()
            for suffix, layout in (
                stored_layout(slot.shape, slot.format) if quantized else {"weight": (slot.shape, slot.dtype)}
            ).items()
        }
        plain = {published_name(name): (tuple(one.shape), one.dtype) for name, one in self.model.named_parameters()}
        return packed | plain

    def read(self, checkpoint: Checkpoint, device: torch.device) -> None:
        """Read every tensor and put it on the device, one decoder layer after another.

        Raises:
            ValueError: tensors are missing, have other shapes or dtypes, hold NaN, Inf or what the format cannot hold,
                or belong to no part of the model; all are listed. Or a tied lm_head is another than the embedding.
        """
        quantized = Stored.of(checkpoint) is not None
        if quantized:
            require_tied_copy(checkpoint)
        else:
            require_whole(checkpoint)
        layout, found, in_file = self._layout(quantized=quantized), set(), renaming(checkpoint)
        problems = _foreign(checkpoint, layout)
        for layer in stored_layers(checkpoint, layout, device):
            problems += _unlike_scales(layer)
            problems += [
                problem
                for name, tensor in layer.items()
                if (problem := _difference(in_file(name), tensor, layout[name]) or self._unfit(name, tensor))
            ]
            found |= layer.keys()
            if not problems:
                self._fill(layer if quantized else self._quantized(layer))
        missing = {in_file(name) for name in layout.keys() - found}
        problems += [f"{len(missing)} missing: {summarize_names(missing, _SHOWN)}"] if missing else []
        if problems:
            more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            listed = "\n  ".join(problems[:_SHOWN])
            raise ValueError(f"checkpoint {checkpoint.folder} is not what its config.json says:\n  {listed}{more}")
        rotary = self.model.model.rotary_emb
        # Rotary frequencies are computed, not loaded, so building on the meta device left them empty.
        self.model.model.rotary_emb = type(rotary)(self.model.config).to(device)
        if self.model.config.tie_word_embeddings:
            self.model.lm_head.weight = self.model.model.embed_tokens.weight

    def _unfit(self, name: str, tensor: Tensor) -> str | None:
        slot = self.weights.get(name.removesuffix(".weight"))
        if slot is None or tensor.dtype not in (torch.bfloat16, torch.float32):
            return None
        problem = unfit_values(tensor, slot.format, name)
        return problem and f"{problem}: NaN, Inf {TOO_LARGE}"

    def _quantized(self, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer with what is stored of each master in its place."""
        stored = {name: one for name, one in layer.items() if name.removesuffix(".weight") not in self.weights}
        masters = {name: one for name, one in layer.items() if name not in stored}
        scaled = [name for name in masters if self.weights[name.removesuffix(".weight")].format.tensor_scaled]
        tops: dict[str, Tensor] = {}
        for group in fused_groups(scaled):
            tops |= dict.fromkeys(group, torch.stack([largest(masters[name]) for name in group]).amax(0))
        for name, master in masters.items():
            owner = name.removesuffix(".weight")
            quantized = quantize_weight(master, self.weights[owner].format, name=owner, amax=tops.get(name))
            stored |= {f"{owner}.{suffix}": tensor for suffix, tensor in quantized.tensors.items()}
        return stored

    def _fill(self, layer: Mapping[str, Tensor]) -> None:
        packed: dict[str, dict[str, Tensor]] = {}
        for name, tensor in layer.items():
            owner, _, suffix = name.rpartition(".")
            if owner in self.weights and suffix != "bias":
                packed.setdefault(owner, {})[suffix] = tensor
            else:
                _set_parameter(self.model, parameter_name(name), tensor)
        for owner, tensors in packed.items():
            slot = self.weights[owner]
            hold(slot, QuantizedWeight(slot.format, slot.shape, tensors))


def _set_parameter(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, child = name.rpartition(".")
    module = model.get_submodule(owner)
    module.register_parameter(child, nn.Parameter(tensor, requires_grad=module.get_parameter(child).requires_grad))


def _difference(name: str, tensor: Tensor, expected: tuple[tuple[int, ...], torch.dtype]) -> str | None:
    shape, dtype = expected
    if (tuple(tensor.shape), tensor.dtype) != expected:
        return f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}"
    # E4M3 has no infinities, and no operator for its NaN.
    is_e4m3, is_float = dtype == torch.float8_e4m3fn, dtype.is_floating_point
    finite = (tensor.view(torch.uint8) & 0x7F) != 0x7F if is_e4m3 else tensor.isfinite() if is_float else None
    return None if finite is None or finite.all() else f"{name} holds NaN or Inf"


def _unlike_scales(layer: Mapping[str, Tensor]) -> list[str]:
    # Gate and up of experts are one tensor here, with one scale.
    scales = {name.replace(GLOBAL_SCALE, "weight"): one for name, one in layer.items() if name.endswith(GLOBAL_SCALE)}
    unlike = [group for group in fused_groups(scales) if any(scales[one].ne(scales[group[0]]).any() for one in group)]
    return [f"{', '.join(group)} differ in their global scale, of which engines take the largest" for group in unlike]


def _foreign(checkpoint: Checkpoint, layout: Layout) -> list[str]:
    architecture = Architecture.parse(checkpoint.config, str(checkpoint.companions / CONFIG_FILE))
    known = {part for name, (shape, _) in layout.items() for row in stored_names(name, shape) for part in row}
    known |= {f"{name.rpartition('.')[0]}.weight_shape" for name in known if name.endswith("_packed")}
    foreign = [
        info.name
        for name, info in stored_infos(checkpoint).items()
        if name not in known and drop_reason(name, architecture) is None
    ]
    return [f"{len(foreign)} of no such model: {summarize_names(foreign, _SHOWN)}"] if foreign else []
