"""A Megatron-core checkpoint, read as the Hugging Face checkpoint with the same weights."""

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Self

from torch import Tensor

from qarl_nemo.architecture import MEGATRON_FAMILIES, Architecture
from qarl_nemo.checkpoints.chunks import ChunkReader
from qarl_nemo.checkpoints.hints import folder_hint, no_folder
from qarl_nemo.checkpoints.iterations import METADATA_FILE, find_iterations
from qarl_nemo.checkpoints.megatron_layout import Location, Weight, model_weights
from qarl_nemo.checkpoints.reader import CONFIG_FILE, DTYPES, FLOAT_DTYPES, Checkpoint, TensorInfo, read_config
from qarl_nemo.checkpoints.table_of_contents import read_table_of_contents
from qarl_nemo.checkpoints.torch_dist import TorchDist
from qarl_nemo.files import FileError, read_json
from qarl_nemo.names import summarize_names

# What a training checkpoint holds besides the model's weights.
_NO_WEIGHT = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine_state|.*\._extra_state")
_DTYPES = {DTYPES[name]: name for name in FLOAT_DTYPES}


class MegatronReader:
    """Reads weights by their Hugging Face names."""

    def __init__(self, stored: TorchDist, locations: dict[str, Location]) -> None:
        """Remember where the weights are; files are opened when they are read.

        Args:
            stored: the checkpoint.
            locations: Hugging Face name -> where the weight is.
        """
        self._stored = stored
        self._locations = locations

    def __enter__(self) -> Self:
        self._chunks = ChunkReader(self._stored.folder)
        return self

    def __exit__(self, *exception: object) -> None:
        del self._chunks

    def read(self, info: TensorInfo) -> Tensor:
        """Return one tensor, see `TensorReader.read`."""
        place = self._locations[info.name]
        return self._chunks.read_rows(self._stored.tensors[place.key], place.index, place.ranges)


def open_megatron(folder: str | Path, hf_model: str | Path, *, drop_vocab_padding: bool = False) -> Checkpoint:
    """Read the table of contents of a Megatron `torch_dist` checkpoint with any parallel layout.

    Args:
        folder: the folder with `.metadata`, or one above it that holds a single iteration.
        hf_model: folder with the model's config.json and tokenizer.
        drop_vocab_padding: leave out rows beyond the vocabulary even if they are not zero.

    Returns:
        The weights under their Hugging Face names; no object of the checkpoint is unpickled.

    Raises:
        ValueError: not such a checkpoint, or not this model's; every problem is listed with every name.
    """
    folder, hf_model = _iteration_folder(Path(folder)), Path(hf_model)
    if absent := no_folder(hf_model):
        raise FileError(f"no config.json says what model this is: {absent}")
    problems: list[str] = []
    config = read_config(hf_model, problems)
    if problems:
        raise FileError(f"{hf_model} does not say what model this is{folder_hint(hf_model)}:\n" + _listed(problems))
    model = Architecture.parse(config, str(hf_model / CONFIG_FILE), MEGATRON_FAMILIES)
    wanted = read_table_of_contents(folder / METADATA_FILE, lambda key: not _NO_WEIGHT.match(key))
    stored = TorchDist(folder, wanted)
    weights = list(model_weights(model))
    locations, problems = _locate(weights, stored)
    keys = sorted({place.key for place in locations.values()})
    problems += stored.problems(keys)
    if not drop_vocab_padding:
        problems += _padding_problems(locations.values(), stored)
    if problems:
        raise ValueError(f"cannot convert {folder} as the model of {hf_model / CONFIG_FILE}:\n" + _listed(problems))
    reader = partial(MegatronReader, stored, locations)
    return Checkpoint(folder, hf_model, config, tuple(_tensor_infos(weights, locations, stored)), reader)


def _iteration_folder(folder: Path) -> Path:
    """Return the folder with `.metadata`: this one, or that of the only iteration below it, of Megatron or NeMo-RL."""
    if absent := no_folder(folder):
        raise FileError(absent)
    found = find_iterations(folder)
    if not found:
        raise FileError(f"{folder} is not a torch_dist checkpoint (a folder with {METADATA_FILE}){_hint(folder)}")
    if len(found) > 1:
        listed = "".join(f"\n  - {path}" for path in found)
        raise FileError(f"{folder} is not a torch_dist checkpoint, it holds {len(found)}; name one of them:{listed}")
    description = found[0] / "metadata.json"
    what = "Megatron's description of a checkpoint"
    backend = read_json(description, what).get("sharded_backend") if description.exists() else "torch_dist"
    if backend != "torch_dist":
        raise FileError(f"{found[0]} has the format {backend}; only torch_dist is read, save it as that")
    return found[0]


