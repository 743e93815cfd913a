"""vLLM as the rollout engine: in this process, on a CPU, started from a quantized checkpoint and refitted live."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qarl_kernels import QuantFormat
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.layers.install import InstallReport
from qarl_nemo.local.config import VllmRolloutConfig
from qarl_nemo.local.rollouts import Rollouts, pad_left
from qarl_nemo.local.sampling import SamplingParams
from qarl_nemo.refit.engine_methods import chosen_methods, require_methods
from qarl_nemo.refit.publish import RefitUpdate
from qarl_nemo.refit.receive import checkpoint_tensors, published_layout, require_whole

# In this process, where a refit passes tensors and not copies, on the threads the learner uses.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Compiling the sampler would hold up the first rollout for longer than it saves here.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VllmRollout:
    """A vLLM engine that serves one whole weight version at a time.

    Args:
        model: the learner's, with aligned layers installed; the engine starts from a checkpoint of it.
        report: which layers are quantized.
        fmt: the rollout format.
        settings: the rollout block.
        stop_ids: tokens that end a response.
        pad_id: filler.

    Raises:
        ValueError: vLLM cannot store the weights as `fmt`, or serves a layer by another method; every layer is listed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        report: InstallReport,
        fmt: QuantFormat,
        settings: VllmRolloutConfig,
        *,
        stop_ids: list[int],
        pad_id: int,
    ) -> None:
        self.format = fmt
        self.device = torch.device("cpu")
        self.pad_id = pad_id
        self.stop_ids = stop_ids
        self.version: int | None = None
        self._layout = published_layout(report.weights, model.named_parameters(), fmt)
        with tempfile.TemporaryDirectory(prefix="qarl-vllm-") as folder:
            checkpoint = Path(folder) / "quantized"
            model.save_pretrained(Path(folder) / "source")
            quantize_checkpoint(Path(folder) / "source", checkpoint, fmt, report.targets)
            self.engine = _start(model, checkpoint, settings)
        require_methods(self.engine.apply_model(chosen_methods)[0], fmt, report.targets)

    def load(self, update: RefitUpdate) -> None:
        """Serve `update` from now on; nothing changes unless the whole update is as its manifest says and as expected.

        Args:
            update: what the learner published.

        Raises:
            ValueError: a tensor is missing, unexpected, different from the manifest or from what this engine holds;
                all are listed, and the old version keeps serving.
            RuntimeError: vLLM failed while it took the weights.
        """
        require_whole(update, self._layout, self.format, serving=self.version)
        # Should vLLM fail half-way, its weights are of no version, and `generate` refuses them.
        self.version, serving = None, update.manifest.version
        arguments = {"weights_iterator": list(checkpoint_tensors(update.tensors)), "is_checkpoint_format": True}
        try:
            self.engine.collective_rpc("reload_weights", kwargs=arguments)
        except Exception as error:
            raise RuntimeError(
                f"vLLM broke off the refit to version {serving}; it serves nothing any more. Resume the run from its "
                "last checkpoint"
            ) from error
        self.version = serving

    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        generator: torch.Generator,
        *,
        num_prompt_columns: int = 0,
    ) -> Rollouts:
        """Sample one response for each prompt.

        Args:
            prompts: token ids.
            params: how to draw; with `top_p` below 1 the logprobs are those of the truncated distribution.
            generator: seeds every response's own generator in vLLM.
            num_prompt_columns: least number of prompt columns P.

        Returns:
            The rollouts, without routes; `generation_logprobs` are vLLM's, at the sampling temperature.

        Raises:
            RuntimeError: no whole refit has reached the engine, or its logprobs are not finite.
        """
        if self.version is None:
            raise RuntimeError("no whole weight version to serve: none was loaded, or vLLM broke off a refit")
        seeds = torch.randint(2**31 - 1, (len(prompts),), generator=generator).tolist()
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        sampling = [self._sampling(params, seed) for seed in seeds]
        answers = [result.outputs[0] for result in self.engine.generate(requests, sampling, use_tqdm=False)]
        return self._rollouts(prompts, answers, num_prompt_columns)

    def _sampling(self, params: SamplingParams, seed: int) -> Any:
        from vllm import SamplingParams as VllmSamplingParams

        return VllmSamplingParams(
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=seed,
            logprobs=0,
            stop_token_ids=self.stop_ids,
            detokenize=False,
        )

    def _rollouts(self, prompts: list[list[int]], answers: list[Any], num_prompt_columns: int) -> Rollouts:
        width = max(len(answer.token_ids) for answer in answers)
        input_ids, prompt_mask = pad_left(prompts, self.pad_id, self.device, width=num_prompt_columns)
        tokens = torch.full((len(answers), width), self.pad_id)
        logprobs = torch.zeros(len(answers), width)
        mask = torch.zeros(len(answers), width, dtype=torch.bool)
        for row, answer in enumerate(answers):
            length = len(answer.token_ids)
            tokens[row, :length] = torch.tensor(answer.token_ids)
            logprobs[row, :length] = torch.tensor(list(_chosen_logprobs(answer)))
            mask[row, :length] = True
        self._require_finite(logprobs)
        return Rollouts(
            input_ids=torch.cat([input_ids, tokens], dim=-1),
            attention_mask=torch.cat([prompt_mask, mask], dim=-1),
            response_mask=mask,
            generation_logprobs=logprobs,
            routes=None,
            truncated=torch.tensor([answer.finish_reason == "length" for answer in answers]),
            weight_version=self.version,
        )

    def _require_finite(self, logprobs: Tensor) -> None:
        broken = int((~logprobs.isfinite()).any(-1).sum())
        if broken:
            raise RuntimeError(
                f"weight version {self.version} gives NaN or infinite logprobs for {broken} of {len(logprobs)} "
                "prompts: the policy has diverged. Start a new run with a lower policy.optimizer.lr"
            )


def _chosen_logprobs(answer: Any) -> Iterator[float]:
    return (entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))


def _start(model: PreTrainedModel, checkpoint: Path, settings: VllmRolloutConfig) -> Any:
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, ModelRegistry

    # Registered as a class, the model is not looked up in a second process, where broken packages are not hidden.
    architecture = type(model).__name__
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    return LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        # The checkpoint's sampling defaults would change the distribution.
        generation_config="vllm",
        dtype=str(model.dtype).removeprefix("torch."),
        use_tqdm_on_load=False,
        enforce_eager=True,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni",
        max_model_len=settings.max_model_len or model.config.max_position_embeddings,
        max_num_seqs=settings.batch_size,
        kv_cache_memory_bytes=int(settings.kv_cache_gib * 2**30),
        seed=0,
    )
