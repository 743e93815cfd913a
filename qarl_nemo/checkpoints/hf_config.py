"""The files around the weights: config.json, the index, the record of what was quantized, tokenizer files."""

import json
import shlex
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl_kernels import QuantFormat, quantization_config
from qarl_nemo import __version__, names
from qarl_nemo.checkpoints.ignored import require_listed
from qarl_nemo.checkpoints.plan import QuantizePlan
from qarl_nemo.checkpoints.reader import CONFIG_FILE, INDEX_FILE, Checkpoint
from qarl_nemo.files import FileError, checksum, read_json, require_file

RECORD_FILE = "qarl_quantization.json"
TOOL = f"qarl-nemo {__version__}"
# Where transformers keeps the templates of a tokenizer that has several; `chat_template.jinja` is the default one.
TEMPLATES_FOLDER = "additional_chat_templates"
_TOKENIZER_PATTERNS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    # Mistral's own.
    "tekken.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "*.jinja",
    f"{TEMPLATES_FOLDER}/*.jinja",
)
_OTHER_PATTERNS = ("generation_config.json", "LICENSE*")
_READ_BY_ENGINES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def model_quantization_config(
    fmt: QuantFormat, parameter_names: Iterable[str], targets: Sequence[str]
) -> dict[str, Any] | None:
    """Return config.json's `quantization_config` for a model, including its list of BF16 modules.

    Returns:
        The dictionary, or None for bf16.

    Raises:
        ValueError: a target is unknown.
    """
    exact = fmt.storage == "fp8"
    list_kept = names.fp8_modules_to_not_convert if exact else names.compressed_tensors_ignore
    return quantization_config(fmt, ignore=list_kept(parameter_names, targets))


def record_rows(plan: QuantizePlan) -> list[dict[str, Any]]:
    """Return what became of every source tensor, in output order: name, kind, shape, format, quantized, reason."""
    return [
        {
            "name": tensor.info.name,
            "kind": tensor.kind,
            "shape": list(tensor.info.shape),
            "format": plan.fmt.name if tensor.quantized else tensor.dtype.lower(),
            "quantized": tensor.quantized,
            "reason": tensor.reason,
        }
        for tensor in plan.tensors
    ]


def settings_record(plan: QuantizePlan) -> dict[str, Any]:
    """Return the choices that determine the output, as they are recorded beside it.

    Returns:
        Tool version, format, group size, scale convention and targets, and, where they were given, the finer format
        and what was split; the codes' bits where they are stored in their own width.
    """
    return {
        "tool": TOOL,
        "format": plan.fmt.name,
        "group_size": plan.fmt.group_size,
        "scale_convention": plan.fmt.scale_convention,
        **({} if plan.fmt.vllm.refits else {"num_bits": plan.fmt.num_bits}),
        **({"nested_in": plan.fmt.published_name} if plan.fmt.nested_bits else {}),
        **({"split_channels": plan.splitting.share, **plan.splitting.config} if plan.splitting else {}),
        "targets": list(plan.targets),
    }


def require_readable(checkpoint: Checkpoint) -> None:
    """Require that the JSON files that engines read beside the weights, and that are copied, are JSON.

    Args:
        checkpoint: files that are not there are not missed.

    Raises:
        FileError: some are not; all are listed.
    """
    problems = []
    for path in _companions(checkpoint):
        if path.name in _READ_BY_ENGINES:
            try:
                read_json(path, "a file that engines read beside the weights")
            except FileError as error:
                problems.append(str(error))
    if problems:
        raise FileError("\n  ".join([f"{len(problems)} file(s) that would be copied cannot be read:", *problems]))


def companion_names(plan: QuantizePlan) -> list[str]:
    """Return the names of everything in a checkpoint that is not a shard."""
    return [*map(copied_name, _companions(plan.checkpoint)), INDEX_FILE, CONFIG_FILE, RECORD_FILE]


def companion_files(plan: QuantizePlan, weight_map: Mapping[str, str], total_bytes: int) -> dict[str, bytes]:
    """Return everything of a checkpoint that is not a shard.

    Args:
        plan: the conversion.
        weight_map: output tensor name -> shard file.
        total_bytes: size of all output tensors.

    Returns:
        File name -> content; the names are `companion_names`.

    Raises:
        ValueError: the linears that config.json would call quantized are not those that are.
    """
    config = _output_config(plan)
    if "quantization_config" in config:
        require_listed(config["quantization_config"], weight_map, _linears(plan))
    copied = {copied_name(path): path.read_bytes() for path in _companions(plan.checkpoint)}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    written = {
        INDEX_FILE: index,
        CONFIG_FILE: config,
        RECORD_FILE: {
            **settings_record(plan),
            "copied": {name: f"{zlib.crc32(copied[name]):08x}" for name in sorted(copied)},
            **adapters_record(plan.checkpoint.adapters),
            "tensors": record_rows(plan),
            "dropped": plan.dropped,
        },
    }
    return copied | {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in written.items()}


def read_record(folder: Path) -> dict[str, Any]:
    """Return what this tool recorded beside a checkpoint that it wrote; empty for one of another tool.

    Raises:
        FileError: the record is damaged.
    """
    path = folder / RECORD_FILE
    return read_json(path, "the record of a quantized checkpoint") if path.is_file() else {}


