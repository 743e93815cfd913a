"""The embedded engine's loop with a Megatron learner, whose ranks start together, follow the first and end together."""

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qarl_formats import Kernel, OnDevice, OtherStorage, QuantFormat, VllmKernels
from qarl_nemo.config import literal, load_config
from qarl_nemo.failures import run_reported
from qarl_nemo.files import make_folder, require_free
from qarl_nemo.layers.norm_noise import NormNoise
from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.megatron.checks import require_supported
from qarl_nemo.megatron.gpt_model import gpt_model
from qarl_nemo.megatron.hf_load import load_parameters
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.learner import Learner
from qarl_nemo.train.megatron.checks import require_machine, require_model
from qarl_nemo.train.megatron.optimizer import MegatronStepper, optimizer_settings
from qarl_nemo.train.megatron.policy import MegatronPolicy
from qarl_nemo.train.megatron.ranks import (
    Leader,
    broadcast_each,
    end_ranks,
    end_with_launcher,
    follow,
    launch_ranks,
    start_ranks,
    stop_request,
)
from qarl_nemo.train.model import read_config
from qarl_nemo.train.rollouts import Rollouts
from qarl_nemo.train.run import LOCK_FILE, train_run
from qarl_nemo.train.run_dir import RunToldError, is_complete, require_same_run, where_it_stands
from qarl_nemo.train.setup import build_learner, learner_device, resolve_device

# The types of a learner's arguments, besides tensors and paths.
_ARGUMENTS = (Rollouts, NormNoise, QuantFormat, OtherStorage, VllmKernels, Kernel, OnDevice)
_PARALLEL_SIZES = {"tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"}


def train_with_megatron(config: LocalConfig) -> None:
    """Run `policy.megatron_cfg`'s ranks, one for each GPU: the first runs the loop, the others follow it.

    Raises:
        ValueError: there is no GPU, the ranks cannot hold or share the model, or the folder holds another run or is in
            use.
        RunStoppedError: it was interrupted, or told to end, as `train_run` says it.
        RuntimeError: a rank failed; its own error was printed.
    """
    require_machine(config.policy, resolve_device(config.device))
    require_model(config.policy, read_config(config.policy))
    ranks = config.policy.megatron_cfg.num_gpus
    if ranks == 1:
        train_this_rank(config)
        return
    # Said once, and not by every rank and by the program that starts them.
    require_same_run(config)
    require_free(config.run_dir / LOCK_FILE, f"run folder {config.run_dir}")
    make_folder(config.run_dir, "a run's folder")
    settings = literal(config.model_dump(mode="json"))
    code = launch_ranks(ranks, ["-m", "qarl_nemo.train.megatron.launch"], settings)
    if code == RunToldError.exit_code:
        # Told in its last step it has nothing left to do.
        if is_complete(config):
            return
        raise RunToldError(where_it_stands(config))
    if code:
        raise RuntimeError(f"the Megatron learner's ranks ended with code {code}; what went wrong stands above")


def train_this_rank(config: LocalConfig) -> None:
    """Run the loop on the first rank, and the commands that it sends on the others."""
    end_with_launcher()
    # Fail on a missing package before anything is trained.
    optimizer_settings(config.policy.optimizer)
    rank = int(os.environ.get("RANK", "0"))
    device = learner_device(config, rank)
    layout = config.policy.megatron_cfg.model_dump(include=_PARALLEL_SIZES)
    group = start_ranks(device, **layout)
    if rank == 0:
        _lead(config, device, group)
    elif not is_complete(config):
        with stop_request():
            follow(megatron_learner(config, None, device), group, device, [*_ARGUMENTS, type(config.run_dir)])
    end_ranks()


def _lead(config: LocalConfig, device: torch.device, group: Any) -> None:
    leader: Leader | None = None

    def make_leader(config: LocalConfig, model: Any) -> Leader:
        nonlocal leader
        leader = Leader(megatron_learner(config, model, device), group)
        return leader

    try:
        train_run(config, make_leader, stop_request())
    except RunToldError:
        # The others wait for the next command, as at a run's end. Whoever launched several ranks says that they ended.
        if group.size() == 1:
            raise
    if leader is not None:
        leader.dismiss()


def megatron_learner(config: LocalConfig, model: Any, device: torch.device) -> Learner:
    """Build this rank's part of the model and give it the first rank's weights.

    Args:
        config: the resolved config.
        model: the starting model on the first rank, moved to the CPU; None elsewhere.
        device: this rank's device.

    Raises:
        ValueError: settings or sizes that Megatron does not support; all are listed.
    """
    qarl, settings = config.qarl, config.policy
    # Engine rounding, as in the transformers learner.
    alignment = Alignment(qarl.executed_format, qarl.targets, qarl.backward, qarl.keep_operand, engine_rounding=True)
    served = replace(alignment, format=qarl.served_format)
    hf = read_config(settings) if model is None else model.config
    core = gpt_model(
        hf,
        alignment,
        getattr(torch, settings.precision),
        transformer_engine=device.type == "cuda",
        moe_token_dispatcher_type=settings.megatron_cfg.moe_token_dispatcher_type,
    )
    # The published format need not be the executed one; its shards must be storable, too.
    require_supported(core.config, served)
    load_parameters(core, broadcast_each(None if model is None else list(model.named_parameters()), device))
    optimizer = MegatronStepper(
        core,
        settings.optimizer,
        settings.max_grad_norm,
        qarl.targets,
        distributed=settings.megatron_cfg.use_distributed_optimizer,
    )
    whole = None if model is None else model.to("cpu")

    def save_model(parameters: dict[str, Tensor], folder: Path) -> None:
        with torch.no_grad():
            # By parameters, of which a tied head is none.
            for name, parameter in whole.named_parameters():
                parameter.copy_(parameters[name])
        whole.save_pretrained(folder)

    policy = MegatronPolicy(
        core,
        alignment,
        optimizer,
        vocab_size=hf.vocab_size,
        save_model=save_model,
        logprob_chunk_size=config.policy.logprob_chunk_size,
    )
    return build_learner(config, policy)


if __name__ == "__main__":
    settings = load_config(Path(sys.argv[1]), [], LocalConfig)
    raise SystemExit(run_reported(partial(train_this_rank, settings), f"qarl, rank {os.environ.get('RANK', '0')}"))
