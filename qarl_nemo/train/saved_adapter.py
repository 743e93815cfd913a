"""A PEFT folder of adapters, a run's or another tool's, read and put onto a model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from qarl_nemo.checkpoints.hints import folder_hint
from qarl_nemo.files import FileError, read_json, require_file
from qarl_nemo.layers.lora import PREFIX, LoraSettings, add_adapters, peft_tensors
from qarl_nemo.names import TARGETS, module_kind, parameter_name, summarize_names
from qarl_nemo.train.trained import ADAPTER_CONFIG, ADAPTER_FILE, TRAINED_FILE, read_trained

# What these settings of PEFT do to an adapter is not computed here.
_UNSUPPORTED = (
    *("use_dora", "use_rslora", "use_qalora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "alora_invocation_tokens", "layer_replication"),
)
# Others change the base's weights, which the files do not hold.
_INITS = (True, False, "gaussian", "eva", "orthogonal")
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """Adapters on disk.

    Attributes:
        folder: with PEFT's two files.
        settings: rank, alpha, and the targets that have adapters.
        others: trained beside them, such as norms, by published name; PEFT and vLLM do not read them.
    """

    folder: Path
    settings: LoraSettings
    others: Mapping[str, torch.Tensor]


def read_adapter(folder: Path) -> SavedAdapter:
    """Read what a folder's adapters are, without their factors.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.

    Raises:
        FileError: it is no such folder, or its adapters are not plain LoRA on a target's linears; all that speaks
            against it is listed.
    """
    if not (folder / ADAPTER_CONFIG).exists():
        models = list(folder.glob("checkpoints/step_*/model"))
        adapters = any((model / ADAPTER_CONFIG).exists() for model in models)
        hint = folder_hint(folder) if adapters or not models else "; the run trained no adapters (policy.lora)"
        raise FileError(f"{folder} is no PEFT folder: it has no {ADAPTER_CONFIG}{hint}")
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        require_file(folder / name, "a part of a PEFT adapter")
    config = read_json(folder / ADAPTER_CONFIG, "a PEFT adapter's config")
    problems = _config_problems(config)
    factors: dict[str, set[str]] = {}
    for name in _names(folder / ADAPTER_FILE):
        module, _, factor = name.removeprefix(PREFIX).rpartition(".lora_")
        factors.setdefault(module, set()).add(factor)
    modules = factors.keys()
    half = [module for module, found in factors.items() if not found >= {"A.weight", "B.weight"}]
    kinds = {module: module_kind(module) for module in modules}
    strange = [module for module, kind in kinds.items() if kind not in TARGETS]
    if strange or not modules:
        what = summarize_names(strange, _SHOWN) or "nothing"
        problems.append(f"{ADAPTER_FILE} adapts {what}; legal: linears of {', '.join(TARGETS)}")
    elif half:
        problems.append(f"{ADAPTER_FILE} lacks lora_A or lora_B of {summarize_names(half, _SHOWN)}")
    if problems:
        raise FileError(f"{folder} holds no adapters that can be compared:\n  " + "\n  ".join(problems))
    targets = tuple(target for target in TARGETS if target in kinds.values())
    others = read_trained(folder / TRAINED_FILE) if (folder / TRAINED_FILE).is_file() else {}
    return SavedAdapter(folder, LoraSettings(config["r"], float(config["lora_alpha"]), targets), others)


@torch.no_grad()
def add_saved_adapter(model: nn.Module, saved: SavedAdapter) -> None:
    """Put the adapters, and what was trained beside them, onto a model.

    Args:
        model: has aligned layers wherever a target is; changed in place. Layers without factors in the file keep
            adapters of zero.
        saved: what `read_adapter` returned.

    Raises:
        FileError: the file has modules or shapes that the model does not have; all are listed.
    """
    add_adapters(model, saved.settings)
    own: dict[str, torch.Tensor] = dict(peft_tensors(model))
    parameters = dict(model.named_parameters())
    for file, found in ((ADAPTER_FILE, read_trained(saved.folder / ADAPTER_FILE)), (TRAINED_FILE, saved.others)):
        places = own if file == ADAPTER_FILE else {name: parameters.get(parameter_name(name)) for name in found}
        wrong = [name for name, one in found.items() if (place := places.get(name)) is None or place.shape != one.shape]
        if wrong:
            raise FileError(f"{saved.folder / file} is not of this model: {summarize_names(wrong, _SHOWN)}")
        for name, tensor in found.items():
            places[name].copy_(tensor)


def _config_problems(config: Mapping[str, Any]) -> list[str]:
    problems = [f"{key}={config[key]!r}; legal: none" for key in _UNSUPPORTED if config.get(key)]
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type={config.get('peft_type')!r}; legal: LORA")
    if config.get("bias", "none") != "none":
        problems.append(f"bias={config['bias']!r}; legal: none")
    if (init := config.get("init_lora_weights", True)) not in _INITS:
        problems.append(f"init_lora_weights={init!r}; legal: {', '.join(map(str, _INITS))}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        problems.append(f"r={rank!r} is no rank")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        problems.append(f"lora_alpha={alpha!r} is no positive number")
    return problems


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path} is not a readable safetensors file: {error}") from error
