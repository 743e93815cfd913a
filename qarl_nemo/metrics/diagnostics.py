"""Diagnostics of one step: what the report's histograms, scatters and error-token examples are drawn from.

    RUN/diagnostics/step_000100.npz
        seq_prox_ratio, seq_mismatch_weight, seq_advantage [M] float32, seq_kept [M] bool
        token_prev_logprob, token_curr_logprob, token_generation_logprob, token_advantage [N] float32, a uniform
        sample of the step's response tokens
        position_tokens, position_error_tokens [P] float32, how many response tokens stand at each position of a
        response, and how many of them are error tokens; P is the longest response
    RUN/diagnostics/step_000100.jsonl
        one example per line, see `make_example`
M counts every sequence of every minibatch of the step, B and T are a micro-batch's sequences and predicted tokens.
"""

import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qarl_nemo.files import FileError, require_file, write_atomic
from qarl_nemo.metrics.recorded import Example, read_lines

DIAGNOSTICS_DIR = "diagnostics"
_SEQUENCE_FIELDS = ("prox_ratio", "mismatch_weight", "advantage", "kept")
_ARCHIVE_ERRORS = (zipfile.BadZipFile, zlib.error, NotImplementedError, struct.error, SyntaxError, TypeError)
_TOKEN_FIELDS = ("prev_logprob", "curr_logprob", "generation_logprob", "advantage")
_POSITION_FIELDS = ("tokens", "error_tokens")


@dataclass(frozen=True, slots=True)
class StepDiagnostics:
    """One step as read back.

    Attributes:
        step: training step.
        arrays: by the names in the module's docstring.
        examples: as `make_example` builds them; those of NeMo-RL's dumps also have `step` and `num_error_tokens`.
    """

    step: int
    arrays: dict[str, NDArray[Any]]
    examples: list[dict[str, Any]]


class DiagnosticsCollector:
    """Gathers a step's sequences and a uniform sample of its tokens over micro-batches, in bounded memory.

    Args:
        step: training step; it also seeds the sample, so a resumed run writes the same file.
        max_tokens: tokens kept at most.
    """

    def __init__(self, step: int, max_tokens: int = 4096):
        self._step = step
        self._max_tokens = max_tokens
        self._generator = np.random.default_rng(step)
        self._sequences: dict[str, list[NDArray[Any]]] = {name: [] for name in _SEQUENCE_FIELDS}
        self._tokens = np.empty((0, len(_TOKEN_FIELDS)), np.float32)
        self._token_keys = np.empty(0)
        self._positions = np.empty((len(_POSITION_FIELDS), 0), np.float32)

    def add(
        self,
        sequences: Mapping[str, Any],
        *,
        prev_logprobs: Any,
        curr_logprobs: Any,
        generation_logprobs: Any,
        advantages: Any,
        token_mask: Any,
        error_mask: Any,
    ) -> None:
        """Add one micro-batch; everything may be a numpy array or a tensor on any device.

        Args:
            sequences: a loss's per-sequence values [B]: prox_ratio, mismatch_weight, advantage, kept, valid.
            prev_logprobs: [B, T] the learner's logprobs before the update, nats.
            curr_logprobs: [B, T] the learner's logprobs in this minibatch, nats.
            generation_logprobs: [B, T] the rollout engine's logprobs, nats.
            advantages: [B, T] advantage of each token's sequence.
            token_mask: [B, T] true for response tokens.
            error_mask: [B, T] true for error tokens, see `error_token_mask`.
        """
        valid = _as_array(sequences["valid"]).astype(bool)
        for name in _SEQUENCE_FIELDS:
            self._sequences[name].append(_as_array(sequences[name])[valid])
        mask = _as_array(token_mask).astype(bool) & valid[:, None]
        columns = (prev_logprobs, curr_logprobs, generation_logprobs, advantages)
        tokens = np.stack([_as_array(column)[mask] for column in columns], axis=-1).astype(np.float32)
        # Keeping the smallest of independent uniform keys is a uniform sample, whatever the micro-batch sizes.
        keys = np.concatenate([self._token_keys, self._generator.random(len(tokens))])
        smallest = np.argsort(keys)[: self._max_tokens]
        self._tokens = np.concatenate([self._tokens, tokens])[smallest]
        self._token_keys = keys[smallest]
        positions = mask.cumsum(axis=1)[mask] - 1
        wrong = np.bincount(positions, _as_array(error_mask).astype(bool)[mask])
        self._positions = sum_positions([self._positions, np.stack([np.bincount(positions), wrong])])

    def write(self, run_dir: Path, examples: Iterable[Mapping[str, Any]] = ()) -> Path:
        """Write the step's two files, each atomically.

        Args:
            run_dir: the run's folder.
            examples: rollouts worth reading, from `make_example`.

        Returns:
            Path of the npz file.
        """
        folder = run_dir / DIAGNOSTICS_DIR
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {f"token_{name}": self._tokens[:, index] for index, name in enumerate(_TOKEN_FIELDS)}
        arrays |= {f"position_{name}": row for name, row in zip(_POSITION_FIELDS, self._positions, strict=True)}
        for name, parts in self._sequences.items():
            dtype = bool if name == "kept" else np.float32
            arrays[f"seq_{name}"] = np.concatenate([*parts, np.empty(0)]).astype(dtype)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        path = folder / f"step_{self._step:06d}.npz"
        write_atomic(path.with_suffix(".jsonl"), "".join(json.dumps(example) + "\n" for example in examples))
        write_atomic(path, buffer.getvalue())
        return path


