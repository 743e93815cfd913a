"""NeMo-RL's log folders, read as the records and diagnostics of a run: TensorBoard events and dumps of its batches.

    LOG_DIR/exp_001/config.yaml                 the checked config, written by examples/run_qarl_grpo.py
    LOG_DIR/exp_001/run.json                    what it ran on, written by the same program
    LOG_DIR/exp_001/tensorboard/events...       scalars by step
    LOG_DIR/exp_001/train_data_step7.jsonl      the responses of a step, one a line
    LOG_DIR/exp_001/diagnostics/step_000020.npz ratios and log-probabilities of a step, from our loss
A run that was resumed has one `exp_...` folder for each start; later ones win where steps overlap.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl_nemo.files import FileError, read_json, require_file
from qarl_nemo.metrics.diagnostics import StepDiagnostics, diagnostic_steps, read_diagnostics
from qarl_nemo.metrics.nemo_rl_dumps import read_dump
from qarl_nemo.metrics.recorded import FACTS_FILE
from qarl_nemo.metrics.tensorboard_file import read_events

CONFIG_FILE = "config.yaml"
_EVENTS = "tensorboard"
_OURS = "train/qarl/"
# NeMo-RL's key -> the embedded engine's
_RENAMED = {
    "train/reward": "reward/mean",
    "train/mean_gen_tokens_per_sample": "response_length_tokens/mean",
    "train/approx_entropy": "loss/approx_entropy",
    # Another estimate where reference_policy_kl_type says so, and all that NeMo-RL alone logs; ours goes before it.
    "train/gen_kl_error": "mismatch/kl_k3",
    f"{_OURS}mismatch_kl_k3": "mismatch/kl_k3",
    "train/truncation_rate": "truncated_fraction",
    "train/grad_norm": "optim/grad_norm",
    "train/lr": "optim/lr",
    "train/loss": "loss/total",
    "validation/accuracy": "validation/reward",
    f"{_OURS}abs_gap": "mismatch/abs_gap_mean",
    f"{_OURS}num_nonfinite_tokens": "mismatch/nonfinite_tokens",
    f"{_OURS}error_tokens": "error_tokens/rate",
    f"{_OURS}skipped_steps": "optim/skipped_steps",
    f"{_OURS}optimizer_s": "optim/step_s",
    "timing/train/total_step_time": "timing/step_s",
    # Logged by itself, and part of the step's.
    "timing/validation/total_validation_time": "timing/validation_s",
}
# Phases that do not overlap; two with one name belong to the synchronous and the asynchronous loop.
_PHASES = {
    "generation": "rollout",
    "exposed_generation": "rollout",
    "reward_calculation": "reward",
    "policy_and_reference_logprobs": "prev_logprobs",
    "policy_training": "update",
    "prepare_for_generation/total": "refit",
    "weight_sync": "refit",
    "training_prep": "training_prep",
    "logprob_inference_prep": "logprob_prep",
    "checkpointing": "checkpointing",
}
_TRANSFER = "timing/train/prepare_for_generation/transfer_and_update_weights"
# One of the starts of a run.
_START = re.compile(r"exp_(\d+)")
_DUMP = re.compile(r"train_data_step(\d+)\.jsonl")


def is_nemo_rl_log(path: Path) -> bool:
    """Tell whether a folder is one of NeMo-RL's, or holds its `exp_...` folders."""
    return bool(_starts(path))


def find_config(path: Path) -> Path | None:
    """Return the path of the latest start's config, if one was written."""
    written = [start / CONFIG_FILE for start in _starts(path) if (start / CONFIG_FILE).is_file()]
    return written[-1] if written else None


def read_facts(path: Path) -> dict[str, Any]:
    """Read command, hardware and versions of the latest start that recorded them.

    Returns:
        `command`, `hardware` and `versions`, and `start_s` once it took its first step.

    Raises:
        ValueError: no start recorded them.
    """
    written = [start / FACTS_FILE for start in _starts(path) if (start / FACTS_FILE).is_file()]
    if not written:
        raise ValueError(
            f"{path}: no {FACTS_FILE}, which examples/run_qarl_grpo.py writes, so nobody knows what it ran on"
        )
    return read_json(written[-1], "what a run ran on")


def report_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of NeMo-RL's config that reports know, under the embedded engine's keys."""
    policy, grpo = config.get("policy") or {}, config.get("grpo") or {}
    qarl = dict(policy.get("qarl") or {})
    objective = qarl.pop("objective", None)
    known = {"qarl": qarl, "loss_fn": objective} if qarl else {}
    return known | {
        "seed": grpo.get("seed"),
        "policy": {"model_path": policy.get("model_name")},
        "grpo": {key: grpo.get(key) for key in ("num_prompts_per_step", "num_generations_per_prompt")}
        | {key: value for key, value in grpo.items() if key == "batch_multiplier" and value != 1},
    }


def read_records(path: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read a run's scalars, one record a step under the embedded engine's keys.

    Args:
        path: the folder.
        config: as `report_config` returns it.

    Returns:
        Records with `step`, ascending.

    Raises:
        ValueError: an event file is broken.
    """
    steps: dict[int, dict[str, float]] = {}
    for start in _starts(path):
        fresh = _read_scalars(start / _EVENTS)
        first = min(fresh, default=math.inf)
        steps = {step: values for step, values in steps.items() if step < first} | fresh
    records, time_s = [], 0.0
    for step in sorted(steps):
        record = step_record(steps[step], config)
        time_s += record.get("timing/step_s", 0.0)
        records.append({"step": step, **record, "time_s": time_s})
    return records


