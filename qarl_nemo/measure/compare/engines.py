"""The engines of a comparison: each answers the job's prompts in one format and reports its own logprobs."""

import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from qarl_kernels import QuantFormat
from qarl_nemo.checkpoints import open_checkpoint, quantize_checkpoint
from qarl_nemo.checkpoints.overlay import write_overlay
from qarl_nemo.layers.frozen import FrozenBase, freeze
from qarl_nemo.layers.install import install
from qarl_nemo.measure.compare.job import Job
from qarl_nemo.measure.compare.score import Response, read_tokens
from qarl_nemo.refit.engine_methods import ChosenMethod, require_methods
from qarl_nemo.refit.engine_settings import serving_options
from qarl_nemo.refit.publish import publish
from qarl_nemo.train.lora import RANKS
from qarl_nemo.train.model import load_checkpoint
from qarl_nemo.train.sampler import PackedSampler
from qarl_nemo.train.sampling import SamplingParams
from qarl_nemo.train.saved_adapter import add_saved_adapter
from qarl_nemo.train.vllm.options import adapter_options

# Every engine reports a greedy response's logprobs at temperature 1.
TEMPERATURES = {"sampled": 1.0, "greedy": 0.0}
_SCRIPT = Path(__file__).with_name("vllm_responses.py")
# Prompts and steps of an engine's record: a prefill and some decoding, few enough for one forward.
_RECORDED_PROMPTS, _RECORDED_TOKENS = 16, 9
# The cache's part of the memory that an engine may take when engines share a GPU; the rest is weights and activations.
_CACHE_SHARE = 0.5
_QUANTIZING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Served:
    """What one engine did in one format.

    Attributes:
        responses: responses by decoding, `sampled` and `greedy`.
        engine: the engine's name and version.
        methods: the class that multiplies each module's weights, as the engine reports it.
        record: its operators' outputs, see `vllm_operators.py`; None unless requested.
    """

    responses: dict[str, list[Response]]
    engine: str
    methods: dict[str, str]
    record: dict[str, Tensor] | None = None


def serve(job: Job, fmt: QuantFormat) -> Served:
    """Have the job's engine answer its prompts.

    Returns:
        Responses with the engine's logprobs.

    Raises:
        RuntimeError: vLLM failed; its last lines are shown.
        ValueError: vLLM did not quantize what it should, or quantized what it should not; lists all modules.
    """
    return _serve_packed(job, fmt) if job.settings.engine == "packed" else _serve_vllm(job, fmt)


def _prompts(job: Job, temperature: float) -> list[list[int]]:
    copies = job.settings.num_responses if temperature else 1
    return [prompt for prompt in job.prompts for _ in range(copies)]


def _serve_packed(job: Job, fmt: QuantFormat) -> Served:
    model, _ = load_checkpoint(job.settings.checkpoint, job.dtype)
    report = install(model.to(job.device), job.settings.targets, fmt, plain=job.adapted_only)
    if job.adapter:
        model.requires_grad_(False)
        freeze(model, report)
        add_saved_adapter(model, job.adapter)
    # Without adapters nothing is.
    frozen = FrozenBase.of(model)
    sampler = PackedSampler(
        model.config,
        fmt,
        report.targets,
        dtype=model.dtype,
        device=job.device,
        stop_ids=job.stop_ids,
        pad_id=job.pad_id,
        frozen=frozen,
        lora=job.adapter.settings if job.adapter else None,
    )
    sampler.load(publish(report.weights, frozen.refitted(model), fmt, version=0))
    methods = dict.fromkeys(sampler.slots, f"packed {fmt.name}")
    del model, report
    generator = torch.Generator(job.device).manual_seed(job.settings.seed)
    responses = {name: _sampled(sampler, job, value, generator) for name, value in TEMPERATURES.items()}
    return Served(responses, "packed", methods)


def _sampled(sampler: PackedSampler, job: Job, temperature: float, generator: torch.Generator) -> list[Response]:
    responses = list(_sample(sampler, job, temperature, generator))
    sequences = [(response.prompt, response.tokens) for response in responses]
    read = read_tokens(sampler.model, sequences, batch_size=job.settings.batch_size, pad_id=job.pad_id)
    return [
        dataclasses.replace(
            response,
            read_logprobs=logprobs[: len(response.tokens)].tolist(),
            read_top_tokens=tops[: len(response.tokens)].tolist(),
        )
        for response, logprobs, tops in zip(responses, *read, strict=True)
    ]


