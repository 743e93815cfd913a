"""One training step of the tiny model, by the embedded engine's learner and by Megatron on a layout."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron_models import DEVICE, PADDED_VOCAB, SEQUENCE, VOCAB, Layout, hugging_face_model, megatron_model, parallel
from torch import Tensor, nn

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from qarl_kernels import QuantFormat, get_format, quantize_weight
from qarl_nemo.layers.install import install
from qarl_nemo.nemo.alignment import Alignment, aligned_weights, bump_on_step
from qarl_nemo.nemo.gather import gather_sharded, gather_stacked
from qarl_nemo.nemo.grouped_linear import AlignedGroupedLinear
from qarl_nemo.nemo.hf_parameters import layer_parameter
from qarl_nemo.nemo.publish import publish_shards
from qarl_nemo.refit.publish import publish

BATCH = 4
FORMAT = get_format("w4a16", group_size=32)


def tokens() -> Tensor:
    """[B, S + 1]; the last column is a label alone."""
    return torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(3)).to(DEVICE)


def reference(
    mode: str = "dequantized",
    targets: tuple[str, ...] = ("experts",),
    fmt: QuantFormat = FORMAT,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """What the embedded engine's learner gives, with the same weights."""
    model = hugging_face_model(dtype)
    report = install(model, targets, fmt, mode=mode)
    batch = tokens()
    logits = nn.functional.pad(model(batch[:, :-1]).logits, (0, PADDED_VOCAB - VOCAB))
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    return {
        "loss": float(loss),
        "grads": {name: parameter.grad for name, parameter in model.named_parameters()},
        "published": publish(report.weights, model.named_parameters(), fmt, version=0).tensors,
    }


def forward_step(batches: Iterator[Tensor], model: nn.Module) -> tuple:
    """Megatron's protocol: the output, and how to get the loss of it."""
    batch = next(batches)
    positions = torch.arange(SEQUENCE, device=DEVICE).expand(len(batch), -1)
    mask = ~torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=DEVICE).tril()
    output = model(batch[:, :-1], positions, mask, labels=batch[:, 1:])
    return output, lambda per_token: (per_token.mean(), {"loss": per_token.mean().detach()})


def forward_backward(model: nn.Module) -> float:
    """This rank's share of the batch, gradients reduced; the loss of the whole batch."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = tokens().chunk(size)[rank].split(1)
    model.zero_grad_buffer()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(mine),
        model=[model],
        num_microbatches=len(mine),
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
    )
    finalize_model_grads([model])
    total = torch.stack([entry["loss"] for entry in losses]).mean() if losses else torch.zeros((), device=DEVICE)
    dist.all_reduce(total)
    return float(total / parallel_state.get_tensor_model_parallel_world_size() / size)


def _whole_experts(linear: nn.Module, shards: list[Tensor]) -> Tensor:
    dim, num_parts = (-2, 2) if "gate_up" in linear.aligned.name else (-1, 1)
    group = parallel_state.get_expert_tensor_parallel_group()
    local = gather_sharded(torch.stack(shards), group, dim, num_parts=num_parts)
    return gather_stacked(local, parallel_state.get_expert_model_parallel_group())


def whole_grads(model: nn.Module) -> dict[str, Tensor]:
    """This stage's gradients under Hugging Face's names; experts stacked."""
    grads: dict[str, Tensor] = {}
    group = parallel_state.get_tensor_model_parallel_group()
    for layer in model.module.decoder.layers:
        for name, parameter in layer.named_parameters():
            if "mlp.experts" in name:
                continue
            grad = parameter.main_grad
            if getattr(parameter, "tensor_model_parallel", False):
                grad = gather_sharded(grad, group, parameter.partition_dim)
            grads.update(layer_parameter(layer.layer_number - 1, name, grad, layer.config))
        for linear in (layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2):
            shards = [master.main_grad for master in linear.aligned.master]
            grads[linear.aligned.name] = _whole_experts(linear, shards)
    return {name: grad.clone() for name, grad in grads.items()}


def requantized(model: nn.Module, fmt: QuantFormat) -> dict[str, Tensor]:
    """This stage's expert masters gathered, what publishing never does, and quantized again."""
    tensors = {}
    for module in model.modules():
        if isinstance(module, AlignedGroupedLinear):
            whole = _whole_experts(module, [master.detach() for master in module.aligned.master])
            parts = quantize_weight(whole, fmt).tensors
            tensors.update({f"{module.aligned.name}.{suffix}": part for suffix, part in parts.items()})
    return tensors


def _step(model: nn.Module, alignment: Alignment, distributed_adam: bool) -> None:
    if distributed_adam:
        config = OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True)
        optimizer = get_megatron_optimizer(config, [model])
        bump_on_step(optimizer, alignment.version)
        optimizer.step()
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.main_grad, alpha=0.5)
    alignment.version.bump()


def train(
    layout: Layout,
    *,
    mode: str = "dequantized",
    targets: tuple[str, ...] = ("experts",),
    fmt: QuantFormat = FORMAT,
    dtype: torch.dtype = torch.float32,
    fused_accumulation: bool = False,
    distributed_adam: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Build, train one step, publish before and after it."""
    with parallel(layout):
        alignment = Alignment(fmt, targets, mode)
        core = megatron_model(layout, alignment, dtype, **options)
        if fused_accumulation:
            for layer in core.decoder.layers:
                # Megatron's own linears need Apex for it.
                layer.mlp.experts.config = copy.copy(core.config)
                layer.mlp.experts.config.gradient_accumulation_fusion = True
        settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed_adam)
        model = DistributedDataParallel(core.config, settings, core)
        published = {name: tensor.clone() for name, tensor in publish_shards([model], vocab_size=VOCAB)}
        shards = publish_shards([model], vocab_size=VOCAB, gather_experts=False)
        result = {
            "published": published,
            "shards": {name: tensor.clone() for name, tensor in shards if "experts" in name},
            "ep_rank": parallel_state.get_expert_model_parallel_rank(),
            "loss": forward_backward(model),
            # A distributed optimizer's ranks hold a part of the reduced gradients each.
            "grads": None if distributed_adam else whole_grads(model),
        }
        _step(model, alignment, distributed_adam)
        stepped = publish_shards([model], vocab_size=VOCAB)
        result["stepped"] = {name: tensor.clone() for name, tensor in stepped if "experts" in name}
        result["requantized"] = requantized(model, fmt)
        result["weights"] = len(aligned_weights([model]))
        return result
