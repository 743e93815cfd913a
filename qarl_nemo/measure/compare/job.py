"""A comparison whose settings have all been checked, before a weight is read."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from qarl_formats import BASELINE, QuantFormat, find_format, get_format
from qarl_nemo.checkpoints import open_checkpoint, plan_quantization
from qarl_nemo.checkpoints.content import require_whole
from qarl_nemo.checkpoints.hf_config import require_no_adapters
from qarl_nemo.config.problems import attempt
from qarl_nemo.installation import vllm_command
from qarl_nemo.layers.install import install
from qarl_nemo.measure.checks import count_problems, share_problems
from qarl_nemo.measure.compare.prompts import make_prompts
from qarl_nemo.measure.compare.settings import ENGINES, PRECISIONS, CompareSettings
from qarl_nemo.measure.served import adapter_problems, cpu_problems
from qarl_nemo.names import TARGETS
from qarl_nemo.train.engine_attention import ATTENTIONS, engine_attention_problem
from qarl_nemo.train.lora import RANKS
from qarl_nemo.train.model import checkpoint_config, load_tokenizer, stored_stop_ids
from qarl_nemo.train.saved_adapter import SavedAdapter, add_saved_adapter, read_adapter
from qarl_nemo.train.setup import resolve_device


@dataclass(frozen=True, slots=True)
class Job:
    """A comparison whose settings have all been checked.

    Attributes:
        settings: what was asked for.
        formats: the served formats, without the floor.
        device: where learner and packed engine compute.
        prompts: token ids.
        stop_ids: tokens that end a response.
        pad_id: filler.
        adapter: what both sides add.
    """

    settings: CompareSettings
    formats: tuple[QuantFormat, ...]
    device: torch.device
    prompts: list[list[int]]
    stop_ids: list[int]
    pad_id: int
    adapter: SavedAdapter | None = None

    @property
    def adapted_only(self) -> tuple[str, ...]:
        """Targets that have adapters and are not quantized."""
        adapted = self.adapter.settings.targets if self.adapter else ()
        return tuple(target for target in adapted if target not in self.settings.targets)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and unquantized parameters."""
        return getattr(torch, self.settings.precision)


def prepare(settings: CompareSettings, beside: Sequence[str] = ()) -> Job:
    """Check everything and make the prompts, before a weight is read.

    Args:
        settings: what to compare.
        beside: what else is wrong, to be listed with it.

    Raises:
        ValueError: settings, checkpoint, tokenizer, formats, shapes or prompts are wrong; all that is wrong is listed.
    """
    numbers = _number_problems(settings)
    problems = [*beside, *numbers, *_choice_problems(settings)]
    formats = _formats(settings, problems)
    device = attempt(problems, resolve_device, settings.device)
    config = attempt(problems, _read_config, settings.checkpoint)
    # Without a config the tokenizer's error would be the config's again.
    tokenizer = attempt(problems, load_tokenizer, settings.checkpoint) if config else None
    adapter = attempt(problems, read_adapter, settings.adapter) if settings.adapter else None
    if adapter:
        problems += _adapter_problems(settings, adapter, formats, device)
    prompts: list[list[int]] | None = None
    stop_ids: list[int] | None = None
    if config:
        problems += _shape_problems(settings, formats, config, device)
        if adapter:
            attempt(problems, _require_same_model, adapter, config)
    if config and tokenizer is not None:
        # Random ones of illegal sizes cannot be drawn.
        if settings.prompts or not numbers:
            prompts = attempt(problems, make_prompts, settings, tokenizer, config)
        stop_ids = attempt(problems, stored_stop_ids, settings.checkpoint, tokenizer)
    if problems:
        raise ValueError(f"{len(problems)} problem(s) with this comparison:\n  " + "\n  ".join(problems))
    assert device
    assert tokenizer is not None
    assert prompts
    assert stop_ids
    return Job(settings, tuple(formats), device, prompts, stop_ids, tokenizer.pad_token_id, adapter)


def _number_problems(settings: CompareSettings) -> list[str]:
    names = ("prompt_tokens", "num_responses", "max_new_tokens", "batch_size", "parallel", "num_prompts")
    counts = ((name, getattr(settings, name)) for name in names)
    return count_problems(counts) + share_problems(settings, "gpu_memory_utilization")


