"""What a run prints when it starts: model, formats, folder, data with a prompt, and the step it resumes from."""

import math
import textwrap

from rich.console import Console

from qarl_nemo.files import readable_bytes
from qarl_nemo.train.aligned_model import has_frozen_base, lora_settings
from qarl_nemo.train.config import ArithmeticData, LocalConfig
from qarl_nemo.train.noise import NoiseConfig
from qarl_nemo.train.preflight import Prepared
from qarl_nemo.train.rollout_config import VllmRolloutConfig

_LABEL = 12
_MAX_QUOTED = 4000


def show_banner(config: LocalConfig, prepared: Prepared, step: int | None) -> None:
    """Print what runs.

    Args:
        config: the resolved config.
        prepared: what was checked.
        step: step of the checkpoint that the run resumes from; None for a new run.
    """
    console = Console()
    for label, text in banner_lines(config, prepared, step).items():
        console.print(f"[bold]{label:<{_LABEL}}[/bold]", end="")
        # The lines of a prompt stand below each other.
        lines = textwrap.indent(text, " " * _LABEL, lambda _: True)[_LABEL:]
        console.print(lines, markup=False, highlight=False, soft_wrap=True)


def banner_lines(config: LocalConfig, prepared: Prepared, step: int | None) -> dict[str, str]:
    """Return a start banner, one entry a line.

    Args:
        config: the resolved config.
        prepared: what was checked.
        step: step of the checkpoint that the run resumes from; None for a new run.

    Returns:
        The lines' texts by their labels.
    """
    qarl, grpo = config.qarl, config.grpo
    quantized = sum(row.quantized for row in prepared.rows)
    begins = "new" if step is None else f"resumed from step {step}"
    rollout, responses = config.rollout, grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    served = isinstance(rollout, VllmRolloutConfig)
    kv_cache = {"KV cache": _kv_cache(rollout, min(rollout.batch_size, responses), prepared)} if served else {}
    learners = {"aligned": "executes the rollouts' format", "rollout_only": "executes BF16", "none": "executes BF16"}
    return {
        "run": f"{config.name}, {begins}, to step {grpo.max_num_steps}; seed {config.seed}, in {config.run_dir}",
        "model": f"{config.policy.model_path or 'random weights (policy.model_init)'}, "
        f"{_readable_count(prepared.num_parameters)} parameters, {config.policy.precision} on {prepared.device}",
        **_trained(config, prepared),
        "rollouts": f"{prepared.format.name}{_groups(prepared)}{qarl.grids(grpo.max_num_steps)}, "
        f"{quantized} of {len(prepared.rows)} modules quantized ({', '.join(qarl.targets)}), "
        f"engine {config.rollout.engine}{_noise(rollout.noise, grpo.max_num_steps)}",
        **kv_cache,
        "learner": f"{learners[qarl.alignment]}, {config.loss_fn.objective}, {grpo.num_prompts_per_step} prompts x "
        f"{grpo.num_generations_per_prompt} responses a step{_update_aware(config)}",
        "checkpoints": _checkpoints(config, prepared),
        **_data(config, prepared),
    }


def _kv_cache(rollout: VllmRolloutConfig, num_at_once: int, prepared: Prepared) -> str:
    gib = rollout.max_new_tokens * prepared.kv_bytes / 2**30
    num_held = int(rollout.kv_cache_gib / gib)
    held = f"{rollout.kv_cache_gib:g} GiB, {num_held} responses of {rollout.max_new_tokens} tokens"
    if num_held >= num_at_once:
        return held
    wanted = math.ceil(num_at_once * gib)
    return f"{held}; {num_at_once} run at once and would wait for each other: set rollout.kv_cache_gib={wanted}"


def _data(config: LocalConfig, prepared: Prepared) -> dict[str, str]:
    """Describe the data, and show the first problem as the model sees it and what is expected."""
    (first,) = prepared.source.train(1, 1)
    (tokens,) = prepared.encode([first])
    # What was decoded is what the tokenizer made of it.
    prompt = prepared.encode.tokenizer.decode(tokens)
    more = f"\n... {len(prompt) - _MAX_QUOTED} more characters" if len(prompt) > _MAX_QUOTED else ""
    return {
        "data": _sources(config, prepared),
        "a prompt": f"{prompt[:_MAX_QUOTED]}{more}",
        "its answer": first.answer[:_MAX_QUOTED],
    }


def _sources(config: LocalConfig, prepared: Prepared) -> str:
    data = config.data
    if isinstance(data, ArithmeticData):
        return "arithmetic, made as it is needed"
    told = []
    for key, datasets in (("train", data.train), ("validation", data.validation)):
        if datasets is None:
            told.append("validation: the first of these")
            continue
        names = " and ".join(one.title for one in (datasets if isinstance(datasets, list) else [datasets]))
        skipped = prepared.skipped[key]
        out = f", {skipped:,} overlong ones skipped" if skipped else ""
        told.append(f"{key}: {len(prepared.source.tasks[key]):,} problems of {names}{out}")
    return "; ".join(told)


def _checkpoints(config: LocalConfig, prepared: Prepared) -> str:
    settings = config.checkpointing
    if not settings.enabled:
        return "off: a run that is stopped cannot go on"
    size = readable_bytes(prepared.checkpoint_bytes)
    return f"{size} each, every {settings.save_period} steps, the newest {settings.keep_last} stay"


def _update_aware(config: LocalConfig) -> str:
    scale = config.policy.optimizer.update_aware_scale
    return "" if scale is None else f", update-aware steps of {scale:g}"


def _groups(prepared: Prepared) -> str:
    return f" in groups of {prepared.format.group_size}" if prepared.format.group_sizes else ""


def _trained(config: LocalConfig, prepared: Prepared) -> dict[str, str]:
    if not has_frozen_base(config.policy):
        return {}
    lora = lora_settings(config.policy.lora)
    count = f"{_readable_count(prepared.num_trained)} parameters on a frozen base"
    if lora is None:
        return {"trained": count}
    others = "".join(f", {name}" for name in ("norms", "router") if getattr(config.policy.lora, name))
    return {"trained": f"{count}: LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}{others}"}


def _noise(noise: NoiseConfig | None, num_steps: int) -> str:
    if noise is None:
        return ""
    unit = " of |w|" if noise.relative else ""
    # Then the first noisy stage, which alone has `start`, may be left out, and the last one, which alone has `end`, is.
    few = f" (only {num_steps} of them in a run of {num_steps} steps)" if noise.stages > num_steps else ""
    return f", noise of {noise.start:g} to {noise.end:g}{unit} on norms in {noise.stages} stages{few}, {noise.mode}"


def _readable_count(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"
