"""The RL loop of the embedded engine: rollout, reward, prev_logprobs, update, refit, and what is written beside it."""

import json
import time
from dataclasses import asdict

import torch
from torch import Tensor

from qarl_kernels import get_format
from qarl_nemo.layers.install import install
from qarl_nemo.local.advantages import group_advantages
from qarl_nemo.local.checkpoint import checkpoint_dir, checkpoint_steps, load_optimizer, read_state, save_checkpoint
from qarl_nemo.local.config import LocalConfig
from qarl_nemo.local.learner import Learner, UpdateResult
from qarl_nemo.local.model import load_checkpoint, load_model, stop_token_ids
from qarl_nemo.local.optimizer import MasterOptimizer
from qarl_nemo.local.progress import LiveProgress
from qarl_nemo.local.rollouts import Rollouts, encode_prompts
from qarl_nemo.local.run_dir import open_run_dir
from qarl_nemo.local.sampler import PackedSampler, SamplingParams
from qarl_nemo.local.step_metrics import diagnostics_examples, step_metrics
from qarl_nemo.local.tasks import Task, TaskSource
from qarl_nemo.local.verify import reward
from qarl_nemo.local.warm_start import greedy_answers, warm_start
from qarl_nemo.losses.build import build_loss
from qarl_nemo.metrics.diagnostics import DiagnosticsCollector
from qarl_nemo.metrics.events import EventWriter
from qarl_nemo.metrics.throughput import PhaseTimer, peak_memory
from qarl_nemo.refit.publish import RefitUpdate, publish


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