def _choice_problems(settings: CompareSettings) -> list[str]:
    problems = [
        f"unknown target {name!r}; legal: {', '.join(TARGETS)}" for name in settings.targets if name not in TARGETS
    ]
    for name, legal in (("engine", ENGINES), ("precision", PRECISIONS), ("attention", ATTENTIONS)):
        if getattr(settings, name) not in legal:
            problems.append(f"unknown {name} {getattr(settings, name)!r}; legal: {', '.join(legal)}")
    missing = engine_attention_problem() if settings.attention == "engine" else None
    if missing:
        problems.append(f"attention=engine does not run here: {missing}; set attention=torch")
    if settings.own_width and settings.nested_in and settings.engine == "packed":
        problems.append(
            "engine packed rounds nested codes to w4a16's storage; leave out --own-width, which changes no number, or "
            "set --engine vllm"
        )
    if settings.engine != "vllm":
        return problems + ["--layers looks into vLLM's operators; set --engine vllm"] * settings.layers
    if importlib.util.find_spec("vllm") is None:
        problems.append(f"engine vllm needs vLLM: {vllm_command()}, or use engine packed")
    if settings.precision != "bfloat16":
        problems.append(f"engine vllm serves bfloat16, not precision {settings.precision}")
    return problems


def _adapter_problems(
    settings: CompareSettings, adapter: SavedAdapter, formats: list[QuantFormat], device: torch.device | None
) -> list[str]:
    problems = ["--layers does not know adapters; leave out one of the two"] * settings.layers
    if settings.engine != "vllm":
        return problems
    if device is not None:
        problems += adapter_problems(formats, settings.targets, device)
    if adapter.settings.rank > RANKS[-1]:
        problems.append(f"the adapters have rank {adapter.settings.rank}; vLLM serves up to {RANKS[-1]}")
    return problems


def _require_same_model(adapter: SavedAdapter, config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    try:
        install(model, adapter.settings.targets, get_format(BASELINE))
    except ValueError as error:
        raise ValueError(f"{adapter.folder} is not of this model: {error}") from error
    add_saved_adapter(model, adapter)


def _formats(settings: CompareSettings, problems: list[str]) -> list[QuantFormat]:
    formats: list[QuantFormat] = []
    if not settings.formats:
        problems.append("no format to compare")
    for name in dict.fromkeys(settings.formats):
        if settings.formats.count(name) > 1:
            problems.append(f"format {name} is named more than once")
        if name == BASELINE:
            problems.append(f"{BASELINE} is the floor and always measured: leave it out of the formats")
        elif (fmt := attempt(problems, get_format, name, **_integer_options(settings, name))) is not None:
            formats.append(fmt)
    return formats


def _integer_options(settings: CompareSettings, name: str) -> dict[str, Any]:
    # Next to an integer format, these are not meant for other formats; without one, they refuse them.
    if any(map(_takes_groups, settings.formats)) and not _takes_groups(name):
        return {}
    return {key: getattr(settings, key) for key in ("group_size", "scale_convention", "nested_in", "own_width")}


def _takes_groups(name: str) -> bool:
    fmt = find_format(name)
    return fmt is not None and bool(fmt.group_sizes)


def _read_config(folder: Path) -> PreTrainedConfig:
    config = checkpoint_config(folder)
    require_no_adapters(folder)
    if getattr(config, "quantization_config", None):
        raise ValueError(f"{folder} is quantized already; name the BF16 checkpoint that it was made from")
    return config


def _shape_problems(
    settings: CompareSettings, formats: list[QuantFormat], config: PreTrainedConfig, device: torch.device | None
) -> list[str]:
    if not settings.targets or any(target not in TARGETS for target in settings.targets):
        return [] if settings.targets else [f"no target; legal: {', '.join(TARGETS)}"]
    problems: list[str] = []
    checkpoint = attempt(problems, open_checkpoint, settings.checkpoint)
    if checkpoint and settings.engine != "vllm":
        # A plan of vLLM's checkpoint asks the same.
        attempt(problems, require_whole, checkpoint)
    for fmt in formats:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        attempt(problems, install, model, settings.targets, fmt)
        if checkpoint and settings.engine == "vllm":
            attempt(problems, plan_quantization, checkpoint, fmt, settings.targets)
        if settings.engine == "vllm" and device is not None and device.type == "cpu":
            problems += cpu_problems(fmt, settings.targets)
    return problems
