"""vLLM as an engine of evaluations, with the kernels of rollouts: it serves a quantized checkpoint as it is."""

import contextlib
import multiprocessing
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from qarl_formats import BASELINE, get_format
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.checkpoints.overlay import write_overlay
from qarl_nemo.layers.lora import LoraSettings
from qarl_nemo.measure.eval.engine import Answer
from qarl_nemo.measure.eval.models import EvalModel
from qarl_nemo.measure.eval.vllm_server import serve
from qarl_nemo.refit.engine_methods import require_methods
from qarl_nemo.refit.engine_settings import serving_options
from qarl_nemo.train.aligned_model import lora_settings
from qarl_nemo.train.sampling import SamplingParams
from qarl_nemo.train.vllm.options import adapter_options, compilation_options

_END_TIMEOUT_S = 30


class VllmEngine:
    """Answers in a process of its own.

    Args:
        model: what is served.
        tokenizer: its tokenizer.
        stop_ids: tokens that end an answer.
        device: `cpu` or `cuda`.
        batch_size: answers decoded at once.
        max_model_len: longest prompt and answer together, tokens.
        gpu_memory_utilization: share of each GPU that it takes.
        tensor_parallel_size: GPUs that share the model.

    Raises:
        ValueError: vLLM serves a layer by another method than the format's; every layer is listed.
        RuntimeError: vLLM failed.
    """

    def __init__(
        self,
        model: EvalModel,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: list[int],
        *,
        device: str,
        batch_size: int,
        max_model_len: int,
        gpu_memory_utilization: float,
        tensor_parallel_size: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._scratch = tempfile.TemporaryDirectory(prefix="qarl-eval-")
        options = _options(model, device, batch_size)
        options |= {"max_model_len": max_model_len, "seed": 0}
        if device == "cuda":
            options |= {"gpu_memory_utilization": gpu_memory_utilization, "tensor_parallel_size": tensor_parallel_size}
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        folder = served_folder(model, Path(self._scratch.name), device)
        adapter = str(model.folder.resolve()) if _lora(model) else None
        arguments = (theirs, str(folder.resolve()), adapter, device, options, stop_ids)
        self._process = context.Process(target=serve, args=arguments)
        self._process.start()
        theirs.close()
        try:
            methods = self._receive()
            if model.served is not None:
                require_methods(methods, model.served, model.targets)
        except BaseException:
            self.close()
            raise

    def answer(self, prompts: Sequence[list[int]], params: SamplingParams, seeds: Sequence[int]) -> list[Answer]:
        """Sample one answer to each prompt, each from its own seed."""
        # If the process has ended, `_receive` says how.
        with contextlib.suppress(BrokenPipeError):
            self._connection.send((list(prompts), params, list(seeds)))
        received = self._receive()
        texts = self._tokenizer.batch_decode([tokens for tokens, _ in received], skip_special_tokens=True)
        return [Answer(text, len(tokens), truncated) for text, (tokens, truncated) in zip(texts, received, strict=True)]

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            try:
                self._connection.send(None)
            except OSError:
                self._process.terminate()
            self._process.join(_END_TIMEOUT_S)
            self._process.kill()
        self._process.join()
        self._scratch.cleanup()

    def _receive(self) -> Any:
        wait([self._connection, self._process.sentinel])
        try:
            received = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"vLLM's process ended with status {self._process.exitcode}; what it printed stands above"
            ) from None
        if isinstance(received, RuntimeError):
            raise RuntimeError(f"vLLM failed: {received}")
        return received


def served_folder(model: EvalModel, scratch: Path, device: str) -> Path:
    """Return the folder that vLLM reads, without adapters; made where a model is not stored as it is served.

    Args:
        model: what is served.
        scratch: what is made goes here.
        device: where weights are quantized.
    """
    base = model.checkpoint
    # vLLM reads adapters from their folder, and nothing that was trained beside them.
    if model.run and (trained := model.run.parameters()):
        base = write_overlay(base, trained, scratch / "base")
    if model.quantized or not model.targets:
        return base.folder
    assert model.served
    quantize_checkpoint(base, scratch / "quantized", model.served, model.targets, device=device)
    if device == "cuda":
        # What this process keeps of the GPU, the engine's cannot have.
        torch.cuda.empty_cache()
    return scratch / "quantized"


def _options(model: EvalModel, device: str, batch_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_num_seqs": batch_size,
        # The checkpoint's sampling defaults would change the distribution.
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
    }
    if device == "cpu":
        return options | {"enforce_eager": True}
    lora, fmt, targets = _lora(model), model.served or get_format(BASELINE), model.targets
    options |= {"compilation_config": compilation_options(batch_size, lora)}
    return options | (serving_options(fmt, targets) if targets else {}) | (adapter_options(lora) if lora else {})


def _lora(model: EvalModel) -> LoraSettings | None:
    return lora_settings(model.run.config.policy.lora) if model.run else None
