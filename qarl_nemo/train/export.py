"""`qarl export`: a run that trained on a frozen base, as one BF16 checkpoint that needs neither base nor adapters."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from qarl_formats import BASELINE, get_format
from qarl_nemo.checkpoints import Checkpoint, QuantizeProgress, QuantizeReport, open_checkpoint, quantize_checkpoint
from qarl_nemo.checkpoints.hints import folder_hint, no_folder
from qarl_nemo.checkpoints.merge import MergedReader, Training, merged_checkpoint, rounding_loss
from qarl_nemo.files import FileError
from qarl_nemo.layers.lora import PREFIX
from qarl_nemo.names import TARGETS, fused_groups, target_of
from qarl_nemo.train.aligned_model import lora_settings
from qarl_nemo.train.checkpoint import RUN_CONFIG, checkpoint_dir, require_checkpoint
from qarl_nemo.train.frozen_run import FrozenRun
from qarl_nemo.train.prompts import DEFAULT_TEMPLATE
from qarl_nemo.train.trained import ADAPTER_FILE, TRAINED_FILE, is_trained_alone, read_trained


def export_run(
    run: Path,
    destination: Path,
    *,
    dequantize: bool,
    overwrite: bool,
    progress: Callable[[QuantizeProgress], None],
    base_folder: Path | None = None,
) -> QuantizeReport:
    """Merge a run's newest checkpoint into a BF16 checkpoint, tensor by tensor; a killed export goes on.

    Args:
        run: the run's folder.
        destination: folder to create.
        dequantize: write the weights of a quantized base as the BF16 numbers that were executed.
        overwrite: replace an earlier output.
        progress: called after each tensor.
        base_folder: see `read_run`.

    Raises:
        ValueError: the folder holds no run with a frozen base, or the base is quantized and `dequantize` was not given;
            the error says what quantizing the merged weights anew would change.
    """
    base, training = read_run(run, base_folder)
    if dequantize and not training.fmt.is_quantized:
        raise ValueError(f"the run {run} executed BF16 weights: leave --dequantize out")
    merged = merged_checkpoint(base, training)
    if training.fmt.is_quantized and not dequantize:
        raise ValueError(_refusal(base, merged, training))
    held = {target_of(info.name) for info in merged.tensors}
    targets = [target for target in TARGETS if target in held]
    return quantize_checkpoint(
        merged, destination, get_format(BASELINE), targets, overwrite=overwrite, progress=progress
    )


def read_run(run: Path, base_folder: Path | None = None) -> tuple[Checkpoint, Training]:
    """Read what a run trained, and find its base.

    Args:
        run: the run's folder.
        base_folder: where its base is now; None for where it was.

    Returns:
        The base's table of contents, with the run's tokenizer if that has a chat template of its own, and the training.

    Raises:
        ValueError: it is no such run.
    """
    if absent := no_folder(run):
        raise FileError(f"no run of qarl train: {absent}")
    if not (run / RUN_CONFIG).is_file():
        alone = is_trained_alone(run) or is_trained_alone(run / "model")
        hint = folder_hint(run) if alone or any(run.glob("*/checkpoints")) else ""
        raise FileError(f"{run} is no run of qarl train: it has no {RUN_CONFIG}{hint}")
    step = require_checkpoint(run)
    folder = checkpoint_dir(run, step) / "model"
    if not is_trained_alone(folder):
        raise FileError(f"the run {run} trained all weights: {folder} is a whole Hugging Face checkpoint already")
    trained = FrozenRun.read(run, step, base_folder)
    qarl, lora = trained.config.qarl, lora_settings(trained.config.policy.lora)
    adapters = _by_module(read_trained(folder / ADAPTER_FILE)) if lora else {}
    scaling = lora.alpha / lora.rank if lora else 1.0
    targets = tuple(qarl.targets) if qarl.executed_format.is_quantized else ()
    files = tuple(folder / name for name in (ADAPTER_FILE, TRAINED_FILE) if (folder / name).is_file())
    training = Training(qarl.executed_format, targets, adapters, scaling, trained.parameters(), files)
    own_template = trained.config.policy.tokenizer.chat_template not in (None, DEFAULT_TEMPLATE)
    return replace(open_checkpoint(trained.base), tokenizer=folder if own_template else None), training


def _by_module(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    names = [name for name in tensors if name.endswith(".lora_A.weight")]
    modules = {name.removeprefix(PREFIX).removesuffix(".lora_A.weight"): name for name in names}
    return {module: (tensors[name], tensors[name.replace(".lora_A.", ".lora_B.")]) for module, name in modules.items()}


def _refusal(base: Checkpoint, merged: Checkpoint, training: Training) -> str:
    infos = {info.name: info for info in merged.tensors}
    adapted = (
        name
        for name in infos
        if target_of(name) in training.targets and name.removesuffix(".weight") in training.adapters
    )
    name, effect = next(adapted, None), ""
    if name is not None:
        fused = next((group for group in fused_groups(infos) if name in group), [name])
        with MergedReader(base, training) as reader:
            moved, loss = rounding_loss(reader, infos[name], [infos[one] for one in fused], training)
        effect = (
            f", and a merged weight is none of its grid. Quantized anew, {moved:.1%} of {name} would lie on another "
            f"value of the grid than without its adapter, and be wrong by {loss:.2g} times what that has learned"
            if math.isfinite(loss)
            else f", and the adapter of {name} has learned nothing yet"
        )
    beside = ", with adapters beside it" if training.adapters else ""
    return (
        f"the run executed a base in {training.fmt.name}{effect}. Pass --packed for the quantized checkpoint that was "
        f"served{beside}, or --dequantize for a BF16 checkpoint of what was executed"
    )
