"""Builds what a run works with from its config: the model at its starting point, the learner, the rollout engine."""

import shutil
import time
from collections.abc import Callable
from functools import partial as bound
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qarl_formats import BASELINE
from qarl_nemo.layers.frozen import FrozenBase
from qarl_nemo.layers.ties import tie_warning
from qarl_nemo.losses.build import build_loss
from qarl_nemo.train.aligned_model import align_model, has_frozen_base, lora_settings
from qarl_nemo.train.checkpoint import checkpoint_dir, named_disk_errors, read_state, share_weights
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.learner import Learner
from qarl_nemo.train.model import load_checkpoint, load_model, read_config, stop_token_ids
from qarl_nemo.train.optimizer import MasterOptimizer
from qarl_nemo.train.policy import Policy, TransformersPolicy
from qarl_nemo.train.progress import LiveProgress, working
from qarl_nemo.train.prompts import PromptEncoder
from qarl_nemo.train.rollout_config import VllmRolloutConfig
from qarl_nemo.train.sampler import PackedSampler
from qarl_nemo.train.tasks import Task, TaskSource
from qarl_nemo.train.vllm.host import vllm_problem
from qarl_nemo.train.vllm.limits import config_problems
from qarl_nemo.train.vllm.rollout import VllmRollout
from qarl_nemo.train.vllm.shapes import gpu_problems
from qarl_nemo.train.warm_start import greedy_answers, warm_start

# Where a run keeps a random model that adapters are trained on.
BASE_FOLDER = "base"
# Makes the learner of a run from its config and its starting model.
MakeLearner = Callable[[LocalConfig, PreTrainedModel], Learner]


def resolve_device(name: str) -> torch.device:
    """Return the device a config names.

    Args:
        name: `cpu`, `cuda`, or `auto` for a GPU if there is one.

    Raises:
        ValueError: it is none of these, or `cuda` without a usable GPU.
    """
    if name not in (legal := ("cpu", "cuda", "auto")):
        raise ValueError(f"device={name}; legal: {', '.join(legal)}. CUDA_VISIBLE_DEVICES chooses among several GPUs")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no CUDA device here; use device=cpu or device=auto")
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else name.replace("auto", "cpu"))


def learner_device(config: LocalConfig, rank: int = 0) -> torch.device:
    """Return the device of a learner's rank and make it the current one; GPUs after the engine's if it has its own.

    Args:
        config: the resolved config.
        rank: the learner's rank on this host.

    Raises:
        ValueError: there is no such GPU.
    """
    device, index = resolve_device(config.device), rank + getattr(config.rollout, "own_gpu", False)
    if device.type == "cpu":
        return device
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"the learner's rank {rank} takes GPU {index}, torch sees {torch.cuda.device_count()}: with "
            "rollout.own_gpu=true the engine takes GPU 0 and the learner those behind it"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def require_engine(config: LocalConfig, device: torch.device) -> None:
    """Refuse a rollout engine that cannot run here, before anything is trained for it.

    Args:
        config: the resolved config.
        device: the run's.

    Raises:
        ValueError: vLLM is missing, of another version, on a machine that does not serve the format, or does not take
            the config or the model's sizes; all that speaks against it is listed.
    """
    if not isinstance(config.rollout, VllmRolloutConfig):
        return
    quantized = config.qarl.format != BASELINE
    problems = [vllm_problem(device.type, quantized=quantized), *config_problems(config, device.type)]
    if device.type == "cuda":
        problems += _size_problems(config, torch.cuda.get_device_capability(device))
    found = [problem for problem in problems if problem]
    if found:
        raise ValueError(f"rollout.engine=vllm does not run here: {'; '.join(found)}")


def _size_problems(config: LocalConfig, capability: tuple[int, int]) -> list[str]:
    try:
        fmt = config.qarl.served_format
    except ValueError as error:
        return [str(error)]
    return gpu_problems(fmt, config.qarl.targets, read_config(config.policy), capability)


def starting_model(
    config: LocalConfig, source: TaskSource, encode: PromptEncoder, device: torch.device, step: int | None
) -> tuple[PreTrainedModel, float]:
    """Load the model of a checkpoint, or a new one and warm it up; of a frozen base, always the base.

    Args:
        config: the resolved config.
        source: the warm start's tasks.
        encode: makes prompts of them.
        device: where the model goes.
        step: which checkpoint of the run, or None for a new run.

    Returns:
        The model, and the seconds it has been trained for.
    """
    frozen = has_frozen_base(config.policy)
    stored = None
    if step is not None and not frozen:
        stored = checkpoint_dir(config.run_dir, step) / "model"
    elif step is not None and config.policy.model_init:
        stored = config.run_dir / BASE_FOLDER
    with working("loading the checkpoint" if stored else "loading the model"):
        if stored:
            model, _ = load_checkpoint(stored, getattr(torch, config.policy.precision))
            torch.nn.Module.to(model, device)
            for parameter in model.parameters():
                # Aligned as a new run's memory is and a file's is not, so that a CPU's GEMMs round alike.
                parameter.data = parameter.data.clone()
        else:
            model, _ = load_model(config.policy, device, config.seed)
    if step is not None:
        return model, read_state(config.run_dir, step)["elapsed_s"]
    started = time.perf_counter()
    if config.policy.warm_start.steps:
        _warm_start(config, source, encode, model)
    elapsed_s = time.perf_counter() - started
    if frozen and config.policy.model_init:
        _keep_base(model, encode.tokenizer, config.run_dir / BASE_FOLDER)
    return model, elapsed_s


