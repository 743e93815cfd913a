"""The engines of a comparison: each answers the job's prompts in one format and reports its own logprobs."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qarl_kernels import QuantFormat
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.layers.install import install
from qarl_nemo.local.compare_settings import Job
from qarl_nemo.local.model import load_checkpoint
from qarl_nemo.local.sampler import PackedSampler
from qarl_nemo.local.sampling import SamplingParams
from qarl_nemo.local.vllm_options import MOE_BACKENDS
from qarl_nemo.refit.engine_methods import ChosenMethod, require_methods
from qarl_nemo.refit.publish import publish

# A greedy response's logprobs are those at temperature 1, on every engine.
TEMPERATURES = {"sampled": 1.0, "greedy": 0.0}
_SCRIPT = Path(__file__).with_name("vllm_responses.py")


@dataclass(frozen=True, slots=True)
class Response:
    """What an engine answered to one prompt.

    Attributes:
        prompt: token ids.
        tokens: token ids of the response, its stop token included.
        logprobs: of the tokens at temperature 1, nats.
        top_tokens: the likeliest token at each place.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    top_tokens: list[int]


@dataclass(frozen=True, slots=True)
class Served:
    """What one engine did in one format.

    Attributes:
        responses: by decoding, `sampled` and `greedy`.
        engine: its name and version.
        methods: the class that multiplies each module's weights, as the engine reports it.
    """

    responses: dict[str, list[Response]]
    engine: str
    methods: dict[str, str]


def serve(job: Job, fmt: QuantFormat) -> Served:
    """Let the job's engine answer its prompts.

    Args:
        job: the comparison.
        fmt: what the engine serves.

    Returns:
        Responses with the engine's logprobs.

    Raises:
        RuntimeError: vLLM failed; its last lines are shown.
        ValueError: vLLM did not quantize what it should, or quantized what it should not; all modules are listed.
    """
    return _serve_packed(job, fmt) if job.settings.engine == "packed" else _serve_vllm(job, fmt)


def _prompts(job: Job, temperature: float) -> list[list[int]]:
    copies = job.settings.num_responses if temperature else 1
    return [prompt for prompt in job.prompts for _ in range(copies)]


def _serve_packed(job: Job, fmt: QuantFormat) -> Served:
    model, _ = load_checkpoint(job.settings.checkpoint, job.dtype)
    report = install(model.to(job.device), job.settings.targets, fmt)
    sampler = PackedSampler(
        model.config,
        fmt,
        report.targets,
        dtype=model.dtype,
        device=job.device,
        stop_ids=job.stop_ids,
        pad_id=job.pad_id,
    )
    sampler.load(publish(report.weights, model.named_parameters(), fmt, version=0))
    methods = dict.fromkeys(sampler.slots, f"packed {fmt.name}")
    del model, report
    generator = torch.Generator(job.device).manual_seed(job.settings.seed)
    responses = {name: list(_sample(sampler, job, value, generator)) for name, value in TEMPERATURES.items()}
    return Served(responses, "packed", methods)


def _sample(sampler: PackedSampler, job: Job, temperature: float, generator: torch.Generator) -> Iterator[Response]:
    prompts, size = _prompts(job, temperature), job.settings.batch_size
    tops: list[torch.Tensor] = []
    hook = sampler.model.lm_head.register_forward_hook(lambda _, __, logits: tops.append(logits[:, -1].argmax(-1)))
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        tops.clear()
        rollouts = sampler.generate(batch, SamplingParams(job.settings.max_new_tokens, temperature), generator)
        tokens = rollouts.input_ids[:, rollouts.num_prompt_columns :]
        columns = (tokens, rollouts.generation_logprobs, torch.stack(tops, dim=-1))
        for prompt, mask, *row in zip(batch, rollouts.response_mask, *columns, strict=True):
            yield Response(prompt, *(values[mask].tolist() for values in row))
    hook.remove()


def _serve_vllm(job: Job, fmt: QuantFormat) -> Served:
    settings = job.settings
    with tempfile.TemporaryDirectory(prefix="qarl-compare-") as name:
        folder = Path(name)
        checkpoint = settings.checkpoint
        if fmt.weight_kind != "bf16":
            checkpoint = folder / "quantized"
            quantize_checkpoint(settings.checkpoint, checkpoint, fmt, settings.targets, device=job.device.type)
        answer: dict[str, Any] = _ask_vllm(folder, job, fmt, checkpoint)
    backend = job.device.type.upper()
    chosen = [ChosenMethod(layer, method, backend) for layer, method in answer["methods"].items()]
    require_methods(chosen, fmt, settings.targets)
    parts = zip(TEMPERATURES, answer["responses"], strict=True)
    responses = {name: [Response(**row) for row in rows] for name, rows in parts}
    return Served(responses, f"vllm {answer['version']}", answer["methods"])


def _ask_vllm(folder: Path, job: Job, fmt: QuantFormat, checkpoint: Path) -> dict[str, Any]:
    settings = job.settings
    options: dict[str, Any] = {"dtype": settings.precision}
    if job.device.type == "cuda":
        options["gpu_memory_utilization"] = settings.gpu_memory_utilization
        if fmt.name in MOE_BACKENDS and "experts" in settings.targets:
            options["moe_backend"] = MOE_BACKENDS[fmt.name]
    request = {
        "checkpoint": str(checkpoint.resolve()),
        "device": job.device.type,
        "requests": [[value, _prompts(job, value)] for value in TEMPERATURES.values()],
        "max_new_tokens": settings.max_new_tokens,
        "max_model_len": max(map(len, job.prompts)) + settings.max_new_tokens,
        "seed": settings.seed,
        "stop_token_ids": job.stop_ids,
        "options": options,
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
