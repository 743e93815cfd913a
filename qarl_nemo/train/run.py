"""One run from start to end: is anything left to do, lock the folder, train, and end well when interrupted."""

import torch
from rich.console import Console

from qarl_nemo.files import exclusive, make_folder
from qarl_nemo.metrics.events import METRICS_FILE, recorded_steps
from qarl_nemo.train.checkpoint import leftovers, remove_leftovers
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.gpu_pool import own_share
from qarl_nemo.train.preflight import prepare
from qarl_nemo.train.rollout_config import VllmRolloutConfig
from qarl_nemo.train.run_dir import RunStoppedError, RunToldError, holds_run, is_complete, where_it_stands
from qarl_nemo.train.setup import MakeLearner, transformers_learner
from qarl_nemo.train.stop_request import StopRequest
from qarl_nemo.train.trainer import Trainer

LOCK_FILE = ".lock"
# The share of a GPU that CUDA contexts and libraries take and PyTorch's limit does not count.
_BESIDE_TENSORS = 0.05


def train_run(
    config: LocalConfig, make_learner: MakeLearner = transformers_learner, request: StopRequest | None = None
) -> Trainer | None:
    """Run what remains of a run, alone in its folder.

    Args:
        config: the resolved config.
        make_learner: makes the learner; by default from the transformers model of this process.
        request: where other processes may ask for the run's end; None: only SIGTERM to this one does.

    Returns:
        The trainer, or None if the run was complete already.

    Raises:
        ValueError: something in config, data or run folder cannot be used, or another process uses the folder.
        RunStoppedError: it was interrupted from the keyboard; a `RunToldError` if it was told to end, and did so after
            a step.
        RuntimeError: the GPU has too little memory for it.
    """
    if is_complete(config):
        _finish_deleting(config)
        recorded = recorded_steps(config.run_dir / METRICS_FILE)
        _say(config, f"already complete, {recorded} steps in {config.run_dir}")
        return None
    prepared = prepare(config)
    make_folder(config.run_dir, "a run's folder")
    with exclusive(config.run_dir / LOCK_FILE, f"run folder {config.run_dir}"):
        try:
            keep_to_share(prepared.device)
            trainer = Trainer(config, make_learner, prepared)
            with request or StopRequest() as request:
                trainer.train(lambda: request.made)
            if not is_complete(config):
                if request.made:
                    raise RunToldError(where_it_stands(config))
                limit = f"checkpoint_must_save_by={config.checkpointing.checkpoint_must_save_by} is near"
                _say(config, f"{limit}, {where_it_stands(config)}")
        except KeyboardInterrupt:
            raise RunStoppedError(where_it_stands(config)) from None
        except torch.OutOfMemoryError as error:
            problem = ". ".join(str(error).split(". ")[:2])
            raise RuntimeError(f"{problem}. To need less: {'; '.join(_ways_to_need_less(config))}") from error
    return trainer


def _say(config: LocalConfig, text: str) -> None:
    Console(markup=False).print(f"{config.name}: {text}", soft_wrap=True)


def keep_to_share(device: torch.device) -> None:
    """Let PyTorch give back unused memory rather than take a neighbour's, if other runs share this run's GPU."""
    if device.type == "cuda" and own_share() < 1:
        torch.cuda.set_per_process_memory_fraction(own_share() * (1 - _BESIDE_TENSORS), device)


def _finish_deleting(config: LocalConfig) -> None:
    """Delete what the run had not deleted yet when it was killed after its last checkpoint."""
    keep_last = config.checkpointing.keep_last if config.checkpointing.enabled else None
    if leftovers(config.run_dir, keep_last):
        with exclusive(config.run_dir / LOCK_FILE, f"run folder {config.run_dir}"):
            remove_leftovers(config.run_dir, keep_last)


def _ways_to_need_less(config: LocalConfig) -> list[str]:
    """List the settings that lower a run's memory on a GPU, from what costs least to what costs most time.

    A run that goes on takes all of them; one that needs a folder of its own says so.
    """
    policy, rollout, ways = config.policy, config.rollout, []
    packing, ours = policy.sequence_packing, policy.megatron_cfg is None
    if packing.enabled:
        budgets = {"train_mb_tokens": packing.train_mb_tokens, "logprob_mb_tokens": packing.logprob_mb_tokens}
        ways += [f"policy.sequence_packing.{key} below {value}" for key, value in budgets.items()]
    else:
        sizes = {
            "train_micro_batch_size": policy.train_micro_batch_size,
            "logprob_batch_size": policy.logprob_batch_size,
        }
        ways += [f"policy.{key} below {value}" for key, value in sizes.items()]
        ways += ["policy.sequence_packing.enabled=true, which bounds tokens and not responses"] if ours else []
    if isinstance(rollout, VllmRolloutConfig) and not rollout.own_gpu:
        # Responses that wait for room in the cache are drawn from other random numbers.
        begun = " in another run_dir" if holds_run(config.run_dir) else ""
        ways.append(f"rollout.kv_cache_gib below {rollout.kv_cache_gib:g}{begun}")
    if ours and not policy.activation_checkpointing:
        ways.append("policy.activation_checkpointing=true")
    if own_share() < 1:
        ways.append("fewer runs on a GPU (--parallel)")
    return ways