def step_record(values: Mapping[str, float], config: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's scalars under the embedded engine's keys, with rates that follow from them.

    Args:
        values: NeMo-RL's key -> value.
        config: as `report_config` returns it; empty if nobody knows it.
    """
    record = {new: values[key] for key, new in _RENAMED.items() if key in values}
    if _TRANSFER in values:
        record["refit/total_s"] = values[_TRANSFER]
    record |= {key: value for key, value in values.items() if key.startswith("refit/")}
    for key, value in values.items():
        if key.startswith(_OURS) and key not in _RENAMED:
            name = key.removeprefix(_OURS)
            record[name if name.startswith("memory/") else f"loss/{name}"] = value
    for sign in ("positive", "negative"):
        tokens = values.get(f"{_OURS}tokens_{sign}")
        if tokens:
            record[f"error_tokens/rate_{sign}"] = values[f"{_OURS}error_tokens_{sign}"] / tokens
    for phase, name in _PHASES.items():
        if f"timing/train/{phase}" in values:
            key = f"timing/{name}_s"
            record[key] = record.get(key, 0.0) + values[f"timing/train/{phase}"]
    return record | _speeds(values, record, config.get("grpo") or {})


def _speeds(values: Mapping[str, float], record: Mapping[str, float], grpo: Mapping[str, Any]) -> dict[str, float]:
    """Return tokens per second of rollouts and updates, as far as a step says what both take."""
    prompts, generations = grpo.get("num_prompts_per_step") or 0, grpo.get("num_generations_per_prompt") or 0
    tokens = prompts * generations * record.get("response_length_tokens/mean", 0.0)
    # Dynamic sampling asks larger batches than it trains on, and several of them.
    asked = int(prompts * (grpo.get("batch_multiplier") or 1)) / (prompts or 1)
    asked *= values.get("train/dynamic_sampling_num_gen_batches", 1.0)
    # The asynchronous loop has no such timer: it notes how long training waits for rollouts, which says nothing here.
    seconds = {"rollout": values.get("timing/train/generation"), "update": record.get("timing/update_s")}
    sampled = {"rollout": tokens * asked, "update": tokens}
    return {f"throughput/{phase}_tokens_s": sampled[phase] / took for phase, took in seconds.items() if took and tokens}


def read_newest_diagnostics(path: Path) -> StepDiagnostics | None:
    """Read the newest recorded step, with examples from the newest dump of a batch; without one, the dump alone.

    The two may be of different steps, so each example says its own.
    """
    dumps: dict[int, Path] = {}
    recorded: dict[int, Path] = {}
    for start in _starts(path):
        fresh_dumps, fresh_steps = _numbered(start, _DUMP), diagnostic_steps(start)
        if dumps or recorded:
            # Steps of an earlier start that this one took again are no part of the run.
            first = min([*_read_scalars(start / _EVENTS), *fresh_dumps, *fresh_steps], default=math.inf)
            dumps = {step: file for step, file in dumps.items() if step < first}
            recorded = {step: folder for step, folder in recorded.items() if step < first}
        dumps |= fresh_dumps
        recorded |= dict.fromkeys(fresh_steps, start)
    dumped = read_dump(max(dumps), dumps[max(dumps)]) if dumps else None
    if not recorded:
        return dumped
    step = max(recorded)
    return StepDiagnostics(step, read_diagnostics(recorded[step], step).arrays, dumped.examples if dumped else [])


def run_files(path: Path, name: re.Pattern[str]) -> dict[int, Path]:
    """Return a run's files by step, without those of steps that a later start took again.

    Args:
        path: the folder.
        name: matches a file's name; its first group is the step.
    """
    files: dict[int, Path] = {}
    for start in _starts(path):
        fresh = _numbered(start, name)
        first = min([*_read_scalars(start / _EVENTS), *fresh], default=math.inf) if files else math.inf
        files = {step: file for step, file in files.items() if step < first} | fresh
    return files


def _starts(path: Path) -> list[Path]:
    def is_start(folder: Path) -> bool:
        dumped = any(folder.glob("train_data_step*.jsonl"))
        return not (folder / "metrics.jsonl").exists() and ((folder / _EVENTS).is_dir() or dumped)

    # A run of the embedded engine's is one, whatever lies in its folder.
    if not path.is_dir() or (path / "metrics.jsonl").exists():
        return []
    starts = _numbered(path, _START)
    return [path] if is_start(path) else [starts[number] for number in sorted(starts) if is_start(starts[number])]


def _numbered(start: Path, name: re.Pattern[str]) -> dict[int, Path]:
    found = ((name.fullmatch(file.name), file) for file in start.iterdir())
    return {int(match[1]): file for match, file in found if match}


def _read_scalars(folder: Path) -> dict[int, dict[str, float]]:
    steps: dict[int, dict[str, float]] = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        require_file(file, "TensorBoard's events")
        try:
            for event in read_events(file):
                for value in event.summary.value:
                    if value.HasField("simple_value"):
                        steps.setdefault(event.step, {})[value.tag] = value.simple_value
        except Exception as error:  # the loader and protobuf raise types of their own
            raise FileError(f"{file} is damaged: expected TensorBoard's events, but: {error}") from error
    # NeMo-RL's steps begin at 1; what a start logs before the first one (step 0) is not a step.
    return {step: values for step, values in steps.items() if any(tag.startswith("train/") for tag in values)}