def _hint(folder: Path) -> str:
    if (folder / CONFIG_FILE).is_file():
        return "; it is a Hugging Face model, which `qarl quantize` reads"
    if models := sorted(folder.glob(f"checkpoints/step_*/model/{CONFIG_FILE}")):
        newest = models[-1].parent
        return f"; it is a run of qarl train, which holds Hugging Face models: qarl quantize {newest} DESTINATION"
    return folder_hint(folder)


def _locate(weights: Iterable[Weight], stored: TorchDist) -> tuple[dict[str, Location], list[str]]:
    locations: dict[str, Location] = {}
    missing: dict[tuple[str, ...], list[str]] = defaultdict(list)
    wrong: dict[str, str] = {}
    unused = set(stored.tensors)
    for weight in weights:
        places = [place for place in weight.locations if place.key in stored.tensors]
        unused -= {place.key for place in places}
        if not places:
            missing[tuple(re.sub(r"\.\d+\.", ".N.", place.key) for place in weight.locations)].append(weight.name)
        elif len(places) > 1:
            keys = " and ".join(place.key for place in places)
            wrong[keys] = f"{keys} are both there, for {weight.name}; keep one"
        elif not _fits(stored.tensors[places[0].key].shape, places[0]):
            wanted = f"{list(places[0].shape)}{' or more rows' if places[0].padded else ''}"
            found = list(stored.tensors[places[0].key].shape)
            wrong[places[0].key] = f"{places[0].key} has shape {found}, the config implies {wanted}"
        else:
            locations[weight.name] = places[0]
    problems = [
        f"missing {' or '.join(dict.fromkeys(keys))}: for {summarize_names(names)}" for keys, names in missing.items()
    ]
    problems += wrong.values()
    problems += [f"keys that this model does not have: {summarize_names(unused)}"] if unused else []
    odd = sorted(key for key, tensor in stored.tensors.items() if key not in unused and tensor.dtype not in _DTYPES)
    return locations, problems + [f"{key} has dtype {stored.tensors[key].dtype}, not floating point" for key in odd]


def _fits(shape: tuple[int, ...], place: Location) -> bool:
    if not place.padded:
        return shape == place.shape
    return len(shape) == len(place.shape) and shape[0] >= place.shape[0] and shape[1:] == place.shape[1:]


def _padding_problems(locations: Iterable[Location], stored: TorchDist) -> list[str]:
    problems = []
    chunks = ChunkReader(stored.folder)
    for place in locations:
        tensor, rows = stored.tensors[place.key], place.shape[0]
        if not place.padded or tensor.shape[0] == rows or stored.problems([place.key]):
            continue
        try:
            padding = chunks.read_rows(tensor, (), ((rows, tensor.shape[0]),))
        except ValueError as error:
            problems.append(str(error))
            continue
        used = int((padding != 0).any(-1).sum())
        if used:
            problems.append(
                f"{place.key}: {used} of {len(padding)} rows behind the vocabulary of {rows} are not zero; either the "
                "config is another model's, or training moved the padding: then leave it out with drop_vocab_padding"
            )
    return problems


def _tensor_infos(weights: Iterable[Weight], locations: dict[str, Location], stored: TorchDist) -> Iterable[TensorInfo]:
    files: dict[str, dict[tuple[int, ...], list[str]]] = {}
    for weight in weights:
        place = locations[weight.name]
        tensor = stored.tensors[place.key]
        if place.key not in files:
            by_index = tensor.chunks_by_index(len(place.index))
            files[place.key] = {index: sorted({chunk.file for chunk in part}) for index, part in by_index.items()}
        yield TensorInfo(weight.name, weight.shape, _DTYPES[tensor.dtype], tuple(files[place.key][place.index]))


def _listed(problems: list[str]) -> str:
    return "\n".join(f"  - {problem}" for problem in problems)
