"""The built-in sampler as an engine of evaluations: it serves quantized checkpoints from their own tensors."""

from collections.abc import Sequence

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from qarl_formats import BASELINE, get_format
from qarl_nemo.checkpoints.stored import stored_layers
from qarl_nemo.layers.frozen import FrozenBase
from qarl_nemo.layers.install import install
from qarl_nemo.measure.eval.engine import Answer
from qarl_nemo.measure.eval.models import EvalModel
from qarl_nemo.refit.publish import StreamedUpdate, publish
from qarl_nemo.train.aligned_model import align_model
from qarl_nemo.train.frozen_run import FrozenRun
from qarl_nemo.train.model import load_checkpoint, load_model
from qarl_nemo.train.rollout_config import PackedRolloutConfig
from qarl_nemo.train.sampler import PackedSampler
from qarl_nemo.train.sampling import SamplingParams
from qarl_nemo.train.setup import build_sampler
from qarl_nemo.train.trained import load_trained


class PackedEngine:
    """Answers in this process.

    Args:
        model: what is served.
        tokenizer: its tokenizer.
        stop_ids: tokens that end an answer.
        device: where it computes.
        dtype: activations and unquantized parameters.

    Raises:
        ValueError: the checkpoint's tensors are not those of its model in its format; all are listed.
    """

    def __init__(
        self,
        model: EvalModel,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: list[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._tokenizer, self._device = tokenizer, device
        if model.run:
            self._sampler = _sampler_of(model.run, tokenizer, device, dtype)
            return
        config = AutoConfig.from_pretrained(model.folder, local_files_only=True)
        config.quantization_config = None
        self._sampler = PackedSampler(
            config,
            model.served or get_format(BASELINE),
            model.targets,
            dtype=dtype,
            device=device,
            stop_ids=stop_ids,
            pad_id=tokenizer.pad_token_id,
        )
        if model.targets and not model.quantized:
            self._quantize(model, dtype)
        else:
            self._load(model)

    def answer(self, prompts: Sequence[list[int]], params: SamplingParams, seeds: Sequence[int]) -> list[Answer]:
        """Sample one answer to each prompt; the first seed is that of the whole batch."""
        generator = torch.Generator(self._device).manual_seed(seeds[0])
        rollouts = self._sampler.generate(list(prompts), params, generator)
        responses = rollouts.input_ids[:, rollouts.num_prompt_columns :]
        kept = [tokens[mask].tolist() for tokens, mask in zip(responses, rollouts.response_mask, strict=True)]
        texts = self._tokenizer.batch_decode(kept, skip_special_tokens=True)
        return [
            Answer(text, len(tokens), bool(truncated))
            for text, tokens, truncated in zip(texts, kept, rollouts.truncated, strict=True)
        ]

    def close(self) -> None:
        """Free the weights."""
        del self._sampler

    def _quantize(self, model: EvalModel, dtype: torch.dtype) -> None:
        """Quantize as the run's learner does, and publish the same tensors."""
        assert model.served
        learner, _ = load_checkpoint(model.folder, dtype)
        torch.nn.Module.to(learner, self._device)
        report = install(learner, model.targets, model.served)
        self._sampler.load(publish(report.weights, learner.named_parameters(), model.served, version=0))

    def _load(self, model: EvalModel) -> None:
        layout, fmt = self._sampler.layout, model.served or get_format(BASELINE)
        update = StreamedUpdate(lambda: stored_layers(model.checkpoint, layout), fmt, version=0)
        with update:
            self._sampler.load(update)


def _sampler_of(
    run: FrozenRun, tokenizer: PreTrainedTokenizerBase, device: torch.device, dtype: torch.dtype
) -> PackedSampler:
    """Serve base and adapters as the run does: base in memory once, the rest brought by a refit."""
    policy = run.config.policy.model_copy(update={"precision": str(dtype).removeprefix("torch.")})
    config = run.config.model_copy(update={"policy": policy, "rollout": PackedRolloutConfig()})
    learner, _ = load_model(policy, device, config.seed)
    report = align_model(config, learner, device)
    load_trained(learner, run.folder)
    sampler = build_sampler(config, learner, tokenizer, device)
    assert isinstance(sampler, PackedSampler)
    published = FrozenBase.of(learner).refitted(learner)
    sampler.load(publish(report.weights, published, config.qarl.served_format, version=0))
    return sampler
