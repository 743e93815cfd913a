"""vLLM as the rollout engine, in this process or on its own GPU: started from a checkpoint, then refitted live."""

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from qarl_kernels import QuantFormat
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.layers.lora import LoraSettings
from qarl_nemo.names import module_kind
from qarl_nemo.refit.adapters import ADAPTER_ID, ADAPTER_NAME, scaled
from qarl_nemo.refit.engine import VllmEngine
from qarl_nemo.refit.engine_methods import chosen_methods, require_methods
from qarl_nemo.refit.publish import RefitUpdate
from qarl_nemo.refit.push import RefitReport, push, serving_version
from qarl_nemo.refit.send import CollectiveSender, DirectSender
from qarl_nemo.train.model import is_packed
from qarl_nemo.train.rollout_config import VllmRolloutConfig
from qarl_nemo.train.rollouts import Rollouts
from qarl_nemo.train.sampling import SamplingParams
from qarl_nemo.train.vllm.admission import answer_all
from qarl_nemo.train.vllm.answers import make_rollouts
from qarl_nemo.train.vllm.options import engine_environment, engine_options


class VllmRollout:
    """A vLLM engine that serves one whole weight version at a time.

    Args:
        model: the model with the learner's starting weights; the engine starts from a checkpoint of it.
        fmt: the rollout format.
        targets: which layers are quantized.
        settings: the rollout block.
        device: the learner's.
        stop_ids: tokens that end a response.
        pad_id: filler.
        capture_routes: let the engine return the experts it chose.
        base: the model whose weights stay as they are, a folder, quantized to `fmt` or not; None: refits bring all.
        lora: settings of the adapters that refits bring.

    Raises:
        ValueError: vLLM cannot store the weights as `fmt`, or serves a layer by another method; every layer is listed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        fmt: QuantFormat,
        targets: Sequence[str],
        settings: VllmRolloutConfig,
        *,
        device: torch.device,
        stop_ids: list[int],
        pad_id: int,
        capture_routes: bool,
        base: Path | None = None,
        lora: LoraSettings | None = None,
    ) -> None:
        self.device = device
        self.pad_id = pad_id
        self.stop_ids = stop_ids
        self._format, self._lora = fmt, lora
        self.router_layers = _router_layers(model) if capture_routes else []
        self._sender = CollectiveSender(1, device) if settings.own_gpu else DirectSender()
        capture_routes = bool(self.router_layers)
        options = engine_options(model, fmt, targets, settings, device=device, capture_routes=capture_routes, lora=lora)
        with tempfile.TemporaryDirectory(prefix="qarl-vllm-") as folder:
            source = base
            if source is None:
                source = Path(folder) / "source"
                model.save_pretrained(source)
            checkpoint = source
            if not is_packed(source):
                checkpoint = Path(folder) / "quantized"
                quantize_checkpoint(source, checkpoint, fmt, targets, device=device.type)
            self.engine = _start(model, checkpoint, options, engine_environment(device, settings))
        self._refitted = VllmEngine(self.engine)
        # Every refit checks this again; here it fails before anything is published.
        if not settings.own_gpu:
            require_methods(self.engine.apply_model(chosen_methods)[0], fmt, targets)

    @property
    def version(self) -> int | None:
        """The weight version served; None before the first refit.

        Raises:
            RuntimeError: vLLM broke off a refit.
        """
        return serving_version(self._refitted, timeout_s=self._sender.timeout_s)

    def load(self, update: RefitUpdate) -> RefitReport:
        """Serve `update` from now on; nothing changes unless the whole update is as its manifest says and as expected.

        Returns:
            What it cost.

        Raises:
            ValueError: a tensor is missing, unexpected, different from the manifest or from what this engine holds;
                all are listed, and the old version keeps serving.
            RuntimeError: vLLM failed while it took the weights; it serves nothing until a whole refit.
        """
        if self._lora is not None:
            layers = scaled(update.layers, self._lora.alpha / self._lora.rank)
            update = RefitUpdate.of(layers, self._format, version=update.manifest.version)
        return push(update, self._refitted, self._sender)

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
            generator: seeds what vLLM draws.
            num_prompt_columns: least number of prompt columns P.

        Returns:
            The rollouts, with routes when they are captured; `generation_logprobs` are vLLM's, at the sampling
            temperature.

        Raises:
            RuntimeError: no whole refit has reached the engine, its logprobs are not finite, or it reports no routes.
        """
        version = self.version
        if version is None:
            raise RuntimeError("no refit has reached this engine: load the learner's weights first")
        seeds = self._seeds(generator, len(prompts))
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        sampling = [self._sampling(params, seed) for seed in seeds]
        return make_rollouts(
            prompts,
            answer_all(self.engine, requests, sampling, lora_request=self._adapter()),
            pad_id=self.pad_id,
            num_prompt_columns=num_prompt_columns,
            router_layers=self.router_layers,
            weight_version=version,
            device=self.device,
        )

    def _adapter(self) -> Any:
        if self._lora is None:
            return None
        from vllm.lora.request import LoRARequest

        # Nothing is read from the path, which must not be empty.
        return LoRARequest(ADAPTER_NAME, ADAPTER_ID, "from-refits")

    def _seeds(self, generator: torch.Generator, num_responses: int) -> list[int | None]:
        shared = not isinstance(self._sender, CollectiveSender)
        drawn = torch.randint(
            2**31 - 1, (1 if shared else num_responses,), generator=generator, device=generator.device
        )
        if not shared:
            return drawn.tolist()
        # In this process vLLM draws from torch's generator, for all responses at once; for responses with seeds of
        # their own it draws one after the other, which takes as long as a small model's decoding step.
        torch.manual_seed(int(drawn))
        return [None] * num_responses

    def _sampling(self, params: SamplingParams, seed: int | None) -> Any:
        from vllm import SamplingParams as VllmSamplingParams

        return VllmSamplingParams(
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=seed,
            logprobs=0,
            # Objects for every token would keep Python's garbage collector busy.
            flat_logprobs=True,
            stop_token_ids=self.stop_ids,
            detokenize=False,
        )


def _router_layers(model: PreTrainedModel) -> list[int]:
    names = [name for name, _ in model.named_modules() if module_kind(name) == "router"]
    return [int(re.search(r"\.layers\.(\d+)\.", name)[1]) for name in names]


def _start(model: PreTrainedModel, checkpoint: Path, options: dict[str, Any], environment: dict[str, str]) -> Any:
    os.environ.update(environment)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, ModelRegistry

    # Registered as a class, the model is not inspected in a second process, where broken packages are not hidden.
    architecture = type(model).__name__
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    return LLM(str(checkpoint), **options)
