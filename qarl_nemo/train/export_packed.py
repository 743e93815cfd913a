"""`qarl export --packed`: the quantized checkpoint of a run on a frozen base, for adapters to be served beside it."""

import glob
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from qarl_formats import BASELINE, get_format
from qarl_nemo.checkpoints import Checkpoint, QuantizeProgress, quantize_checkpoint
from qarl_nemo.checkpoints.hf_config import (
    RECORD_FILE,
    TEMPLATES_FOLDER,
    TOOL,
    adapters_record,
    copied_name,
    read_record,
    tokenizer_files,
)
from qarl_nemo.checkpoints.merge import Training, merged_checkpoint
from qarl_nemo.checkpoints.overlay import copy_tokenizer, write_overlay
from qarl_nemo.checkpoints.partial import check_destination
from qarl_nemo.checkpoints.quantize import check_apart
from qarl_nemo.checkpoints.reader import CONFIG_FILE, INDEX_FILE
from qarl_nemo.checkpoints.stored import Stored
from qarl_nemo.files import checksum, exclusive, make_folder
from qarl_nemo.refit.engine_settings import serve_command
from qarl_nemo.train.export import read_run

# Between a destination's name and what makes a folder for it unique.
_UNFINISHED = ".unfinished-"
# What an overwrite replaces, until it is done.
_REPLACED = "replaced"


def export_packed(
    run: Path,
    destination: Path,
    *,
    overwrite: bool,
    progress: Callable[[QuantizeProgress], None],
    base_folder: Path | None = None,
) -> str:
    """Write the quantized base of a run with all that it trained beside adapters, such as norms.

    Args:
        run: the run's folder, whose newest checkpoint is taken.
        destination: folder to create.
        overwrite: replace an earlier output.
        progress: called after each tensor that is quantized; a base that is quantized already is copied.
        base_folder: see `read_run`.

    Returns:
        The command with which vLLM serves it, with the adapters of the run if it has any, or why it does not.

    Raises:
        ValueError: the folder holds no run with a frozen base, or the base was executed in BF16.
    """
    base, training = read_run(run, base_folder)
    if not training.fmt.is_quantized:
        raise ValueError(f"the run {run} executed BF16 weights: leave --packed out")
    lacking = _lacking(run, training)
    if Stored.of(base) is None:
        plain = replace(training, fmt=get_format(BASELINE), targets=(), adapters={})
        source = replace(merged_checkpoint(base, plain), adapters=lacking)
        quantize_checkpoint(source, destination, training.fmt, training.targets, overwrite=overwrite, progress=progress)
    else:
        _copy(replace(base, adapters=lacking), training, destination, overwrite=overwrite)
    if training.adapters and not training.fmt.runs_beside_adapters(training.targets):
        why = f"whose kernels for {training.fmt.name} experts do not run beside adapters"
        return f"not by vLLM, {why}; qarl eval {shlex.quote(str(run))} --engine packed"
    return serve_command(destination, training.fmt, training.targets) + _precision(base) + _adapter_options(training)


def _lacking(run: Path, training: Training) -> dict[str, Any] | None:
    """Return what the record of a packed export says of the adapters that stay in the run; None if it has none."""
    if not training.adapters:
        return None
    checkpoint = training.files[0].parent.parent
    return {"run": str(run.absolute()), "step": int(checkpoint.name.removeprefix("step_")), "rank": _rank(training)}


def _copy(base: Checkpoint, training: Training, destination: Path, *, overwrite: bool) -> None:
    check_apart(base.folder, destination)
    check_destination(destination, overwrite)
    folder = destination.absolute().parent
    make_folder(folder, "the folder of an export")
    with exclusive(folder / f".{destination.name}.lock", f"the export {destination}"):
        # What a kill left of an earlier export.
        for left in folder.glob(f"{glob.escape(destination.name)}{_UNFINISHED}*"):
            _put_back(left, destination)
            shutil.rmtree(left)
        check_destination(destination, overwrite)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{destination.name}{_UNFINISHED}") as work:
            copy = Path(work) / "copy"
            written = write_overlay(base, training.parameters, copy, link=False)
            if base.tokenizer is not None:
                _replace_tokenizer(copy, base.tokenizer)
            _sign(replace(written, adapters=base.adapters), training)
            _publish(copy, destination)


def _publish(copy: Path, destination: Path) -> None:
    try:
        if destination.exists():
            os.replace(destination, copy.with_name(_REPLACED))
        os.replace(copy, destination)
    except BaseException:
        _put_back(copy.parent, destination)
        raise


def _put_back(work: Path, destination: Path) -> None:
    """Undo the first of two renames if the second was not done."""
    if os.path.lexists(work / _REPLACED) and not destination.exists():
        os.replace(work / _REPLACED, destination)


def _sign(copy: Checkpoint, training: Training) -> None:
    """Write the files by which a later export knows its own: copies of other tools' checkpoints lack them."""
    fmt, total = training.fmt, sum(info.num_bytes for info in copy.tensors)
    weight_map = {info.name: file for info in copy.tensors for file in info.files}
    index, record = copy.folder / INDEX_FILE, copy.folder / RECORD_FILE
    if not index.exists():
        _write_json(index, {"metadata": {"total_size": total}, "weight_map": weight_map})
    made = {"tool": TOOL, "format": fmt.name, "group_size": fmt.group_size, "targets": list(training.targets)}
    written = {INDEX_FILE, CONFIG_FILE, RECORD_FILE, *copy.files}
    # The base's own list may lack a tokenizer that was added to it, and name one that this run replaced.
    files = {copied_name(path): path for path in sorted(copy.folder.rglob("*")) if path.is_file()}
    copied = {name: checksum(path) for name, path in files.items() if name not in written}
    _write_json(record, (read_record(copy.folder) or made) | {"copied": copied} | adapters_record(copy.adapters))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _replace_tokenizer(folder: Path, other: Path) -> None:
    for path in tokenizer_files(folder):
        path.unlink()
    shutil.rmtree(folder / TEMPLATES_FOLDER, ignore_errors=True)
    copy_tokenizer(other, folder)


def _precision(base: Checkpoint) -> str:
    # vLLM takes a quantized FP16 model's own dtype, in which scales and activations would not be what was trained on.
    stored = base.config.get("dtype", base.config.get("torch_dtype", "bfloat16"))
    return "" if Stored.of(base) is None or stored == "bfloat16" else " --dtype bfloat16"


def _adapter_options(training: Training) -> str:
    if not training.adapters:
        return ""
    adapter = shlex.quote(f"adapter={training.files[0].parent}")
    return f" --enable-lora --max-lora-rank {_rank(training)} --lora-modules {adapter}"


def _rank(training: Training) -> int:
    return len(next(iter(training.adapters.values()))[0])
