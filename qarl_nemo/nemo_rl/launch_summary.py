"""What a checked config will run, in words: model, steps, GPUs, memory, and the command that starts it."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from qarl_nemo.architecture import MEGATRON_FAMILIES
from qarl_nemo.memory import GIB, OVERHEAD_BYTES
from qarl_nemo.nemo_rl.layout import Layout, read_layout
from qarl_nemo.nemo_rl.layout_memory import Needed, card, needed_memory
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.model_shapes import read_model
from qarl_nemo.secrets import words_without_secrets


def launch_summary(config: Mapping[str, Any], qarl: Any, arguments: Sequence[str], unchecked: str | None) -> str:
    """Say what will run.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without conflicts.
        qarl: its checked `NemoQarlConfig`.
        arguments: the command line's words, the launcher first.
        unchecked: why the model's type, shapes and memory were not checked; None if they were.
    """
    layout = read_layout(config)
    lines = [
        f"model    {look_up(config, 'policy.model_name', '?')}, {_quantized(config, qarl)}",
        f"steps    {_steps(config, qarl)}",
    ]
    if layout is not None:
        lines += [f"GPUs     {_gpus(layout)}", f"learner  {_learner(layout)}", f"engines  {_engines(layout)}"]
    if unchecked is None:
        lines.append(f"memory   {_memory(config, qarl)}")
    else:
        types = ", ".join(MEGATRON_FAMILIES)
        lines.append(f"model type (one of {types}), shapes and memory not checked: {unchecked}")
    lines.append(f"logs     {look_up(config, 'logger.log_dir', '?')}; checkpoints {_checkpoints(config)}")
    where = ", on the head of a Ray cluster" if layout is not None and layout.nodes + layout.reward_nodes > 1 else ""
    words = ["python", *words_without_secrets(arguments)]
    lines.append(f"command{where}: {shlex.join(words)}")
    return "\n".join(f"qarl: {line}" for line in lines)


def _quantized(config: Mapping[str, Any], qarl: Any) -> str:
    if qarl.alignment == "none":
        return "BF16 on both sides"
    grids = qarl.grids(look_up(config, "grpo.max_num_steps", None))
    rollouts = f"rollouts as {qarl.format}{grids} in {' and '.join(qarl.targets)}"
    executed = "the learner executes the same" if qarl.alignment == "aligned" else "the learner in BF16 (rollout_only)"
    return f"{rollouts}; {executed}"


def _steps(config: Mapping[str, Any], qarl: Any) -> str:
    prompts, responses = (
        look_up(config, f"grpo.{key}", 0) for key in ("num_prompts_per_step", "num_generations_per_prompt")
    )
    batch = look_up(config, "policy.train_global_batch_size", 0)
    updates = f", {prompts * responses // batch} optimizer step(s) of {batch}" if batch else ""
    scale = qarl.update_aware_scale
    aware = "" if scale is None else f", update-aware steps of {scale:g}"
    return f"{prompts} prompts x {responses} responses each{updates}; objective {qarl.objective.objective}{aware}"


def _gpus(layout: Layout) -> str:
    total = layout.nodes * layout.gpus_per_node
    shared = "shared by learner and engines" if layout.colocated else "learner and engines apart"
    beside = ", beside a reward model's" if layout.reward_nodes or layout.reward_gpus else ""
    return f"{total} ({layout.nodes} node(s) of {layout.gpus_per_node}), {shared}{beside}"


def _learner(layout: Layout) -> str:
    sizes = (
        " ".join(f"{name.upper()}{size}" for name, size in layout.sizes.items() if size > 1) or "no model parallelism"
    )
    return f"{layout.learner_gpus} ranks: {sizes}, {layout.data_parallel} data parallel"


def _engines(layout: Layout) -> str:
    experts = f", experts over {layout.engine_ep}" if layout.engine_ep > 1 else ""
    return f"{layout.engines} of {layout.engine_tp} GPU(s) each{experts}"


def _memory(config: Mapping[str, Any], qarl: Any) -> str:
    needed, gpu = needed_memory(config, qarl, optimizer_stays=qarl.resident), card(qarl)
    if needed is None:
        return f"not computed: {' and '.join(_missing(config))}"
    refit = "" if needed.refit is None else f", {needed.refit / GIB:.1f} in a refit"
    return (
        f"{needed.learner.static_bytes / GIB:.1f} GiB a learner rank between steps, "
        f"{needed.learner.peak_bytes / GIB:.1f} at the peak{refit}, "
        f"and {(OVERHEAD_BYTES + needed.asleep) / GIB:g} beside its tensors; weights of an engine "
        f"{needed.engine / GIB:.1f} a GPU; {_optimizer(needed, qarl)}computed, of {gpu.gib:.0f} ({gpu.source})"
    )


def _missing(config: Mapping[str, Any]) -> list[str]:
    """Say what memory cannot be computed without."""
    return [
        *(["no `cluster` block"] if read_layout(config) is None else []),
        *(["no config.json of policy.model_name on this machine"] if read_model(config) is None else []),
    ]


def _optimizer(needed: Needed, qarl: Any) -> str:
    if needed.refit is None:
        return ""
    held = f"{needed.learner.parts['optimizer'] / GIB:.1f} of the optimizer"
    moved = f"{held} stay on the GPU" if qarl.resident else f"{held} go to the host and back in each step"
    host = ", ".join(f"{name} {size / GIB:.0f}" for name, size in needed.host.items() if size)
    return f"{moved}; {sum(needed.host.values()) / GIB:.0f} of a node's host memory ({host}); "


def _checkpoints(config: Mapping[str, Any]) -> str:
    if not look_up(config, "checkpointing.enabled", False):
        return "none"
    return str(look_up(config, "checkpointing.checkpoint_dir", "?"))
