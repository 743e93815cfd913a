"""The aligned model inside NeMo-RL's policy worker: how it is built and checked, and how it runs in other formats.

NeMo-RL builds model and reference model from one Bridge provider. Meanwhile the provider's layer spec is the aligned
one; afterwards it is the provider's own again, because checkpoints record the provider and must load without this
package.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from qarl_kernels import QuantFormat
from qarl_nemo.megatron.alignment import Alignment, aligned_weights, release
from qarl_nemo.megatron.engine_rounding import Rotating
from qarl_nemo.megatron.moe_layer import AlignedMoELayer
from qarl_nemo.megatron.spec import align_spec


@contextmanager
def aligned_provider(worker_module: Any, alignment: Alignment) -> Iterator[None]:
    """Make NeMo-RL's policy worker build aligned models inside the block.

    Args:
        worker_module: `nemo_rl.models.policy.workers.megatron_policy_worker`.
        alignment: what they execute.

    Yields:
        Nothing; the worker sets up its models meanwhile.
    """
    setup, changed = worker_module.setup_model_and_optimizer, []

    def aligned_setup(policy_cfg: Any, megatron_cfg: Any, *arguments: Any, **named: Any) -> Any:
        provider = megatron_cfg.model
        changed.append((provider, provider.transformer_layer_spec))
        provider.transformer_layer_spec = aligned_spec(provider.transformer_layer_spec, alignment)
        return setup(policy_cfg, megatron_cfg, *arguments, **named)

    worker_module.setup_model_and_optimizer = aligned_setup
    try:
        yield
    finally:
        worker_module.setup_model_and_optimizer = setup
        for provider, own_spec in changed:
            provider.transformer_layer_spec = own_spec


def aligned_spec(own: Any, alignment: Alignment) -> Callable[..., Any]:
    """Return the aligned form of a Bridge provider's layer spec.

    Args:
        own: the provider's own: a spec, or a function that makes one.
        alignment: what the model executes.

    Returns:
        A function of the provider, as Bridge accepts it for `transformer_layer_spec`.
    """

    def spec(config: Any, vp_stage: int | None = None) -> Any:
        if isinstance(own, ModuleSpec):
            plain = own
        elif "vp_stage" in inspect.signature(own).parameters:
            plain = own(config, vp_stage=vp_stage)
        else:
            plain = own(config)
        transformer_engine = getattr(config, "transformer_impl", "") != "local"
        return align_spec(plain, config, alignment, transformer_engine=transformer_engine, vp_stage=vp_stage)

    return spec


def require_aligned(model: Sequence[nn.Module], alignment: Alignment) -> str:
    """Refuse a model that would not execute what its engine serves.

    Args:
        model: this rank's chunks.
        alignment: what they should execute.

    Returns:
        What runs in which format, for the log.

    Raises:
        RuntimeError: a targeted layer is not aligned; all are listed.
    """
    layers = [module for chunk in model for module in chunk.modules() if isinstance(module, TransformerLayer)]
    problems, counts = [], dict.fromkeys(alignment.targets, 0)
    for layer in layers:
        name = f"layer {layer.layer_number}"
        if alignment.engine_rounding and not isinstance(layer.self_attention, Rotating):
            problems.append(f"{name}: {type(layer.self_attention).__name__} rounds where Megatron does")
        if isinstance(layer.mlp, AlignedMoELayer):
            counts["experts"] += 1
        elif isinstance(layer.mlp, MoELayer):
            problems.append(f"{name}: experts are {type(layer.mlp).__name__}")
        elif "mlp" in counts:
            counts["mlp"] += 1
            problems += _unaligned(name, layer.mlp.linear_fc1, layer.mlp.linear_fc2)
        if "attention" in counts:
            counts["attention"] += 1
            problems += _unaligned(name, layer.self_attention.linear_qkv, layer.self_attention.linear_proj)
    problems += [
        f"{weight.name} executes {weight.format.name}"
        for weight in aligned_weights(model)
        if weight.format != alignment.format
    ]
    if layers and not any(counts.values()):
        problems.append("no layer of this rank is a target")
    if problems:
        raise RuntimeError(
            f"the learner would not execute {alignment.format.name} in targets {list(alignment.targets)}:\n  "
            + "\n  ".join(problems)
        )
    return f"{alignment.format.name} in " + ", ".join(f"{target} of {count} layers" for target, count in counts.items())


def _unaligned(layer: str, *linears: nn.Module) -> list[str]:
    return [f"{layer}: {type(linear).__name__}" for linear in linears if not hasattr(linear, "aligned")]


@contextmanager
def executing(model: Sequence[nn.Module], fmt: QuantFormat) -> Iterator[None]:
    """Make an aligned model execute and publish another format inside the block.

    Args:
        model: this rank's chunks.
        fmt: the other format; bf16 is the master weights themselves.

    Yields:
        Nothing; a forward inside the block must have its backward there, too.
    """
    own = [(one, one.format) for one in _formatted(model)]
    execute(model, fmt)
    try:
        yield
    finally:
        release(model)
        for one, its_own in own:
            one.format = its_own


def execute(model: Sequence[nn.Module], fmt: QuantFormat) -> None:
    """Make an aligned model execute and publish another format from now on."""
    release(model)
    for one in _formatted(model):
        one.format = fmt


def _formatted(model: Sequence[nn.Module]) -> list[Any]:
    dispatchers = [
        module.token_dispatcher for chunk in model for module in chunk.modules() if isinstance(module, AlignedMoELayer)
    ]
    return [*aligned_weights(model), *dispatchers]