def _keep_base(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the base of a run whose checkpoints do not hold it and that no file gave it."""
    partial = folder.with_suffix(".partial")
    for old in (partial, folder):
        shutil.rmtree(old, ignore_errors=True)
    drop = bound(shutil.rmtree, partial, ignore_errors=True)
    with named_disk_errors(f"{folder}: the base of the adapters", "starts again", drop):
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        share_weights(partial, partial / "config.json")
        partial.rename(folder)


def _warm_start(config: LocalConfig, source: TaskSource, encode: PromptEncoder, model: PreTrainedModel) -> None:
    tasks = source.validation(config.grpo.val_num_prompts)

    def greedy_reward() -> float:
        answers = greedy_answers(model, encode, tasks, config.rollout.max_new_tokens)
        return sum(map(Task.reward, tasks, answers)) / len(tasks)

    with LiveProgress("warm start", config.policy.warm_start.steps) as progress:

        def show(step: int, loss: float) -> None:
            progress.update(step, loss=loss)

        warm_start(model, encode, source, config.policy.warm_start, show, greedy_reward)
    progress.ended(f"its greedy answers reach target_reward={config.policy.warm_start.target_reward}")


def transformers_learner(config: LocalConfig, model: PreTrainedModel) -> Learner:
    """Install aligned layers into the model, give it an optimizer, and combine it with the run's objective.

    Args:
        config: the resolved config.
        model: the model, on the device where it is trained, or an empty one that its checkpoint then fills; changed in
            place.
    """
    settings = config.policy
    with working("aligning the layers"):
        report = align_model(config, model, learner_device(config))
    begins = (1, *(stage.from_step for stage in config.qarl.schedule or ()))
    if warning := tie_warning(report.weights.values(), {config.qarl.served_at(step) for step in begins}):
        Console().print(f"qarl: {warning}", soft_wrap=True, markup=False)
    trained = model.named_parameters()
    optimizer = MasterOptimizer(trained, settings.optimizer, settings.max_grad_norm, config.qarl.targets)
    policy = TransformersPolicy(
        model,
        report,
        optimizer,
        attention=settings.attention,
        activation_checkpointing=settings.activation_checkpointing,
        logprob_chunk_size=settings.logprob_chunk_size,
        lora=lora_settings(settings.lora),
        base=str(_base(config)),
    )
    return build_learner(config, policy)


def build_learner(config: LocalConfig, policy: Policy) -> Learner:
    """Combine a policy and the run's objective."""
    return Learner(
        policy,
        build_loss(config.loss_fn),
        temperature=config.rollout.temperature,
        replay_routes=config.qarl.router_replay,
        micro_batch_size=config.policy.train_micro_batch_size,
        logprob_batch_size=config.policy.logprob_batch_size,
        packing=config.policy.sequence_packing,
        replay_noise=config.rollout.noise is not None and config.rollout.noise.mode == "replayed",
    )


def build_sampler(
    config: LocalConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> PackedSampler | VllmRollout:
    """Make the rollout engine; it serves nothing before its first refit.

    Args:
        config: the resolved config.
        model: the learner's model, for its config, dtype and, with vLLM, first weights.
        tokenizer: for stop and pad tokens.
        device: the learner's device, and the engine's unless it has its own.

    Raises:
        ValueError: vLLM does not serve this model as configured; the reasons are listed.
    """
    rollout, fmt, targets = config.rollout, config.qarl.served_format, config.qarl.targets
    stop_ids, pad_id = stop_token_ids(model, tokenizer), tokenizer.pad_token_id
    lora = lora_settings(config.policy.lora)
    if isinstance(rollout, VllmRolloutConfig):
        with working("starting vLLM"):
            return VllmRollout(
                model,
                fmt,
                targets,
                rollout,
                device=device,
                stop_ids=stop_ids,
                pad_id=pad_id,
                capture_routes=config.qarl.router_replay,
                base=_base(config) if lora else None,
                lora=lora,
            )
    return PackedSampler(
        model.config,
        fmt,
        targets,
        dtype=model.dtype,
        device=device,
        stop_ids=stop_ids,
        pad_id=pad_id,
        keep_operand=rollout.keep_operand,
        frozen=FrozenBase.of(model),
        lora=lora,
    )


def _base(config: LocalConfig) -> Path:
    return config.policy.model_path or config.run_dir / BASE_FOLDER
