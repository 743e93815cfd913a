"""Checks what NeMo-RL makes of rewards and advantages, where it would fail at its first rollouts, or never say so."""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.nemo_rl.checks.lines import problem_line
from qarl_nemo.nemo_rl.lookup import is_number, look_up

_LOW, _HIGH = "grpo.advantage_clip_low", "grpo.advantage_clip_high"
_SCALING, _SHAPING = "grpo.reward_scaling", "grpo.reward_shaping"
_COEFFICIENT = f"{_SHAPING}.stop_properly_penalty_coef"
# NeMo-RL's default of `source_min` and `source_max`.
_USUAL_SOURCE = (0.0, 1.0)


def reward_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say which bounds leave every reward or advantage one value, and what shaping rewards lacks.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        One line each: key, value, why, and what to set.

    Source: NeMo-RL 7ea279ab, `_clip_grpo_advantages` and `scale_rewards` in `algorithms/grpo.py`, and
        `algorithms/reward_functions.py`.
    """
    problems = []
    low, high = (look_up(config, key, None) for key in (_LOW, _HIGH))
    if is_number(low) and is_number(high) and low >= high:
        why = f"{_HIGH}={high} is not more, so that every advantage would be {high}"
        problems.append(problem_line(_LOW, low, why, f"less than {high}, or null"))
    if look_up(config, f"{_SCALING}.enabled", False):
        least, most = (
            look_up(config, f"{_SCALING}.source_{end}", usual)
            for end, usual in zip(("min", "max"), _USUAL_SOURCE, strict=True)
        )
        if not (is_number(least) and is_number(most) and least < most):
            why = f"{_SCALING}.source_max={most} is not more, and NeMo-RL divides by their difference"
            problems.append(problem_line(f"{_SCALING}.source_min", least, why, f"less than {most}"))
    return problems + (_shaping_problems(config) if look_up(config, f"{_SHAPING}.enabled", False) else [])


def _shaping_problems(config: Mapping[str, Any]) -> list[str]:
    share = look_up(config, _COEFFICIENT, None)
    if share is not None:
        if is_number(share) and 0 <= share <= 1:
            return []
        return [
            problem_line(_COEFFICIENT, share, "the part of a cut off answer's reward that stays", "0 to 1, or null")
        ]
    # The buffer divides.
    least = {"overlong_buffer_length": 1, "overlong_buffer_penalty": 0, "max_response_length": 1}
    return [
        problem_line(
            f"{_SHAPING}.{name}",
            value,
            f"{_SHAPING}.enabled=true needs it where stop_properly_penalty_coef=null",
            f"{bound} or more",
        )
        for name, bound in least.items()
        if not (is_number(value := look_up(config, f"{_SHAPING}.{name}", None)) and value >= bound)
    ]
