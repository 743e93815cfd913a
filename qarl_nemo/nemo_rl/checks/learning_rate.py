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
# Megatron compares these when it first needs them: a rate's after its warm-up, so that steps would be lost.
_STYLES = {
    f"{SCHEDULER}.lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    _GROWTH: ("constant", "linear", "cosine"),
}


def schedule_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say which rates and decays do not go together, and which styles there are none of.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        One line each: key, value, why, and what to set.

    Source: Megatron-core 0.20, `optimizer_param_scheduler.py`.
    """
    rate, decay = look_up(config, _RATE), look_up(config, _BEGIN)
    problems = []
    for key in (_LEAST, _FIRST):
        value = look_up(config, key)
        if key == _LEAST and value is not ABSENT and not (is_number(value) and value >= 0):
            problems.append(problem_line(key, value, "Megatron's schedules need a rate", "0 or more"))
        elif is_number(value) and is_number(rate) and value > rate:
            why = f"more than {_RATE}={rate}, the largest rate, which Megatron refuses once workers have started"
            problems.append(problem_line(key, value, why, f"at most {rate}"))
    end, growth = look_up(config, _END), look_up(config, _GROWTH)
    if is_number(decay) and is_number(end):
        if growth == "constant" and end != decay:
            why = f"{_GROWTH}=constant, and {_BEGIN}={yaml_text(decay)}"
            problems.append(problem_line(_END, end, why, f"{yaml_text(decay)}, or {_GROWTH}=linear"))
        elif end < decay:
            why = f"Megatron's weight decay only grows, and {_BEGIN}={yaml_text(decay)}"
            problems.append(problem_line(_END, end, why, f"at least {yaml_text(decay)}"))
    return problems + [
        f"{key}={yaml_text(value)}: Megatron has no such style; {hint(str(value), legal)}"
        for key, legal in _STYLES.items()
        if (value := look_up(config, key)) is not ABSENT and value not in legal
    ]
