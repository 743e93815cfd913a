"""Checks a run's checkpoints: which it keeps, and that it goes on with the schedule that it began with."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qarl_nemo.config import ConfigError, read_yaml
from qarl_nemo.files import FileError
from qarl_nemo.nemo_rl.checks.lines import problem_line
from qarl_nemo.nemo_rl.checks.validation import validation_metrics
from qarl_nemo.nemo_rl.layout import MEGATRON
from qarl_nemo.nemo_rl.lookup import ABSENT, look_up
from qarl_nemo.nemo_rl.optimizer_dtypes import OPTIMIZER

_METRIC = "checkpointing.metric_name"
_SAVE_BY = "checkpointing.checkpoint_must_save_by"
_FOLDER, _STEPS = "checkpointing.checkpoint_dir", "grpo.max_num_steps"
# What says how many steps the data lasts for.
_LASTS = ("grpo.max_num_epochs", "grpo.num_prompts_per_step")
_SCHEDULER = f"{MEGATRON}.scheduler"
_NEW = f"{_SCHEDULER}.override_opt_param_scheduler"
# Either takes one of the two schedules as it is.
_SETTLED = (_NEW, f"{_SCHEDULER}.use_checkpoint_opt_param_scheduler")
# By these Megatron finds which group of parameters a part of the optimizer's state belongs to; with their defaults.
_PLACES = {f"{OPTIMIZER}.lr": ABSENT, f"{OPTIMIZER}.min_lr": ABSENT, "qarl.update_aware_scale": None}
# What Megatron compares; it counts in responses, so that the batch belongs to it.
_COMPARED = (
    "policy.train_global_batch_size",
    *(
        f"{_SCHEDULER}.{name}"
        for name in (
            "lr_warmup_iters",
            "lr_decay_iters",
            "lr_decay_style",
            "start_weight_decay",
            "end_weight_decay",
            "weight_decay_incr_style",
        )
    ),
)


def metric_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say where NeMo-RL would find out at its first checkpoint that it cannot tell which ones are the best.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Source: NeMo-RL 7ea279ab, `algorithms/grpo.py`.
    """
    name = look_up(config, _METRIC, None)
    if name is None or not look_up(config, "checkpointing.enabled", False):
        return []
    where, _, metric = str(name).partition(":")
    if name == "val:reward":
        return [
            f"{_METRIC}={name}: NeMo-RL calls a validation's mean reward accuracy, and ends at its first checkpoint "
            "without this metric; set val:accuracy, or null to keep the newest ones"
        ]
    measured = validation_metrics(config)
    if where == "val" and metric and metric not in measured:
        return [
            f"{_METRIC}={name}: NeMo-RL ends at its first checkpoint after a validation, which has no such metric; set "
            f"{' or '.join(f'val:{each}' for each in measured)}, or null to keep the newest ones"
        ]
    if where in ("train", "val") and metric:
        return []
    return [
        f"{_METRIC}={name}: NeMo-RL ends at its first checkpoint unless this is train: or val: and a metric's name; "
        "set val:accuracy, or null to keep the newest ones"
    ]


def save_time_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say where NeMo-RL could not read, once all workers have started, the time by which it is to save.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        No line, or one; NeMo-RL reads the time without checkpoints, too.

    Source: NeMo-RL 7ea279ab, `convert_to_seconds` in `utils/timer.py`.
    """
    time = look_up(config, _SAVE_BY, None)
    if time is None or (isinstance(time, str) and re.fullmatch(r"\d+(:\d+){3}", time.strip())):
        return []
    why = "not days, hours, minutes and seconds as DD:HH:MM:SS"
    return [problem_line(_SAVE_BY, time, why, 'e.g. "00:03:45:00", in quotes, or null')]


def resume_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say where a run would leave the optimizer or the schedule of the checkpoint that it goes on from.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        A line for the optimizer and one for the schedule, each with the checkpoint and every key that differs; none
        where there is no checkpoint, and none for the schedule where a key says which one counts.

    Source: Megatron-core 0.20, `optimizer/optimizer.py`, `param_group_identifier_keys`, and
        `optimizer_param_scheduler.py`, `load_state_dict`; NeMo-RL 0.6, `algorithms/grpo.py`, `total_train_iters`, and
        `utils/checkpoint.py`, `get_latest_checkpoint_path`.
    """
    if (newest := _newest(config)) is None:
        return []
    try:
        saved: Any = read_yaml(newest / "config.yaml")
    except (ConfigError, FileError):
        return []  # NeMo-RL writes it for people, and goes on without it.
    if not look_up(saved, "checkpointing.save_optimizer", True):
        return []
    goes_on = f"{_FOLDER}={newest.parent}: the run goes on from {newest.name}, whose"
    places = _told((key, look_up(config, key, unset), look_up(saved, key, unset)) for key, unset in _PLACES.items())
    settled = any(look_up(config, key, False) for key in _SETTLED)
    schedule = "" if settled else _told(_changes(config, saved))
    moved = (
        f"{goes_on} optimizer Megatron cannot load with others of these: {places}; set them back, or begin anew in "
        "another folder, from its weights if policy.model_name is what qarl convert --format bf16 makes of them"
    )
    left = (
        f"{goes_on} schedule Megatron lets no run leave: {schedule}; set these back, ++{_NEW}=true to go on with the "
        "new ones, or another folder to begin anew"
    )
    return [moved] * bool(places) + [left] * bool(schedule)


def _told(values: Iterable[tuple[str, Any, Any]]) -> str:
    # What is absent has a default that this does not know.
    known = (each for each in values if ABSENT not in each)
    return ", ".join(f"{key}={value} ({before} there)" for key, value, before in known if value != before)


def _newest(config: Mapping[str, Any]) -> Path | None:
    folder = look_up(config, _FOLDER, None)
    if not isinstance(folder, str):
        return None
    steps = [path for path in Path(folder).glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return max(steps, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def _changes(config: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    steps, before = look_up(config, _STEPS), look_up(saved, _STEPS)
    ended = look_up(saved, f"{MEGATRON}.train_iters", before)
    if ended == before:
        changed = steps != before
    else:
        # The data ended it, and does again unless there are fewer steps.
        changed = isinstance(steps, int) and steps < ended
    if changed:
        yield _STEPS, steps, before
    # Where the data ended it, and steps do not end it there now.
    lasts = _LASTS if ended != before and not changed and steps != ended else ()
    for key in (*lasts, *_COMPARED):
        yield key, look_up(config, key), look_up(saved, key)
