"""Checks the learning rate's schedule, of which Megatron asserts what fits together once workers have started."""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.config.problems import hint
from qarl_nemo.nemo_rl.checks.lines import problem_line, yaml_text
from qarl_nemo.nemo_rl.layout import MEGATRON
from qarl_nemo.nemo_rl.lookup import ABSENT, is_number, look_up
from qarl_nemo.nemo_rl.optimizer_dtypes import OPTIMIZER

SCHEDULER = f"{MEGATRON}.scheduler"
_RATE, _LEAST, _FIRST = f"{OPTIMIZER}.lr", f"{OPTIMIZER}.min_lr", f"{SCHEDULER}.lr_warmup_init"
_BEGIN, _END = (f"{SCHEDULER}.{end}_weight_decay" for end in ("start", "end"))
_GROWTH = f"{SCHEDULER}.weight_decay_incr_style"
_WARM, _FRACTION = f"{SCHEDULER}.lr_warmup_iters", f"{SCHEDULER}.lr_warmup_fraction"
_ANNEAL, _STEPS = f"{SCHEDULER}.lr_wsd_decay_iters", "grpo.max_num_steps"
# How long a schedule is; where Megatron-Bridge is given the first, the second is not read.
_WHOLE, _DECAY = f"{SCHEDULER}.max_steps", f"{SCHEDULER}.lr_decay_iters"
# Which of two schedules a run goes on with, its own or that of its checkpoint.
_NEW, _SAVED = (f"{SCHEDULER}.{name}_opt_param_scheduler" for name in ("override", "use_checkpoint"))
# Megatron compares these when it first needs them: a rate's after its warm-up, so that steps would be lost.
_STYLES = {
    f"{SCHEDULER}.lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    _GROWTH: ("constant", "linear", "cosine"),
}


def schedule_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say which rates, decays and lengths do not go together, and which styles there are none of.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        One line each: key, value, why, and what to set.

    Source: Megatron-core 0.20, `optimizer_param_scheduler.py`; Megatron-Bridge 8c46dc42, `SchedulerConfig.finalize` and
        `_calculate_scheduler_steps` in `training/config.py`.
    """
    problems, rate = [], look_up(config, _RATE)
    for key in (_LEAST, _FIRST):
        value = look_up(config, key)
        if key == _LEAST and value is not ABSENT and not (is_number(value) and value >= 0):
            problems.append(problem_line(key, value, "Megatron's schedules need a rate", "0 or more"))
        elif is_number(value) and is_number(rate) and value > rate:
            why = f"more than {_RATE}={rate}, the largest rate, which Megatron refuses once workers have started"
            problems.append(problem_line(key, value, why, f"at most {rate}"))
    problems += _decay_problems(config) + _length_problems(config)
    return problems + [
        f"{key}={yaml_text(value)}: Megatron has no such style; {hint(str(value), legal)}"
        for key, legal in _STYLES.items()
        if (value := look_up(config, key)) is not ABSENT and value not in legal
    ]


def schedule_hints(config: Mapping[str, Any]) -> list[str]:
    """Say where a run is too short for its warm-up, which Megatron-Bridge shortens with a worker's warning alone.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        No line, or one.
    """
    warm, steps = look_up(config, _WARM), look_up(config, _STEPS)
    if _length(config)[1] is not None or not (is_number(warm) and is_number(steps)) or not 0 < steps <= warm:
        return []
    return [
        f"{_WARM}={warm}: the run ends at {_STEPS}={steps}, and so does its warm-up then, which is steeper than this "
        f"says; set less than {steps}, or {_DECAY} to more than {warm}"
    ]


def _length(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the key that says how many steps a schedule has, and its value; null is as many as the run's."""
    whole = look_up(config, _WHOLE, None)
    return (_DECAY, look_up(config, _DECAY, None)) if whole is None else (_WHOLE, whole)


def _decay_problems(config: Mapping[str, Any]) -> list[str]:
    begin, end, growth = (look_up(config, key) for key in (_BEGIN, _END, _GROWTH))
    if not (is_number(begin) and is_number(end)):
        return []
    if begin < 0:
        return [problem_line(_BEGIN, begin, "weights would grow", "0 or more")]
    if growth == "constant" and end != begin:
        why = f"{_GROWTH}=constant, and {_BEGIN}={yaml_text(begin)}"
        return [problem_line(_END, end, why, f"{yaml_text(begin)}, or {_GROWTH}=linear")]
    if end < begin:
        why = f"Megatron's weight decay only grows, and {_BEGIN}={yaml_text(begin)}"
        return [problem_line(_END, end, why, f"at least {yaml_text(begin)}")]
    return []


def _length_problems(config: Mapping[str, Any]) -> list[str]:
    problems, (key, steps) = [], _length(config)
    warm, fraction, anneal = look_up(config, _WARM, 0), look_up(config, _FRACTION, None), look_up(config, _ANNEAL, None)
    if is_number(steps) and steps <= 0:
        problems.append(problem_line(key, steps, "a number of steps", "1 or more, or null for the run's"))
    elif is_number(steps):
        if is_number(warm) and warm >= steps:
            why = f"no less than {key}={steps}, so that Megatron-Bridge would shorten it with a warning alone"
            problems.append(problem_line(_WARM, warm, why, f"less than {steps}"))
        if look_up(config, f"{SCHEDULER}.lr_decay_style") == "WSD" and is_number(anneal) and anneal > steps:
            why = f"more than {key}={steps}, so that annealing would begin before the run"
            problems.append(problem_line(_ANNEAL, anneal, why, f"at most {steps}"))
    if fraction is not None and warm != 0:
        why = f"{_WARM}={yaml_text(warm)} says it otherwise"
        problems.append(problem_line(_FRACTION, fraction, why, f"null, or {_WARM}=0"))
    if look_up(config, _NEW, False) and look_up(config, _SAVED, False):
        problems.append(problem_line(_NEW, True, f"{_SAVED}=true takes the other schedule", "one of them false"))
    return problems
