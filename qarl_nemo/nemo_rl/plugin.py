"""The calls with which a launcher runs NeMo-RL with this package, in the order in which it makes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qarl_nemo.config import ConfigError
from qarl_nemo.config.problems import attempt
from qarl_nemo.nemo_rl.checks.data import overlong_prompts
from qarl_nemo.nemo_rl.data_sets import ENVIRONMENT, name_data_sets, use_reward_functions
from qarl_nemo.nemo_rl.prompt_lengths import limit_prompts, require_steps, show_prompt, unasked_prompts

_HERE = "qarl_nemo.nemo_rl"
POLICY_WORKER = f"{_HERE}.policy_worker.QarlMegatronPolicyWorker"
_VLLM = "nemo_rl.models.generation.vllm"
GENERATION_WORKERS = {
    f"{_VLLM}.vllm_worker.VllmGenerationWorker": f"{_HERE}.vllm_worker.QarlGenerationWorker",
    f"{_VLLM}.vllm_worker_async.VllmAsyncGenerationWorker": f"{_HERE}.vllm_worker.QarlAsyncGenerationWorker",
}
_REWARD_ACTOR = f"{_HERE}.reward_environment.RewardFunctionEnvironment"
# Actors that NeMo-RL starts through uv even if told to use the system's Python.
_UV_ALWAYS = (
    "nemo_rl.algorithms.async_utils.AsyncTrajectoryCollector",
    "nemo_rl.algorithms.async_utils.ReplayBuffer",
    "nemo_rl.experience.sync_rollout_actor.SyncRolloutActor",
)
# The value of `policy.generation.quant_cfg`, without which NeMo-RL does not look for another worker class.
SENTINEL = "qarl"


def register() -> None:
    """Register this package's workers and environments with NeMo-RL; calling it again changes nothing.

    Data sets that name the environment are set up after this.

    Raises:
        ImportError: NeMo-RL is not importable.
    """
    from nemo_rl.distributed import ray_actor_environment_registry as registry
    from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
    from nemo_rl.environments.utils import ENV_REGISTRY
    from nemo_rl.models.generation.vllm import utils

    registry.ACTOR_ENVIRONMENT_REGISTRY[POLICY_WORKER] = registry.MCORE_EXECUTABLE
    for own in GENERATION_WORKERS.values():
        registry.ACTOR_ENVIRONMENT_REGISTRY[own] = registry.VLLM_EXECUTABLE
    utils.GENERATION_WORKER_OVERRIDES.update(GENERATION_WORKERS)
    registry.ACTOR_ENVIRONMENT_REGISTRY[_REWARD_ACTOR] = PY_EXECUTABLES.SYSTEM
    ENV_REGISTRY[ENVIRONMENT] = {"actor_class_fqn": _REWARD_ACTOR}
    if registry.USE_SYSTEM_EXECUTABLE:
        registry.ACTOR_ENVIRONMENT_REGISTRY.update(dict.fromkeys(_UV_ALWAYS, PY_EXECUTABLES.SYSTEM))


def setup_data(setup: Callable[..., Any], tokenizer: Any, data: Any, env: Any, grpo: Mapping[str, Any]) -> Any:
    """Call NeMo-RL's `setup_response_data`, with what this package adds to the `data:` block.

    Each data set with a `reward_function` gets an environment that calls it, and each data set of this package gets a
    name of its own. Prompts that are too long are an error, or left out, as `data.overlong_prompts` says. The first
    prompt is printed as the model sees it, and so are the problems that a validation leaves out.

    Args:
        setup: NeMo-RL's function.
        tokenizer: the model's.
        data: the `data:` block.
        env: the `env:` block.
        grpo: the `grpo:` block, which says how many prompts a step takes, and how much of the validation set is asked.

    Returns:
        What NeMo-RL's function returns.

    Raises:
        ConfigError: prompts are too long, of which those of all keys are told; or there are fewer than a step takes.
    """
    from nemo_rl.environments.utils import ENV_REGISTRY

    for name in use_reward_functions(data, env):
        ENV_REGISTRY[name] = {"actor_class_fqn": _REWARD_ACTOR}
    name_data_sets(data)
    parts = setup(tokenizer, data, env)
    several = parts[0] if isinstance(parts[0], dict) else {"": parts[0]}
    datasets = [("train", dataset) for dataset in several.values()]
    datasets += [("validation", parts[1])] if parts[1] is not None else []
    overlong = overlong_prompts({"data": data})
    problems: list[str] = []
    if overlong != "mask":
        told = [attempt(problems, limit_prompts, dataset, key, skip=overlong == "skip") for key, dataset in datasets]
        if problems:
            raise ConfigError("\n  ".join(problems))
        print(f"qarl: data: {'; '.join(filter(None, told))}")
    for dataset in several.values():
        require_steps(dataset, data, grpo)
    unasked = "" if parts[1] is None else unasked_prompts(parts[1], {"grpo": grpo, "env": env})
    print(
        *([f"qarl: data: {unasked}"] if unasked else []), f"qarl: {show_prompt(datasets[0][1])}", sep="\n", flush=True
    )
    return parts


def policy_factory(**arguments: Any) -> Any:
    """Make NeMo-RL's policy with our workers; pass this to `setup(policy_factory=...)`."""
    from qarl_nemo.nemo_rl.policy import QarlPolicy

    return QarlPolicy(**arguments, worker_extension_cls_fqn=POLICY_WORKER)


def install_refit(policy: Any, policy_generation: Any) -> Any:
    """Make NeMo-RL's loop send packed weights; call it after `setup()` and before training.

    Args:
        policy: what `policy_factory` returned.
        policy_generation: NeMo-RL's `VllmGeneration`.

    Returns:
        The synchronizer, which NeMo-RL finds at `policy_generation.weight_synchronizer`.

    Raises:
        TypeError: the engines are not this package's.
    """
    from qarl_nemo.nemo_rl.synchronizer import PackedWeightSynchronizer

    if policy_generation.cfg.get("quant_cfg") != SENTINEL:
        raise TypeError(
            f"policy.generation.quant_cfg={policy_generation.cfg.get('quant_cfg')!r}: NeMo-RL started its own vLLM "
            f"workers, which serve BF16; it has to be {SENTINEL!r} when setup() is called, and register() to come first"
        )
    synchronizer = PackedWeightSynchronizer(policy, policy_generation)
    synchronizer.init_communicator()
    policy_generation.weight_synchronizer = synchronizer
    return synchronizer


def install_loss(policy: Any, loss_fn: Any, qarl: Any, *, log_dir: Path, done: int) -> Any:
    """Make the loss that NeMo-RL's loop has to train with, and let the policy count and record steps.

    Args:
        policy: what `policy_factory` returned.
        loss_fn: the loss that NeMo-RL's `setup` made, whose KL term stays.
        qarl: the checked block, as `apply_qarl` returned it.
        log_dir: NeMo-RL's log folder of this start.
        done: how many steps were trained before this start, see `recording.completed_steps`.

    Returns:
        The loss.
    """
    from qarl_nemo.nemo_rl.loss import QarlLossFn
    from qarl_nemo.nemo_rl.recording import Recorder
    from qarl_nemo.nemo_rl.token_metrics import token_metrics

    policy.recorder = Recorder(log_dir.absolute(), qarl.diagnostics_period, done)
    return QarlLossFn(qarl.objective, loss_fn, token_metrics)
