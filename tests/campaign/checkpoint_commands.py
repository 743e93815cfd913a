"""`quantize` and `convert` on damaged checkpoints.

Oracle. Success is right if every byte written equals what the undamaged inputs give. Otherwise only values of the
source may have changed, or keys of config.json that shapes do not depend on, or files that are copied; then the output
must say the same as the source: `transformers` loads the source without a missing, unexpected or misshapen tensor and,
if the weights are the undamaged ones, answers with finite numbers; every copied tensor and file is the source's, every
quantized one is `quantize_weight` of the source's, and config.json is the source's beside its `quantization_config` and
dtype. A chunk of torch_dist has a checksum, so that its values may not have changed.

Nothing is left behind if, after a refusal, there is no destination, and the repaired inputs give what undamaged ones
give.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from commands import Command, Run
from edits import Edit
from inputs import copy_fresh, write_model, write_torch_dist
from kill_points import CHECKPOINTS
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from qarl_kernels import get_format, quantize_weight

logging.set_verbosity(logging.CRITICAL)
logging.disable_progress_bar()
_FORMAT = get_format("w4a16")
_DTYPE_KEYS = ("dtype", "torch_dtype", "quantization_config")
_ARGUMENTS = (
    ("--format", "w9a16"),
    ("--format", ""),
    ("--group-size", "0"),
    ("--group-size", "-128"),
    ("--group-size", "96"),
    ("--group-size", "x"),
    ("--scale-convention", "other"),
    ("--targets", "foo"),
    ("--targets", ""),
    ("--targets", "experts,,"),
    ("--targets", "mlp"),
    ("--max-shard-bytes", "0"),
    ("--max-shard-bytes", "-1"),
    ("--device", "nowhere"),
    ("--unknown", "1"),
    ("--overwrite", "extra"),
)


class _Checkpoints(Command):
    preload = CHECKPOINTS

    def learn(self, run: Run) -> None:
        code, output = run(self.arguments(self.base), self.base)
        assert code == 0, output
        copy_fresh(self.base / "out", self.base.with_name(f"{self.name}-expected"))
        for path in sorted((self.base / "out").iterdir()):
            path.unlink()
        (self.base / "out").rmdir()

    @property
    def _expected(self) -> Path:
        return self.base.with_name(f"{self.name}-expected")

    def draw_arguments(self, rng: random.Random) -> Edit:
        """Draw illegal options; every one of them must be refused."""
        chosen = rng.choice(_ARGUMENTS)
        return Edit("arguments", " ".join(chosen)[:60], arguments=chosen)

    def wrongly_accepted(self, folder: Path, edits: Sequence[Edit]) -> str | None:
        """Judge a success as the module says."""
        if any(edit.place == "arguments" for edit in edits):
            return "illegal options were accepted"
        if digests(folder / "out") == digests(self._expected):
            return None
        source = folder / "model"
        try:
            weights, undamaged = (_read_weights(path / "model") for path in (folder, self.base))
            same = weights.keys() == undamaged.keys() and all(torch.equal(weights[n], undamaged[n]) for n in weights)
            problem = _transformers_problem(source, must_be_finite=same)
            return problem or _output_problem(folder / "out", source, weights)
        except Exception as error:  # noqa: BLE001 whatever else fails on the source says that it is damaged
            return f"the source is damaged: {type(error).__name__}: {str(error)[:200]}"

    def left_behind(self, folder: Path, run: Run) -> str | None:
        """Repair the inputs and run again where the refused call left anything."""
        if (folder / "out").exists():
            return "there is a destination"
        if not any(path.name.startswith("out") for path in folder.iterdir()):
            return None
        for name in ("model", "megatron"):
            if (self.base / name).exists():
                copy_fresh(self.base / name, folder / name)
        for arguments in (self.arguments(folder), [*self.arguments(folder), "--overwrite"]):
            code, output = run(arguments, folder)
            if code == 0 or "other settings" not in output:
                break
        if code != 0:
            return f"the repaired inputs end with {code}: {output[-300:]}"
        same = digests(folder / "out") == digests(self._expected)
        return None if same else "the repaired inputs give other files than undamaged ones"


class Quantize(_Checkpoints):
    """`qarl quantize` of a checkpoint in several files."""

    name, share = "quantize", 0.45

    def prepare(self) -> None:
        """Write the model."""
        write_model(self.base / "model")

    def places(self) -> Mapping[str, float]:
        """Return config, index, shards, and the files that are copied."""
        shards = sorted(path.name for path in self.base.glob("model/*.safetensors"))
        weights = {"config.json": 4.0, "model.safetensors.index.json": 3.0, "tokenizer.json": 0.2}
        weights |= dict.fromkeys(shards, 6.0 / len(shards))
        return {f"model/{name}": weight for name, weight in weights.items()}

    def arguments(self, folder: Path) -> list[str]:
        """Return the call."""
        return ["quantize", str(folder / "model"), str(folder / "out"), "--max-shard-bytes", "300000"]


class Convert(_Checkpoints):
    """`qarl convert` of a torch_dist checkpoint of two ranks."""

    name, share = "convert", 0.3

    def prepare(self) -> None:
        """Write model and checkpoint; the model keeps its config and tokenizer only."""
        write_model(self.base / "model")
        write_torch_dist(self.base / "megatron", self.base / "model")

    def places(self) -> Mapping[str, float]:
        """Return the table of contents, the files of the ranks, and the config."""
        files = sorted(path.name for path in self.base.glob("megatron/*.distcp"))
        weights = {"megatron/.metadata": 6.0, "megatron/metadata.json": 1.0, "model/config.json": 2.0}
        return weights | {f"megatron/{name}": 3.0 / len(files) for name in files}

    def arguments(self, folder: Path) -> list[str]:
        """Return the call."""
        return ["convert", str(folder / "megatron"), str(folder / "out"), "--hf-model", str(folder / "model")]


def digests(folder: Path) -> dict[str, str]:
    """Return file -> SHA-256 of a folder's files."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def _read_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            assert name not in weights, f"{name} is in two files"
            weights[name] = tensor
    return weights