class Trainer:
    """One run, from its folder's newest checkpoint or from the start.

    Args:
        config: the resolved config.

    Raises:
        ValueError: anything in config, data or checkpoint that cannot be used.
    """

    def __init__(self, config: LocalConfig) -> None:
        self.config = config
        self.device = resolve_device(config.device)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.format = get_format(
            config.qarl.format, group_size=config.qarl.group_size, scale_convention=config.qarl.scale_convention
        )
        self.source = TaskSource(config.data, config.seed)
        open_run_dir(config)
        self.step = max(checkpoint_steps(config.run_dir), default=None)
        self.elapsed_s = 0.0
        self.skipped_in_a_row = 0
        self._load_model()
        self._build_engines()

    def _load_model(self) -> None:
        config = self.config
        if self.step is None:
            self.model, self.tokenizer = load_model(config.policy, self.device, config.seed)
            self._warm_start()
            return
        dtype = getattr(torch, config.policy.precision)
        self.model, self.tokenizer = load_checkpoint(checkpoint_dir(config.run_dir, self.step) / "model", dtype)
        self.model.to(self.device)
        self.elapsed_s = read_state(config.run_dir, self.step)["elapsed_s"]

    def _warm_start(self) -> None:
        settings = self.config.policy.warm_start
        if not settings.steps:
            return
        started = time.perf_counter()
        tasks = self.source.validation(self.config.grpo.val_num_prompts)

        def greedy_reward() -> float:
            answers = greedy_answers(self.model, self.tokenizer, tasks, self.config.rollout.max_new_tokens)
            return sum(reward(text, task.answer) for text, task in zip(answers, tasks, strict=True)) / len(tasks)

        with LiveProgress("warm start", settings.steps) as progress:

            def show(step: int, loss: float) -> None:
                progress.update(step, loss=loss)

            warm_start(self.model, self.tokenizer, self.source, settings, show, greedy_reward)
        self.elapsed_s += time.perf_counter() - started

    def _build_engines(self) -> None:
        config, qarl = self.config, self.config.qarl
        executed = self.format if qarl.alignment == "aligned" else get_format("bf16")
        self.report = install(self.model, qarl.targets, executed, mode=qarl.backward)
        rows = [asdict(row) for row in self.report.rows]
        (config.run_dir / "quantized.json").write_text(json.dumps(rows, indent=1))
        optimizer = MasterOptimizer(self.model.named_parameters(), config.policy.optimizer, config.policy.max_grad_norm)
        if self.step is not None:
            load_optimizer(config.run_dir, self.step, optimizer, self.device)
            self.report.version.value = int(read_state(config.run_dir, self.step)["weight_version"])
        self.learner = Learner(
            self.model,
            self.report,
            optimizer,
            build_loss(config.loss_fn),
            temperature=config.rollout.temperature,
            replay_routes=qarl.router_replay,
            micro_batch_size=config.policy.train_micro_batch_size,
            logprob_batch_size=config.policy.logprob_batch_size,
        )
        self.sampler = PackedSampler(
            self.model.config,
            self.format,
            self.report.targets,
            dtype=self.model.dtype,
            device=self.device,
            stop_ids=stop_token_ids(self.model, self.tokenizer),
            pad_id=self.tokenizer.pad_token_id,
            keep_operand=config.rollout.keep_operand,
        )

    def publish(self) -> RefitUpdate:
        """Return the learner's weights as the rollout engine will serve them."""
        return publish(
            self.report.weights, self.model.named_parameters(), self.format, version=self.report.version.value
        )

    def train(self) -> None:
        """Run the remaining steps.

        Raises:
            RuntimeError: too many non-finite steps in a row; a checkpoint of the last good weights is written first.
        """
        config, total = self.config, self.config.grpo.max_num_steps
        timer = PhaseTimer(torch.cuda.synchronize) if self.device.type == "cuda" else PhaseTimer()
        wandb = config.logger.wandb
        with (
            EventWriter(
                config.run_dir,
                resume_step=self.step or 0,
                wandb=wandb is not None,
                wandb_project=wandb.project if wandb else "",
                config=config.model_dump(mode="json"),
            ) as events,
            LiveProgress(config.run.name, total, self.step or 0) as progress,
        ):
            self.sampler.load(self.publish())
            if self.step is None:
                self.step = 0
                self._save()
            while self.step < total:
                started = time.perf_counter()
                metrics = self._one_step(self.step + 1, timer)
                self.step += 1
                self.elapsed_s += time.perf_counter() - started
                events.write(self.step, {"time_s": self.elapsed_s, **metrics})
                progress.update(self.step, reward=metrics["reward/mean"], gap=metrics["mismatch/abs_gap_mean"])
                if self.step % config.checkpointing.save_period == 0 or self.step == total:
                    self._save()
                self._stop_if_diverged(metrics)

    def _one_step(self, step: int, timer: PhaseTimer) -> dict[str, float]:
        grpo = self.config.grpo
        tasks = self.source.train(step, grpo.num_prompts_per_step)
        tasks = [task for task in tasks for _ in range(grpo.num_generations_per_prompt)]
        rollout = self.config.rollout
        params = SamplingParams(rollout.max_new_tokens, rollout.temperature, rollout.top_p)
        with timer.phase("rollout"):
            rollouts = self.generate(tasks, params, self._generator(step))
        with timer.phase("reward"):
            rewards = self.rewards(rollouts, tasks)
            advantages = group_advantages(rewards, grpo.num_generations_per_prompt, normalize=grpo.normalize_rewards)
        with timer.phase("prev_logprobs"):
            prev = self.learner.prev_logprobs(rollouts)
        with timer.phase("update"):
            result = self.learner.update(rollouts, prev, advantages, self._minibatches(step))
        with timer.phase("refit"):
            update = self.publish()
            self.sampler.load(update)
        tokens = int(rollouts.response_mask.sum())
        metrics = step_metrics(rollouts, rewards, prev, advantages, result)
        metrics |= timer.finish_step({"rollout": tokens, "prev_logprobs": tokens, "update": tokens}) | peak_memory()
        metrics |= {"weight_version": self.report.version.value, "refit/bytes": update.num_bytes}
        if step % self.config.logger.diagnostics_period == 0 or step == 1:
            self._write_diagnostics(step, tasks, rollouts, rewards, prev, advantages, result)
        if grpo.val_period and (step % grpo.val_period == 0 or step == 1):
            metrics["validation/reward"] = self.validate()
        return metrics

    def generate(self, tasks: list[Task], params: SamplingParams, generator: torch.Generator) -> Rollouts:
        """Sample one response for each task, `rollout.batch_size` at a time.

        Args:
            tasks: the tasks.
            params: how to draw.
            generator: source of randomness.

        Returns:
            All rollouts, in the tasks' order.
        """
        prompts = encode_prompts(tasks, self.tokenizer)
        size, width = self.config.rollout.batch_size, max(map(len, prompts))
        parts = [
            self.sampler.generate(prompts[start : start + size], params, generator, num_prompt_columns=width)
            for start in range(0, len(prompts), size)
        ]
        return Rollouts.concatenate(parts, pad_id=self.sampler.pad_id)

    def rewards(self, rollouts: Rollouts, tasks: list[Task]) -> Tensor:
        """Verify every response.

        Args:
            rollouts: B responses.
            tasks: their tasks.

        Returns:
            [B] FP32 of 0 and 1.
        """
        responses = rollouts.input_ids[:, rollouts.num_prompt_columns :]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        values = [reward(text, task.answer) for text, task in zip(texts, tasks, strict=True)]
        return torch.tensor(values, device=self.device)

    def validate(self) -> float:
        """Return the mean reward of the validation tasks under the rollout engine's current weights."""
        grpo = self.config.grpo
        tasks = self.source.validation(grpo.val_num_prompts)
        params = SamplingParams(self.config.rollout.max_new_tokens, grpo.val_temperature, grpo.val_top_p)
        rollouts = self.generate(tasks, params, self._generator(0))
        return float(self.rewards(rollouts, tasks).mean())

    def _generator(self, step: int) -> torch.Generator:
        # Seeded by step, so that a resumed run draws what the uninterrupted one drew.
        return torch.Generator(self.device).manual_seed(self.config.seed * 1_000_003 + step)

    def _minibatches(self, step: int) -> list[Tensor]:
        grpo = self.config.grpo
        total = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        order = torch.randperm(total, generator=generator).to(self.device)
        return list(order.split(grpo.train_global_batch_size))

    def _write_diagnostics(
        self,
        step: int,
        tasks: list[Task],
        rollouts: Rollouts,
        rewards: Tensor,
        prev: Tensor,
        advantages: Tensor,
        result: UpdateResult,
    ) -> None:
        collector = DiagnosticsCollector(step)
        collector.add(
            result.sequences,
            prev_logprobs=prev,
            curr_logprobs=result.curr_logprobs,
            generation_logprobs=rollouts.generation_logprobs,
            advantages=advantages[:, None].expand_as(prev),
            token_mask=rollouts.response_mask,
        )
        examples = diagnostics_examples(self.tokenizer, tasks, rollouts, rewards, prev, advantages)
        collector.write(self.config.run_dir, examples)

    def _save(self) -> None:
        checkpointing = self.config.checkpointing
        if checkpointing.enabled:
            save_checkpoint(
                self.config.run_dir,
                self.step,
                self.model,
                self.tokenizer,
                self.learner.optimizer,
                {"elapsed_s": self.elapsed_s, "weight_version": self.report.version.value},
                keep_last=checkpointing.keep_last,
            )

    def _stop_if_diverged(self, metrics: dict[str, float]) -> None:
        skipped, limit = int(metrics["optim/skipped_steps"]), self.config.policy.max_skipped_steps
        minibatches = len(self._minibatches(self.step))
        self.skipped_in_a_row = self.skipped_in_a_row + skipped if skipped == minibatches else 0
        if self.skipped_in_a_row >= limit:
            self._save()
            raise RuntimeError(
                f"{self.skipped_in_a_row} optimizer steps in a row had a non-finite loss or gradient (step "
                f"{self.step}); the weights are those of the last finite step, saved in {self.config.run_dir}. Lower "
                "policy.optimizer.lr, or raise policy.max_skipped_steps"
            )