def _sample(sampler: PackedSampler, job: Job, temperature: float, generator: torch.Generator) -> Iterator[Response]:
    prompts, size = _prompts(job, temperature), job.settings.batch_size
    tops: list[torch.Tensor] = []
    with sampler.model.lm_head.register_forward_hook(lambda _, __, logits: tops.append(logits[:, -1].argmax(-1))):
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            tops.clear()
            rollouts = sampler.generate(batch, SamplingParams(job.settings.max_new_tokens, temperature), generator)
            tokens = rollouts.input_ids[:, rollouts.num_prompt_columns :]
            columns = (tokens, rollouts.generation_logprobs, torch.stack(tops, dim=-1))
            for prompt, mask, *row in zip(batch, rollouts.response_mask, *columns, strict=True):
                yield Response(prompt, *(values[mask].tolist() for values in row), read_logprobs=[], read_top_tokens=[])


def _serve_vllm(job: Job, fmt: QuantFormat) -> Served:
    settings = job.settings
    with tempfile.TemporaryDirectory(prefix="qarl-compare-") as name:
        folder = Path(name)
        source = open_checkpoint(settings.checkpoint)
        if job.adapter and job.adapter.others:
            source = write_overlay(source, job.adapter.others, folder / "base")
        checkpoint = source.folder
        if fmt.is_quantized:
            checkpoint = folder / "quantized"
            # One at a time, because engines start in threads and the quantizers' kernels are compiled in this process.
            with _QUANTIZING:
                quantize_checkpoint(source, checkpoint, fmt, settings.targets, device=job.device.type)
        record = folder / "record.safetensors" if settings.layers else None
        answer: dict[str, Any] = _ask_vllm(folder, job, fmt, checkpoint, record)
        tensors = load_file(record) if record else None
    backend = job.device.type.upper()
    chosen = [ChosenMethod(layer, method, backend) for layer, method in answer["methods"].items()]
    require_methods(chosen, fmt, settings.targets)
    parts = zip(TEMPERATURES, answer["responses"], strict=True)
    responses = {name: [Response(**row) for row in rows] for name, rows in parts}
    return Served(responses, f"vllm {answer['version']}", answer["methods"], tensors)


def _vllm_options(job: Job, fmt: QuantFormat) -> dict[str, Any]:
    settings = job.settings
    options: dict[str, Any] = {"dtype": settings.precision}
    if job.device.type == "cuda":
        share = settings.gpu_memory_utilization / settings.parallel
        options["gpu_memory_utilization"] = share
        if settings.parallel > 1:
            # Other engines that start or end would disturb the memory measurement by which vLLM sizes its cache.
            total = torch.cuda.get_device_properties(job.device).total_memory
            options["kv_cache_memory_bytes"] = int(_CACHE_SHARE * share * total)
        options |= serving_options(fmt, settings.targets)
    if job.adapter:
        rank = next(rank for rank in RANKS if rank >= job.adapter.settings.rank)
        options |= adapter_options(dataclasses.replace(job.adapter.settings, rank=rank))
    return options


def _ask_vllm(folder: Path, job: Job, fmt: QuantFormat, checkpoint: Path, record: Path | None) -> dict[str, Any]:
    settings = job.settings
    recorded = {"prompts": job.prompts[:_RECORDED_PROMPTS], "num_tokens": _RECORDED_TOKENS, "path": str(record)}
    request = {
        "checkpoint": str(checkpoint.resolve()),
        "device": job.device.type,
        "requests": [[value, _prompts(job, value)] for value in TEMPERATURES.values()],
        "max_new_tokens": settings.max_new_tokens,
        # An engine that reads a whole response must be able to add a token.
        "max_model_len": max(map(len, job.prompts)) + max(settings.max_new_tokens, _RECORDED_TOKENS) + 1,
        "seed": settings.seed,
        "stop_token_ids": job.stop_ids,
        "options": _vllm_options(job, fmt),
        "record": recorded if record else None,
        "adapter": str(job.adapter.folder.resolve()) if job.adapter else None,
    }
    asked, answered = folder / "request.json", folder / "answer.json"
    asked.write_text(json.dumps(request), encoding="utf-8")
    command = [sys.executable, "-P", str(_SCRIPT), str(asked), str(answered)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not answered.is_file():
        last = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        raise RuntimeError(
            f"vLLM ended with status {done.returncode} while serving {fmt.name}; its last lines:\n{last}"
        )
    return json.loads(answered.read_text(encoding="utf-8"))
