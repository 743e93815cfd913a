"""The learner's layers as a config asks for them: aligned, frozen, with adapters."""

import torch
from transformers import PreTrainedModel

from qarl_nemo.checkpoints import open_checkpoint
from qarl_nemo.layers.frozen import freeze, take_master
from qarl_nemo.layers.install import InstallReport, install
from qarl_nemo.layers.lora import LoraSettings, add_adapters
from qarl_nemo.layers.norm_noise import takes_noise
from qarl_nemo.names import tensor_kind
from qarl_nemo.train.config import LocalConfig, PolicyConfig
from qarl_nemo.train.lora import LoraConfig
from qarl_nemo.train.model import is_packed
from qarl_nemo.train.packed_base import PackedBase


def has_frozen_base(policy: PolicyConfig) -> bool:
    """Return whether a run's checkpoints hold what it trains alone."""
    return policy.lora is not None or is_packed(policy.model_path)


def lora_settings(lora: LoraConfig | None) -> LoraSettings | None:
    """Return what the layers need of `policy.lora`; None without."""
    if lora is None:
        return None
    return LoraSettings(lora.rank, lora.rank if lora.alpha is None else lora.alpha, lora.targets)


def align_model(config: LocalConfig, model: PreTrainedModel, device: torch.device | None = None) -> InstallReport:
    """Install aligned layers into a model; freeze it and add adapters where the config says so.

    Args:
        config: the resolved config.
        model: changed in place; an empty one is filled from its checkpoint.
        device: where an empty model goes; None leaves it empty, for its table and its trained parameters' sizes.

    Returns:
        What `install` returned.

    Raises:
        ValueError: targets or shapes do not fit the model, or the checkpoint is not what its config.json says.
    """
    qarl, lora = config.qarl, config.policy.lora
    plain = tuple(target for target in lora.targets if target not in qarl.targets) if lora else ()
    options = {"backward": qarl.backward, "keep_operand": qarl.keep_operand, "plain": plain}
    report = install(model, qarl.targets, qarl.executed_format, **options)
    if not has_frozen_base(config.policy):
        return report
    if lora is not None:
        if lora.router and not report.num_routers:
            raise ValueError("policy.lora.router=true, and this model has no routers; set policy.lora.router=false")
        model.requires_grad_(False)
    _freeze(config, model, report, device)
    settings = lora_settings(lora)
    if lora is not None and settings is not None:
        add_adapters(model, settings, seed=config.seed)
        for name, parameter in model.named_parameters():
            if (lora.norms and takes_noise(name)) or (lora.router and tensor_kind(name) == "router"):
                parameter.requires_grad_(True)
    return report


def _freeze(config: LocalConfig, model: PreTrainedModel, report: InstallReport, device: torch.device | None) -> None:
    if model.device.type != "meta":
        freeze(model, report)
    elif device is None:
        for key in list(report.weights):
            take_master(model, report, key)
    else:
        assert config.policy.model_path is not None
        PackedBase.of(model, report).read(open_checkpoint(config.policy.model_path), device)
