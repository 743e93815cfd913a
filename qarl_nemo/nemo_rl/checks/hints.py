"""NeMo-RL settings that are legal with a `qarl:` block but make a run slow, or its steps other than expected."""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.memory import GIB
from qarl_nemo.muon import different_settings
from qarl_nemo.nemo_rl.budgets import token_budgets
from qarl_nemo.nemo_rl.checks.data_files import file_hints
from qarl_nemo.nemo_rl.checks.folders import folder_hints
from qarl_nemo.nemo_rl.checks.learning_rate import schedule_hints
from qarl_nemo.nemo_rl.checks.objective import ERROR_LIMIT
from qarl_nemo.nemo_rl.checks.share_hints import share_hints
from qarl_nemo.nemo_rl.checks.validation import validation_hints
from qarl_nemo.nemo_rl.layout import responses_per_step
from qarl_nemo.nemo_rl.layout_memory import Needed, first_host_gib, learner_of, needed_memory
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.optimizer_dtypes import OPTIMIZER
from qarl_nemo.parallelism import divisors
from qarl_nemo.secrets import secret_variables

_PACKING = "policy.sequence_packing"
_ENGINE_TP = "policy.generation.vllm_cfg.tensor_parallel_size"
_ON_POLICY = "loss_fn.force_on_policy_ratio"
_EAGER = "policy.generation.vllm_cfg.enforce_eager"
# Half of what fits is to be half as large again.
_WORTH_SAYING = 3


def find_hints(config: Mapping[str, Any]) -> list[str]:
    """Say which settings cost time, show a secret, need files elsewhere, leave out problems, or change steps.

    Args:
        config: the whole config, as nested dictionaries.

    Returns:
        One line for each such setting: key, value unless it is a secret, what it costs, and what to set.
    """
    hints = [
        f"{key} looks like a secret, and NeMo-RL prints and logs its config: remove it, and export it in the shell "
        "that starts the run, whose environment NeMo-RL hands to every worker"
        for key in secret_variables(config)
    ]
    if look_up(config, f"{_PACKING}.enabled", False) and not look_up(config, f"{_PACKING}.fuse_loss", False):
        hints.append(
            f"{_PACKING}.fuse_loss=false: the loss is called once a response, about 10 ms each; set true, and it is "
            "called once a micro-batch"
        )
    if look_up(config, _EAGER, False):
        hints.append(f"{_EAGER}=true: every kernel of a decoding step is launched from the host; set false")
    hints += _forward_hints(config)
    optimizer = look_up(config, OPTIMIZER, {})
    other = different_settings(optimizer) if "muon" in str(optimizer.get("optimizer")) else {}
    if other:
        settings = ", ".join(f"{key}={str(value).lower()}" for key, value in other.items())
        hints.append(
            f"{OPTIMIZER}.optimizer={optimizer['optimizer']}: not the Muon of the recipes and of the other learners, "
            "whose steps are as long as AdamW's (Megatron's defaults step five times as far); for that one set "
            f"{settings}"
        )
    hints += [*schedule_hints(config), *file_hints(config.get("data") or {}), *folder_hints(config)]
    return [*hints, *validation_hints(config)]


def _forward_hints(config: Mapping[str, Any]) -> list[str]:
    # NeMo-RL needs them all the same for a limit on their error, and to penalize rewards.
    needed = look_up(config, ERROR_LIMIT, None) is not None or look_up(config, "loss_fn.use_kl_in_reward", False)
    batch = look_up(config, "policy.train_global_batch_size", None)
    if look_up(config, _ON_POLICY, False) or needed or not batch or batch != responses_per_step(config):
        return []
    return [
        f"{_ON_POLICY}=false: a step is one update, whose ratios are 1, and prev_logprobs cost a forward of all its "
        "tokens; set true: mismatch weights and train/qarl metrics then take the update's own log-probabilities, of "
        "the same weights, while NeMo-RL's errors of sequences and the prev_logprobs that it dumps are 0"
    ]


def budget_hints(config: Mapping[str, Any], qarl: Any) -> list[str]:
    """Say which budgets of GPU memory could be much larger, and whether a host's memory is too small.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without conflicts, as it was before `apply_qarl`.
        qarl: its checked `NemoQarlConfig`, `resident` resolved.

    Returns:
        One line each: key, value, what it costs, and what to set.
    """
    chunks = look_up(config, "policy.logprob_chunk_size", None) or not learner_of(config, qarl).logits
    more = "" if chunks else "; more with policy.logprob_chunk_size=1024 and policy.megatron_cfg.defer_fp32_logits=true"
    hints = []
    for budget in token_budgets(config, qarl, optimizer_stays=qarl.resident):
        proposed = min(budget.most, budget.plenty)
        if not budget.key.endswith("_tokens"):
            # Of responses only whole batches.
            proposed = max((size for size in divisors(budget.useful) if size <= proposed), default=0)
        if proposed >= _WORTH_SAYING * budget.value:
            hints.append(
                f"{budget.key}={budget.value}: small micro-batches spend their time launching kernels; {proposed} fit "
                f"by computation{more}. Take half of it first, and look at train/qarl/memory in the run's metrics"
            )
    needed = needed_memory(config, qarl, optimizer_stays=qarl.resident)
    return hints if needed is None else hints + share_hints(needed, config, qarl) + _host_hints(needed, qarl)


def _host_hints(needed: Needed, qarl: Any) -> list[str]:
    # A hint and no conflict: part of the sum is a constant that errs high on hosts of many GPUs.
    total, memory = sum(needed.host.values()) / GIB, first_host_gib()
    if memory is None or total <= memory:
        return []
    parts = ", ".join(f"{name} {size / GIB:.0f}" for name, size in needed.host.items() if size)
    stay = "" if qarl.resident else "qarl.resident=true where the GPU has room, "
    return [
        f"host memory: {total:.0f} GiB are computed for each node ({parts}), and this machine has {memory:.0f}: the "
        f"system may kill a worker; set {stay}a larger {_ENGINE_TP}, or fewer bits"
    ]
