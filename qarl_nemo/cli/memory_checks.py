"""Checks of `qarl memory` on a learner, its engine and its checkpoint, of which `memory` itself knows too little."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from qarl_formats import QuantFormat, VllmKernels, get_format
from qarl_nemo.architecture import FAMILIES, config_file, read_architecture
from qarl_nemo.checkpoints import open_checkpoint
from qarl_nemo.checkpoints.scheme import nearest_format, stored_format
from qarl_nemo.checkpoints.shapes import engine_problems
from qarl_nemo.checkpoints.stored import Stored
from qarl_nemo.files import read_json
from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.megatron.checks import shard_problems
from qarl_nemo.memory import EngineRanks, Learner, ModelSize, Parallelism


def layouts_that_start(
    model: ModelSize, ranks: Sequence[Parallelism], learner: Learner, *, named: bool
) -> list[Parallelism]:
    """Return the layouts of which every shard can be stored in the learner's format.

    Args:
        model: the model's sizes.
        ranks: the layouts.
        learner: its format and targets count.
        named: whether the user named them, so that each of them must start.

    Raises:
        ValueError: none starts, or one that was named does not; every reason is listed.
    """
    problems = {one.name: _shard_problems(model, one, learner) for one in ranks}
    starting = [one for one in ranks if not problems[one.name]]
    if not starting or (named and any(problems.values())):
        listed = [f"layout {name}: {problem}" for name, found in problems.items() for problem in found]
        raise ValueError("the learner would not start:\n  " + "\n  ".join(listed))
    return starting


def _shard_problems(model: ModelSize, ranks: Parallelism, learner: Learner) -> list[str]:
    sizes = {
        "hidden_size": model.hidden,
        "moe_ffn_hidden_size": model.inner,
        "ffn_hidden_size": model.inner,
        "kv_channels": model.head_dim,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "tensor_model_parallel_size": ranks.tp,
        "expert_tensor_parallel_size": ranks.etp,
    }
    assert learner.record is not None
    return shard_problems(SimpleNamespace(**sizes), Alignment(learner.record, learner.targets))


def refusals(model: Path, learner: Learner, engine: EngineRanks | None = None) -> list[str]:
    """Say why no kernel of vLLM takes the weights of a run.

    What a whole weight lacks its parts lack, too, so that one GPU stands for any number.

    Args:
        model: Hugging Face folder, or its config.json.
        learner: its format and targets count.
        engine: how GPUs share the engine that was asked for.

    Raises:
        ValueError: the format cannot store the weights, or they are not served by the engine that was asked for.
    """
    assert learner.record is not None
    size, fmt = read_architecture(model, tuple(FAMILIES)), learner.record
    # Kernels that take any shape leave what storing takes.
    stored = replace(fmt, vllm=VllmKernels(fmt.vllm.experts, fmt.vllm.linear))
    if lines := [line for _, line in engine_problems(size, stored, learner.targets, 1)]:
        raise ValueError("\n  ".join([f"{fmt.name} cannot store these weights:", *lines]))
    if not fmt.vllm.refits:
        return [f"vLLM serves checkpoints, but takes no refits of {fmt.name}"]
    tp, whole = (1, False) if engine is None else (engine.tp, engine.ep > 1)
    lines = [line for _, line in engine_problems(size, fmt, learner.targets, tp, whole_experts=whole)]
    if lines and engine is not None:
        raise ValueError("\n  ".join(["no engine would start:", *(f"engine_tp={tp}: {line}" for line in lines)]))
    return lines


def require_own_format(model: Path, learner: Learner) -> None:
    """Require that a quantized checkpoint, which is executed as it is stored, takes the bytes that are computed.

    Args:
        model: Hugging Face folder, or its config.json.
        learner: its format and targets count.

    Raises:
        ValueError: the checkpoint has another format or other targets; names the options that say so. Or no run
            executes its format.
    """
    file = config_file(model)
    quantization = read_json(file, "a model's config.json").get("quantization_config") or {}
    stored = stored_format(quantization)
    if stored is None and quantization:
        raise ValueError(
            f"{model} is quantized, and no run trains on it: {nearest_format(quantization)}; name the BF16 model that "
            "it was made from"
        )
    if stored is None or learner.record is None:
        return
    held = get_format(stored.name).num_bits
    if stored.num_bits != held:
        raise ValueError(
            f"{model}: its codes are stored in their own {stored.num_bits} bits, and a run holds {stored.name} in "
            f"{held}; make one with qarl quantize without --own-width"
        )
    options = []
    if _taken(stored) != _taken(learner.record):
        size = f" --group-size {stored.group_size}" if stored.group_sizes else ""
        options.append(f"--format {stored.name}{size}")
    # A config.json alone does not say which layers these are.
    own = Stored.of(open_checkpoint(file.parent)) if any(file.parent.glob("*.safetensors")) else None
    if own and set(own.targets) != set(learner.targets):
        options.append(f"--targets {','.join(own.targets)}")
    if options:
        raise ValueError(
            f"{model} is stored as {stored.name}, as which a frozen base is executed: add {' '.join(options)}"
        )


def _taken(fmt: QuantFormat) -> tuple[float, str, int]:
    """Return what decides how much memory a format takes, and which engines serve it beside adapters."""
    return fmt.bits_per_weight, fmt.activation_kind, fmt.operand_bytes
