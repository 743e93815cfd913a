"""Settings of NeMo-RL's loss and advantages that contradict an objective of ours."""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.losses.config import LossConfig
from qarl_nemo.losses.reference_kl import KL_TYPES
from qarl_nemo.nemo_rl.checks.data_sets import chosen_environment
from qarl_nemo.nemo_rl.checks.lines import problem_line, yaml_text
from qarl_nemo.nemo_rl.data_sets import ENVIRONMENT, data_sets
from qarl_nemo.nemo_rl.lookup import is_number, look_up

_ESTIMATOR = "grpo.adv_estimator.name"
# NeMo-RL's default first.
_ESTIMATORS = ("grpo", "gdpo", "reinforce_plus_plus")
_FUNCTION = "reward_function"
# NeMo-RL's environments with one reward a response; one that is registered under another name may have several.
_ONE_REWARD = (ENVIRONMENT, "math", "math_default", "code", "code_jaccard", "reward_model", "vlm")
ERROR_LIMIT = "grpo.seq_logprob_error_threshold"
"""With it NeMo-RL computes log-probabilities before the update, whatever `force_on_policy_ratio` says."""
# NeMo-RL's default of `loss_fn.reference_policy_kl_penalty`.
_USUAL_PENALTY = 0.01
_ALL_HELD = "every token would be clamped, and the KL term have no gradient"
# Settings of NeMo-RL's clipped loss that an objective does not read, and their defaults.
_UNREAD = {
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
}


def objective_conflicts(config: Mapping[str, Any], objective: LossConfig) -> list[str]:
    """Say which settings of NeMo-RL's loss and advantages the objective does not read, or reads as something else.

    Args:
        config: the whole config, as nested dictionaries.
        objective: the block's.

    Returns:
        One line for each setting that has to change.
    """
    loss_fn = config.get("loss_fn") or {}
    problems = [
        problem_line(
            f"loss_fn.{key}", loss_fn[key], "not read by qarl.objective, whose own keys say this", yaml_text(default)
        )
        for key, default in _UNREAD.items()
        if key in loss_fn and loss_fn[key] != default
    ]
    own = set(type(objective).model_fields)
    problems += [
        problem_line(f"loss_fn.{key}", loss_fn[key], "not read there", f"qarl.objective.{key} instead")
        for key in loss_fn
        if key in own
    ]
    if not objective.corrects_mismatch and loss_fn.get("use_importance_sampling_correction"):
        why = f"qarl.objective {objective.objective} has no mismatch weight"
        problems.append(
            problem_line("loss_fn.use_importance_sampling_correction", True, why, "false, or choose another objective")
        )
    problems += _kl_conflicts(config, loss_fn)
    in_reward = loss_fn.get("reference_policy_kl_penalty", _USUAL_PENALTY) != 0
    return problems + _advantage_conflicts(config, loss_fn, objective, in_reward=in_reward)


def _advantage_conflicts(
    config: Mapping[str, Any], loss_fn: Mapping[str, Any], objective: LossConfig, *, in_reward: bool
) -> list[str]:
    name = look_up(config, _ESTIMATOR, _ESTIMATORS[0])
    rewarded = in_reward and bool(loss_fn.get("use_kl_in_reward"))
    if name == "opd":
        # NeMo-RL computes its teachers' log-probabilities for answers of NeMo-Gym's agents alone.
        why = "only NeMo-Gym's environments have teachers, and a launcher of their own, which this is not"
        return [problem_line(_ESTIMATOR, name, why, " or ".join(_ESTIMATORS))]
    if name not in _ESTIMATORS:
        return [problem_line(_ESTIMATOR, name, "NeMo-RL has no such estimator", " or ".join(_ESTIMATORS))]
    problems = []
    if rewarded and loss_fn.get("force_on_policy_ratio") and look_up(config, ERROR_LIMIT, None) is None:
        why = "NeMo-RL has no log-probabilities before the update then, which loss_fn.use_kl_in_reward=true needs"
        problems.append(problem_line("loss_fn.force_on_policy_ratio", True, why, "false"))
    answers = "grpo.num_generations_per_prompt"
    if name == "grpo" and look_up(config, answers, None) == 1:
        why = f"{_ESTIMATOR}=grpo compares a prompt's answers, so that one alone has the advantage 0 and trains nothing"
        problems.append(problem_line(answers, 1, why, f"2 or more, or {_ESTIMATOR}=reinforce_plus_plus"))
    if name == "gdpo":
        problems += _single_reward(config)
    # These differ from token to token, and an objective that weighs whole responses would take their mean.
    if name == "reinforce_plus_plus" and rewarded and objective.averages == "response":
        why = (
            "its advantages with loss_fn.use_kl_in_reward=true differ within a response, of which qarl.objective "
            f"{objective.objective} has one"
        )
        problems.append(problem_line(_ESTIMATOR, name, why, "grpo, or choose an objective that averages over tokens"))
    return problems


def _single_reward(config: Mapping[str, Any]) -> list[str]:
    sets = [
        (dataset, whole)
        for place, dataset, whole in data_sets(config.get("data") or {})
        if place.startswith("data.train")
    ]
    # Where a function rewards, there is one reward, too.
    used = [chosen_environment(dataset, whole) or _FUNCTION for dataset, whole in sets]
    if not used or not set(used) <= {*_ONE_REWARD, _FUNCTION}:
        return []
    why = f"it needs two or more rewards of a response, and {' and '.join(dict.fromkeys(used))} gives data.train one"
    return [problem_line(_ESTIMATOR, "gdpo", why, "grpo, or an env_name of several rewards, such as math_multi_reward")]


def _kl_conflicts(config: Mapping[str, Any], loss_fn: Mapping[str, Any]) -> list[str]:
    skipped, penalty = "grpo.skip_reference_policy_logprobs_calculation", "loss_fn.reference_policy_kl_penalty"
    problems, given = [], loss_fn.get("reference_policy_kl_penalty", _USUAL_PENALTY)
    if not (is_number(given) and given >= 0):
        problems.append(problem_line(penalty, given, "it would reward distance from the reference", "0 or more"))
    elif given and look_up(config, skipped, False):
        problems.append(
            problem_line(skipped, True, f"{penalty}={yaml_text(given)} needs them", f"false, or {penalty}=0")
        )
    kind = loss_fn.get("reference_policy_kl_type", "k3")
    if kind not in KL_TYPES:
        legal = " or ".join(KL_TYPES)
        problems.append(problem_line("loss_fn.reference_policy_kl_type", kind, "NeMo-RL has no such estimate", legal))
    # Where there is no penalty, nothing is clamped.
    return problems + [
        problem_line(f"loss_fn.{key}", bound, _ALL_HELD, "more than 0, or null")
        for key in ("kl_input_clamp_value", "kl_output_clamp_value")
        if given and (bound := loss_fn.get(key)) is not None and not (is_number(bound) and bound > 0)
    ]