def adapters_record(adapters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what says in the record that a checkpoint lacks a run's adapters; empty for a whole model."""
    return {"adapters": dict(adapters)} if adapters else {}


def require_no_adapters(folder: Path) -> None:
    """Refuse what a packed export made of a run with adapters: it is not the model that was trained.

    Raises:
        FileError: it lacks adapters; or its record is damaged.
    """
    adapters = read_record(folder).get("adapters")
    if adapters is None:
        return
    if not isinstance(adapters, dict) or not {"run", "step", "rank"} <= adapters.keys():
        found = ascii(adapters)[:80]
        raise FileError(f"{folder / RECORD_FILE}: expected adapters, an object with run, step and rank, found {found}")
    run = adapters["run"]
    raise FileError(
        f"{folder} is what the run {run} trained up to step {adapters['step']} without its adapters of rank "
        f"{adapters['rank']}, so it is not the model that was trained; qarl eval takes the run in its place, and a "
        f"whole model of it is made by: qarl export {shlex.quote(str(run))} DESTINATION --dequantize"
    )


def foreign_files(folder: Path) -> list[str]:
    """Return the names of files in a checkpoint of this tool that this tool did not write, or not as they are now.

    Raises:
        FileError: its index or its record is damaged.
    """
    weight_map = read_json(folder / INDEX_FILE, "the index of a quantized checkpoint").get("weight_map")
    shards = list(weight_map.values()) if isinstance(weight_map, dict) else []
    copied = _recorded_copies(folder)
    if copied is None:
        # A record of an earlier version, which did not say what it had copied: what has the name of a copy counts.
        own = own_names(folder, shards)
        beside = [path for path in folder.glob(f"{TEMPLATES_FOLDER}/*") if path.suffix != ".jinja"]
    else:
        own = {INDEX_FILE, CONFIG_FILE, RECORD_FILE, *shards, *map(top_name, copied)}
        templates = folder.glob(f"{TEMPLATES_FOLDER}/*") if TEMPLATES_FOLDER in own else ()
        beside = [path for path in templates if copied_name(path) not in copied]
    others = [path.name for path in folder.iterdir() if path.name not in own] + [*map(copied_name, beside)]
    edited = [name for name, crc32 in (copied or {}).items() if crc32 and _is_edited(folder / name, crc32)]
    return sorted(others + [f"{name} (edited since it was copied)" for name in edited])


def _is_edited(path: Path, crc32: str) -> bool:
    return path.is_file() and checksum(path) != crc32


def _recorded_copies(folder: Path) -> dict[str, str | None] | None:
    """Return the files that were copied into a checkpoint, by name; None if its record does not say.

    Returns:
        Each one's checksum, see `files.checksum`; None where an earlier version recorded no more than names.
    """
    copied = read_record(folder).get("copied")
    if copied is None:
        return None
    if isinstance(copied, list) and all(isinstance(name, str) for name in copied):
        return dict.fromkeys(copied)
    if isinstance(copied, dict) and all(isinstance(crc32, str) for crc32 in copied.values()):
        return copied
    found = ascii(copied)[:80]
    raise FileError(f"{folder / RECORD_FILE}: expected copied, an object of file names and checksums, found {found}")


def own_names(folder: Path, shards: Iterable[str]) -> set[str]:
    """Return the names of what belongs to a checkpoint in its folder, whoever wrote it.

    Args:
        folder: a checkpoint of any tool.
        shards: the files of its weights.

    Returns:
        Weights, their index, and what is copied with them.
    """
    copied = map(copied_name, _files_like(folder, *_TOKENIZER_PATTERNS, *_OTHER_PATTERNS))
    return {INDEX_FILE, CONFIG_FILE, RECORD_FILE, *shards, *map(top_name, copied)}


def copied_name(path: Path) -> str:
    """Return the name of a copied file in its checkpoint: with its folder where it is one of several templates."""
    return f"{TEMPLATES_FOLDER}/{path.name}" if path.parent.name == TEMPLATES_FOLDER else path.name


def top_name(name: str) -> str:
    """Return what holds a file of a checkpoint in the checkpoint's folder: the file itself, or a folder."""
    return name.partition("/")[0]


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder's tokenizer, its chat template among them.

    Raises:
        FileError: what has the name of one is no readable file.
    """
    return _files_like(folder, *_TOKENIZER_PATTERNS)


def _companions(checkpoint: Checkpoint) -> list[Path]:
    others = _files_like(checkpoint.companions, *_OTHER_PATTERNS)
    return [*tokenizer_files(checkpoint.tokenizer or checkpoint.companions), *others]


def _files_like(folder: Path, *patterns: str) -> list[Path]:
    # A folder named `tokenizer` is the user's own; a folder named `tokenizer.json` is a mistake, which copying reports.
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    paths = sorted(path for path in found if path.suffix or not path.is_dir())
    for path in paths:
        require_file(path, "a file to be copied")
    return paths


def _linears(plan: QuantizePlan) -> list[str]:
    return [
        tensor.info.name.removesuffix(".weight")
        for tensor in plan.tensors
        if len(tensor.info.shape) == 2 and tensor.kind != "embedding"
    ]


def _output_config(plan: QuantizePlan) -> dict[str, Any]:
    # A source is not quantized, and may say so with null.
    config = {key: value for key, value in plan.checkpoint.config.items() if key != "quantization_config"}
    dtype_keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    config.update(dict.fromkeys(dtype_keys, "bfloat16"))
    if plan.splitting is not None:
        config.update(plan.splitting.config)
    quantization = model_quantization_config(plan.fmt, (info.name for info in plan.checkpoint.tensors), plan.targets)
    if quantization is not None:
        config["quantization_config"] = quantization
    return config
