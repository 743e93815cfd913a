"""Quantize a BF16 checkpoint shard by shard into one that stock vLLM loads."""

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qarl_kernels import TOO_LARGE, QuantFormat
from qarl_nemo.checkpoints.content import require_tied_copy
from qarl_nemo.checkpoints.convert import TensorConverter
from qarl_nemo.checkpoints.hf_config import (
    companion_files,
    companion_names,
    record_rows,
    require_readable,
    settings_record,
)
from qarl_nemo.checkpoints.loadable import require_loadable
from qarl_nemo.checkpoints.partial import PartialFolder, is_in_place, open_partial, partial_path
from qarl_nemo.checkpoints.plan import (
    DEFAULT_MAX_SHARD_BYTES,
    PlannedShard,
    PlannedTensor,
    QuantizePlan,
    plan_quantization,
)
from qarl_nemo.checkpoints.reader import CONFIG_FILE, Checkpoint, TensorReader, open_checkpoint
from qarl_nemo.checkpoints.shard import ShardBuffer, save_shard, shard_names
from qarl_nemo.checkpoints.split_channels import ChannelSplitter
from qarl_nemo.files import FileError, os_reason, require_space


@dataclass(frozen=True, slots=True)
class QuantizeProgress:
    """The progress of a running conversion, given to the callback after each tensor.

    Attributes:
        tensor: name of the tensor just converted.
        done_bytes: source bytes converted so far, resumed shards included.
        total_bytes: source bytes in all.
        shard: number of the output file, from 1.
        num_shards: output files in all.
    """

    tensor: str
    done_bytes: int
    total_bytes: int
    shard: int
    num_shards: int


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What a finished conversion wrote.

    Attributes:
        destination: the checkpoint.
        plan: what is in it.
        num_resumed_shards: how many of its files an earlier, killed run had finished.
    """

    destination: Path
    plan: QuantizePlan
    num_resumed_shards: int

    @property
    def rows(self) -> list[dict[str, Any]]:
        """`{name, kind, shape, format, quantized, reason}` of every source tensor."""
        return record_rows(self.plan)


def quantize_checkpoint(
    source: str | Path | Checkpoint,
    destination: str | Path,
    fmt: QuantFormat,
    targets: Sequence[str],
    *,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    split_channels: float | None = None,
    overwrite: bool = False,
    device: str = "cpu",
    progress: Callable[[QuantizeProgress], None] | None = None,
) -> QuantizeReport:
    """Write `destination`, a checkpoint whose target weights are `quantize_weight(source weight, fmt)`.

    Memory is bounded by one output shard and a tensor for each of torch's threads. Work goes to
    `<destination>.partial`; called again, a killed conversion resumes from its finished shards and gives the same
    bytes.

    Args:
        source: Hugging Face safetensors folder, or a checkpoint that `open_checkpoint` or `open_megatron` returned.
        destination: folder to create.
        fmt: format of the quantized tensors; bf16 quantizes none, and rounds every tensor to BF16.
        targets: what to quantize, out of `qarl_nemo.names.TARGETS`.
        max_shard_bytes: limit of one output file.
        split_channels: see `plan_quantization`.
        overwrite: replace a destination this tool wrote, and an unfinished conversion with other settings.
        device: where `quantize_weight` runs.
        progress: called after each tensor.

    Raises:
        ValueError: the source, the settings or the destination are unfit (every problem listed, nothing written), or
            weights hold NaN or Inf (every one listed; the partial folder keeps the shards that hold none).
    """
    destination = Path(destination)
    with _named_os_errors(destination):
        checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        require_device(device)
        for folder in {checkpoint.folder, checkpoint.companions}:
            check_apart(folder, destination)
        plan = plan_quantization(checkpoint, fmt, targets, max_shard_bytes, split_channels)
        require_loadable(checkpoint.config, str(checkpoint.companions / CONFIG_FILE))
        require_readable(checkpoint)
        require_tied_copy(checkpoint)
        _check_space(plan, destination)
        shards = {shard.file: _source_stamps(plan, shard) for shard in plan.shards}
        with open_partial(
            destination, _fingerprint(plan), shards, companion_names(plan), overwrite=overwrite
        ) as partial:
            num_resumed = len(plan.shards)
            if not partial.published:
                weight_map, num_resumed = _write_shards(plan, partial, device, progress or (lambda _: None))
                partial.publish(companion_files(plan, weight_map, plan.num_bytes))
            partial.clean_up()
    return QuantizeReport(destination, plan, num_resumed)


def _write_shards(
    plan: QuantizePlan, partial: PartialFolder, device: str, progress: Callable[[QuantizeProgress], None]
) -> tuple[dict[str, str], int]:
    """Write the unfinished shards; return tensor name -> file and the number of shards that were finished already."""
    weight_map: dict[str, str] = {}
    problems: list[str] = []
    done_bytes = num_resumed = 0
    buffer = ShardBuffer(plan.shards)
    settings = {f"qarl_{key}": str(value) for key, value in settings_record(plan).items() if key != "targets"}
    with (
        plan.checkpoint.open_reader() as reader,
        TensorConverter(_reading(plan, reader), plan.fmt, device) as converter,
    ):
        for number, shard in enumerate(plan.shards, 1):
            if partial.finished(shard.file):
                num_resumed += 1
                done_bytes += sum(tensor.info.num_bytes for tensor in shard.tensors)
                weight_map |= dict.fromkeys(shard_names(partial.folder / shard.file), shard.file)
                continue
            buffer.clear()
            known = len(problems)
            for converted in converter.convert(shard.tensors):
                buffer.hold(converted.stored)
                problems += [converted.problem] if converted.problem else []
                info = converted.source.info
                done_bytes += info.num_bytes
                progress(QuantizeProgress(info.name, done_bytes, plan.source_bytes, number, len(plan.shards)))
            if len(problems) == known:
                assert sum(tensor.nbytes for tensor in buffer.tensors.values()) == shard.num_bytes
                write = functools.partial(save_shard, buffer.tensors, metadata={"format": "pt", **settings})
                partial.add(shard.file, write)
                weight_map |= dict.fromkeys(buffer.tensors, shard.file)
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise ValueError(
            f"NaN or Inf in {len(problems)} weight{'s' * (len(problems) != 1)} ({TOO_LARGE}), with the number of such "
            f"values; repair the source and run again, finished shards are kept:\n{listed}"
        )
    return weight_map, num_resumed


def _reading(plan: QuantizePlan, reader: TensorReader) -> Callable[[PlannedTensor], Tensor]:
    if plan.splitting is None:
        return lambda tensor: reader.read(tensor.info)
    infos = {info.name: info for info in plan.checkpoint.tensors}
    splitter = ChannelSplitter(plan.splitting, reader, infos, plan.fmt)
    return lambda tensor: splitter.read(tensor.info.name, tensor.kind)


@contextlib.contextmanager
def _named_os_errors(destination: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(
            f"{error.filename or destination}: {os_reason(error)}; nothing passes as finished, "
            "and once this is mended the same command goes on from its finished shards"
        ) from error


def _fingerprint(plan: QuantizePlan) -> dict[str, Any]:
    table = [[info.name, info.shape, info.dtype, info.files] for info in plan.checkpoint.tensors]
    source = json.dumps([plan.checkpoint.config, table], sort_keys=True).encode()
    return {
        **settings_record(plan),
        # An earlier version kept the source's dtypes, and its shards would stay.
        **({} if plan.fmt.is_quantized else {"dtype": "bfloat16"}),
        "max_shard_bytes": plan.max_shard_bytes,
        # Checkpoints of one model have one table, and archives may give their files one time.
        "source": str(plan.checkpoint.folder.resolve()),
        "source_table_sha256": hashlib.sha256(source).hexdigest(),
    }


def _source_stamps(plan: QuantizePlan, shard: PlannedShard) -> dict[str, list[int]]:
    stats = {file: (plan.checkpoint.folder / file).stat() for file in plan.source_files(shard)}
    return {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}


def check_apart(source: Path, destination: Path) -> None:
    """Require that neither of two folders is the other one, or in it.

    Raises:
        ValueError: one is.
    """
    # Unlike `Path.resolve`, this takes a link to itself.
    inner, outer = (Path(os.path.realpath(path)) for path in (destination, source))
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise ValueError(f"source {source} and destination {destination} must not contain each other")


def _check_space(plan: QuantizePlan, destination: Path) -> None:
    if is_in_place(destination):
        return
    finished = partial_path(destination).glob("checkpoint/*.safetensors")
    held = sum(path.stat().st_size for path in finished)
    require_space(partial_path(destination), plan.num_bytes - held, "what is still to be written")


def require_device(device: str) -> None:
    """Require that quantization can run on a device.

    Raises:
        ValueError: there is no such device; says which are legal.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"device={device} is not known; legal are cpu, cuda and cuda:<number>")
    if device != "cpu":
        count, number = torch.cuda.device_count(), int(device.partition(":")[2] or 0)
        if number >= count:
            found = f"sees {count} CUDA devices" if count else "sees no CUDA device"
            raise ValueError(f"device={device}, but torch {found} here; use device=cpu")
