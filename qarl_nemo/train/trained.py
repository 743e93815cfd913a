"""What is trained on a frozen base, as files of a checkpoint: the base itself stays where the run found it.

Adapters are a PEFT folder, adapter_config.json and adapter_model.safetensors with one pair of factors for each module,
each expert its own, which `peft` and vLLM load. Other trained parameters (norms, routers, or all that a quantized
checkpoint does not hold packed) are beside them in trained.safetensors, because vLLM takes adapters without any.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qarl_nemo.files import FileError, require_file
from qarl_nemo.layers.lora import LoraSettings, adapters, peft_tensors
from qarl_nemo.names import published_name, summarize_names

TRAINED_FILE = "trained.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_SHOWN = 8


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the name and the parameter of all that an optimizer steps."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def is_trained_alone(folder: Path) -> bool:
    """Return whether a checkpoint's model folder holds what was trained, without the base."""
    return any((folder / name).is_file() for name in (TRAINED_FILE, ADAPTER_FILE))


def save_trained(model: nn.Module, folder: Path, settings: LoraSettings | None = None, base: str = "") -> None:
    """Write every trained parameter.

    Args:
        model: any.
        folder: made if it does not exist.
        settings: those of the adapters, if there are any.
        base: the model that they are made for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in _files(model).items():
        if tensors:
            contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, folder / file, metadata={"format": "pt"})
    if settings is not None:
        text = json.dumps(_peft_config(model, settings, base), indent=2)
        (folder / ADAPTER_CONFIG).write_text(text + "\n")


@torch.no_grad()
def load_trained(model: nn.Module, folder: Path) -> None:
    """Restore what `save_trained` wrote.

    Args:
        model: the same model.
        folder: the checkpoint's model folder.

    Raises:
        FileError: a file is missing or unreadable, or holds other parameters.
    """
    for file, wanted in _files(model).items():
        if not wanted:
            continue
        found = read_trained(folder / file)
        there, here = ({name: one.shape for name, one in tensors.items()} for tensors in (found, wanted))
        wrong = {name for name, _ in there.items() ^ here.items()}
        if wrong:
            raise FileError(f"{folder / file}: not what this run trains: {summarize_names(wrong, _SHOWN)}")
        for name, tensor in wanted.items():
            tensor.copy_(found[name])


def read_trained(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that `save_trained` wrote.

    Raises:
        FileError: it is missing or unreadable.
    """
    require_file(path, "the trained parameters of a run with a frozen base")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path} is not a readable safetensors file: {error}") from error


def _files(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    others = {
        published_name(name): parameter.data for name, parameter in trained_parameters(model) if ".lora." not in name
    }
    return {ADAPTER_FILE: peft_tensors(model), TRAINED_FILE: others}


def _peft_config(model: nn.Module, settings: LoraSettings, base: str) -> dict[str, object]:
    projections = {name.rpartition(".")[2] for name, *_ in adapters(model)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(projections),
        "bias": "none",
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