def sum_positions(counts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Add up counts by position.

    Args:
        counts: one [K, P] each, P as long as its longest response.

    Returns:
        [K, P], as long as the longest of all.
    """
    total = np.zeros((len(counts[0]), max(part.shape[1] for part in counts)), np.float32)
    for part in counts:
        total[:, : part.shape[1]] += part
    return total


def make_example(
    *,
    prompt: str,
    tokens: Sequence[str],
    answer: str,
    reward: float,
    advantage: float,
    error_mask: Sequence[bool],
    prev_logprobs: Sequence[float],
    generation_logprobs: Sequence[float],
) -> dict[str, Any]:
    """Build one example record: the response as text, and where in it the error tokens stand.

    Args:
        prompt: text of the prompt.
        tokens: text of each response token; joined they are the response.
        answer: reference answer.
        reward: verifier's reward.
        advantage: group-normalized advantage.
        error_mask: per token, from `error_token_mask`.
        prev_logprobs: per token, nats.
        generation_logprobs: per token, nats.

    Returns:
        prompt, response, answer, reward, advantage, and `error_tokens`: text, start (character offset in the response),
        prev_prob and generation_prob (null when not a number) of each error token.
    """
    starts = np.cumsum([0, *(len(token) for token in tokens)])
    errors = [
        {
            "text": token,
            "start": int(starts[index]),
            "prev_prob": _probability(prev_logprobs[index]),
            "generation_prob": _probability(generation_logprobs[index]),
        }
        for index, token in enumerate(tokens)
        if bool(error_mask[index])
    ]
    return {
        "prompt": prompt,
        "response": "".join(tokens),
        "answer": answer,
        "reward": float(reward),
        "advantage": float(advantage),
        "error_tokens": errors,
    }


def diagnostic_steps(run_dir: Path) -> list[int]:
    """List the steps of a run that have diagnostics, ascending."""
    names = (
        re.fullmatch(r"step_(\d{6,12})\.npz", path.name) for path in (run_dir / DIAGNOSTICS_DIR).glob("step_*.npz")
    )
    return sorted(int(name.group(1)) for name in names if name)


def read_diagnostics(run_dir: Path, step: int) -> StepDiagnostics:
    """Read the diagnostics of one step; examples are empty when their file is missing.

    Args:
        run_dir: the run's folder.
        step: one of `diagnostic_steps(run_dir)`.

    Raises:
        FileError: one of its two files is damaged.
    """
    path = run_dir / DIAGNOSTICS_DIR / f"step_{step:06d}.npz"
    examples_path = path.with_suffix(".jsonl")
    return StepDiagnostics(
        step, _read_arrays(path), read_lines(examples_path, Example) if examples_path.exists() else []
    )


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    require_file(path, "a step's diagnostics")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, MemoryError, OverflowError, *_ARCHIVE_ERRORS) as error:
        raise FileError(f"{path} is damaged: expected an archive of numpy arrays, but: {error}") from error
    groups: dict[str, tuple[str, ...]] = {"seq": _SEQUENCE_FIELDS, "token": _TOKEN_FIELDS}
    # Runs that were recorded earlier lack them.
    if any(name.startswith("position_") for name in arrays):
        groups["position"] = _POSITION_FIELDS
    for group, fields in groups.items():
        held = [arrays.get(f"{group}_{field}") for field in fields]
        shapes = {None if array is None else array.shape for array in held}
        numbers = all(array is not None and array.dtype.kind in "fb" for array in held)
        if not numbers or len(shapes) != 1 or len(next(iter(shapes)) or ()) != 1:
            names = ", ".join(f"{group}_{field}" for field in fields)
            raise FileError(f"{path} is damaged: expected numbers, as many in each of {names}")
    return arrays


def _probability(logprob: float) -> float | None:
    return math.exp(logprob) if logprob <= 0 else None


def _as_array(values: Any) -> NDArray[Any]:
    # A tensor has a method for leaving its device and graph, so this module need not import torch.
    return values.numpy(force=True) if hasattr(values, "numpy") else np.asarray(values)