def _transformers_problem(source: Path, *, must_be_finite: bool) -> str | None:
    # transformers fails on an index without metadata, which no engine needs.
    index = source / "model.safetensors.index.json"
    tree = json.loads(index.read_text()) if index.is_file() else {}
    if tree and "metadata" not in tree:
        index.write_text(json.dumps({"metadata": {}, **tree}))
    model, loading = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True)
    wrong = {kind: sorted(map(str, loading[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        return f"transformers finds {wrong}"
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, 4]])).logits
    return None if not must_be_finite or bool(torch.isfinite(logits).all()) else "transformers answers with NaN or Inf"


def _output_problem(out: Path, source: Path, weights: dict[str, Tensor]) -> str | None:
    written = _read_weights(out)
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        if name in written:
            wanted = {name: tensor}
        else:
            stored = quantize_weight(tensor, _FORMAT, name=name).tensors
            wanted = {f"{module}.{suffix}": part for suffix, part in stored.items()}
            written.pop(f"{module}.weight_shape", None)
        for key, part in wanted.items():
            found = written.pop(key, None)
            if found is None or not torch.equal(found, part):
                return f"{key} is not what {name} of the source gives"
    if written:
        return f"the output holds {sorted(written)[:3]}, which the source does not"
    configs = [json.loads((folder / "config.json").read_text()) for folder in (out, source)]
    if _without(configs[0]) != _without(configs[1]):
        return "config.json is not the source's"
    copied = [path for path in source.glob("tokenizer*") if path.read_bytes() != (out / path.name).read_bytes()]
    return f"{copied[0].name} is not the source's" if copied else None


def _without(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _DTYPE_KEYS}
