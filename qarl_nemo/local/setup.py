"""From a config to what a run works with: the model at its starting point, the learner, the rollout engine."""

import json
import time
from dataclasses import asdict

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qarl_kernels import QuantFormat, get_format
from qarl_nemo.layers.install import InstallReport, install
from qarl_nemo.local.checkpoint import checkpoint_dir, load_optimizer, read_state
from qarl_nemo.local.config import LocalConfig, VllmRolloutConfig
from qarl_nemo.local.engine_attention import use_attention
from qarl_nemo.local.learner import Learner
from qarl_nemo.local.model import load_checkpoint, load_model, read_config, stop_token_ids
from qarl_nemo.local.optimizer import MasterOptimizer
from qarl_nemo.local.progress import LiveProgress
from qarl_nemo.local.sampler import PackedSampler
from qarl_nemo.local.tasks import TaskSource
from qarl_nemo.local.verify import reward
from qarl_nemo.local.vllm.host import vllm_problem
from qarl_nemo.local.vllm.limits import config_problems, gpu_problems
from qarl_nemo.local.vllm.rollout import VllmRollout
from qarl_nemo.local.warm_start import greedy_answers, warm_start
from qarl_nemo.losses.build import build_loss


def resolve_device(name: str) -> torch.device:
    """Return the device a config names.

    Args:
        name: `cpu`, `cuda`, or `auto` for a GPU when there is one.

    Returns:
        The device.

    Raises:
        ValueError: `cuda` without a usable GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no CUDA device here; use device=cpu or device=auto")
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else name.replace("auto", "cpu"))


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
    quantized = config.qarl.format != "bf16"
    problems = [vllm_problem(device.type, quantized=quantized), *config_problems(config, device.type)]
    if device.type == "cuda":
        problems += gpu_problems(config.qarl, read_config(config.policy), torch.cuda.get_device_capability(device))
    found = [problem for problem in problems if problem]
    if found:
        raise ValueError(f"rollout.engine=vllm does not run here: {'; '.join(found)}")


def starting_model(
    config: LocalConfig, source: TaskSource, device: torch.device, step: int | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, float]:
    """Load the model of a checkpoint, or a new one and warm it up.

    Args:
        config: the resolved config.
        source: the warm start's tasks.
        device: where the model goes.
        step: which checkpoint of the run, or None for a new run.

    Returns:
        The model, its tokenizer, and the training seconds that lie behind it.
    """
    if step is not None:
        dtype = getattr(torch, config.policy.precision)
        model, tokenizer = load_checkpoint(checkpoint_dir(config.run_dir, step) / "model", dtype)
        return model.to(device), tokenizer, read_state(config.run_dir, step)["elapsed_s"]
    model, tokenizer = load_model(config.policy, device, config.seed)
    started = time.perf_counter()
    if config.policy.warm_start.steps:
        _warm_start(config, source, model, tokenizer)
    return model, tokenizer, time.perf_counter() - started


def _warm_start(
    config: LocalConfig, source: TaskSource, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    tasks = source.validation(config.grpo.val_num_prompts)

    def greedy_reward() -> float:
        answers = greedy_answers(model, tokenizer, tasks, config.rollout.max_new_tokens)
        return sum(reward(text, task.answer) for text, task in zip(answers, tasks, strict=True)) / len(tasks)

    with LiveProgress("warm start", config.policy.warm_start.steps) as progress:

        def show(step: int, loss: float) -> None:
            progress.update(step, loss=loss)

        warm_start(model, tokenizer, source, config.policy.warm_start, show, greedy_reward)


def build_learner(
    config: LocalConfig, model: PreTrainedModel, fmt: QuantFormat, device: torch.device, step: int | None
) -> Learner:
    """Install aligned layers, write the table of what was quantized, and restore optimizer and weight version.

    Args:
        config: the resolved config.
        model: changed in place.
        fmt: the rollout format; the learner executes it when `alignment` is `aligned`, else bf16.
        device: where the optimizer's state goes.
        step: which checkpoint of the run, or None for a new run.

    Returns:
        The learner.
    """
    qarl, policy = config.qarl, config.policy
    executed = fmt if qarl.alignment == "aligned" else get_format("bf16")
    report = install(model, qarl.targets, executed, mode=qarl.backward, keep_operand=qarl.keep_operand)
    use_attention(model, policy.attention)
    rows = [asdict(row) for row in report.rows]
    (config.run_dir / "quantized.json").write_text(json.dumps(rows, indent=1))
    optimizer = MasterOptimizer(model.named_parameters(), policy.optimizer, policy.max_grad_norm)
    if step is not None:
        load_optimizer(config.run_dir, step, optimizer, device)
        report.version.value = int(read_state(config.run_dir, step)["weight_version"])
    return Learner(
        model,
        report,
        optimizer,
        build_loss(config.loss_fn),
        temperature=config.rollout.temperature,
        replay_routes=qarl.router_replay,
        micro_batch_size=policy.train_micro_batch_size,
        logprob_batch_size=policy.logprob_batch_size,
    )


def build_sampler(
    config: LocalConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    report: InstallReport,
    fmt: QuantFormat,
    device: torch.device,
) -> PackedSampler | VllmRollout:
    """Make the rollout engine; it serves nothing before its first refit.

    Args:
        config: the resolved config.
        model: the learner's, for its config, dtype and, with vLLM, first weights.
        tokenizer: for stop and pad tokens.
        report: which layers are packed.
        fmt: the rollout format.
        device: where it lives.

    Returns:
        The engine.

    Raises:
        ValueError: vLLM does not serve this model as configured; the reasons are listed.
    """
    rollout, stop_ids, pad_id = config.rollout, stop_token_ids(model, tokenizer), tokenizer.pad_token_id
    if isinstance(rollout, VllmRolloutConfig):
        capture = config.qarl.router_replay
        return VllmRollout(model, report, fmt, rollout, stop_ids=stop_ids, pad_id=pad_id, capture_routes=capture)
    return PackedSampler(
        model.config,
        fmt,
        report.targets,
        dtype=model.dtype,
        device=device,
        stop_ids=stop_ids,
        pad_id=pad_id,
        keep_operand=rollout.keep_operand,
    )
