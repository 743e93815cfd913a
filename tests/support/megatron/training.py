"""One training step of a small model, by the embedded engine's learner and by Megatron on a layout."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.megatron.compare import compared_grads, compared_published, compared_step
from support.megatron.models import DEVICE, TINY, Layout, Shape, hugging_face_model, megatron_chunks, parallel
from support.megatron.routes import Routes, this_context_rank
from support.megatron.whole import whole_grads

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from qarl_kernels import QuantFormat, get_format
from qarl_nemo.layers.install import install
from qarl_nemo.megatron.alignment import Alignment, bump_on_step
from qarl_nemo.refit.publish import publish

BATCH = 4


FORMAT = get_format("w4a16", group_size=32)


@dataclass(frozen=True)
class Case:
    """What is trained: the model, what it executes, in which dtype, and how many documents are packed in a sequence."""

    fmt: QuantFormat = FORMAT
    targets: tuple[str, ...] = ("experts",)
    backward: str = "dequantized"
    dtype: torch.dtype = torch.float32
    shape: Shape = TINY
    documents: int = 1


def tokens(shape: Shape = TINY) -> Tensor:
    """[B, S + 1]; the last column is only a label."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(shape.vocab, (BATCH, shape.sequence + 1), generator=generator).to(DEVICE)


def reference(case: Case, *, backward: bool = True) -> dict[str, Any]:
    """What the embedded engine's learner gives, with the same weights."""
    shape = case.shape
    model = hugging_face_model(case.dtype, shape)
    report = install(model, case.targets, case.fmt, backward=case.backward)
    result = {"published": publish(report.weights, model.named_parameters(), case.fmt, version=0).tensors}
    if backward:
        batch = tokens(shape)
        logits = nn.functional.pad(model(batch[:, :-1]).logits, (0, shape.padded_vocab - shape.vocab))
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        result |= {"loss": float(loss), "grads": grads}
    return result


def _packed(length: int, documents: int) -> dict[str, Any]:
    if documents == 1:
        return {}
    ends = torch.arange(documents + 1, device=DEVICE, dtype=torch.int32) * (length // documents)
    packed = PackedSeqParams("thd", ends, ends, ends, ends, length // documents, length // documents)
    return {"packed_seq_params": packed}


def forward_step(
    length: int, documents: int, routes: Routes | None, batches: Iterator[tuple[int, Tensor]], model: nn.Module
) -> tuple:
    """Megatron's protocol: the output, and how to get the loss of it."""
    sequence, batch = next(batches)
    positions = torch.arange(length // documents, device=DEVICE).repeat(documents).expand(len(batch), -1)
    mask = ~torch.ones(1, 1, length, length, dtype=torch.bool, device=DEVICE).tril()
    tensors = (batch[:, :-1], batch[:, 1:], positions)
    inputs, labels, positions = (this_context_rank(tensor, documents).contiguous() for tensor in tensors)
    if routes is not None:
        routes.before(model, sequence, documents)
    output = model(inputs, positions, mask, labels=labels, **_packed(length, documents))
    if routes is not None:
        routes.after(model, sequence)

    def loss_of(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # Megatron sums over context-parallel ranks and divides the result in place by the number of microbatches.
        loss = per_token.sum() / batch[:, 1:].numel()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_of


def forward_backward(
    model: list[nn.Module], shape: Shape = TINY, routes: Routes | None = None, documents: int = 1
) -> float:
    """This rank's share of the batch, gradients reduced; the loss of the whole batch."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    share = BATCH // size
    mine = list(enumerate(tokens(shape).chunk(size)[rank].split(1), start=rank * share))
    for chunk in model:
        chunk.zero_grad_buffer()
    losses = get_forward_backward_func()(
        forward_step_func=functools.partial(forward_step, shape.sequence, documents, routes),
        data_iterator=[iter(mine) for _ in model],
        model=model,
        num_microbatches=len(mine),
        seq_length=shape.sequence,
        micro_batch_size=1,
        forward_only=False,
    )
    finalize_model_grads(model)
    total = torch.stack([entry["loss"] for entry in losses]).mean() if losses else torch.zeros((), device=DEVICE)
    dist.all_reduce(total)
    return float(total / parallel_state.get_tensor_model_parallel_world_size() / size)


def _step(model: list[nn.Module], alignment: Alignment, optimizer: str, dtype: torch.dtype) -> None:
    if optimizer:
        distributed = optimizer == "adam"
        config = OptimizerConfig(
            optimizer=optimizer,
            lr=0.01,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        )
        made = get_megatron_optimizer(config, model)
        bump_on_step(made, alignment.changes)
        made.step()
        return
    with torch.no_grad():
        for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
            parameter.sub_(parameter.main_grad, alpha=0.5)
    alignment.changes.bump()


def fuse_accumulation(model: list[nn.Module]) -> None:
    """Set `gradient_accumulation_fusion` on built modules, because Megatron's own output layer needs Apex for it."""
    for module in (module for chunk in model for module in chunk.modules()):
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def build(
    layout: Layout, case: Case, optimizer: str, *, fused_accumulation: bool, overlap: bool, **options: Any
) -> tuple[list[nn.Module], Alignment]:
    """This rank's stages of the aligned model, wrapped as the optimizer needs them."""
    alignment = Alignment(case.fmt, case.targets, case.backward)
    chunks = megatron_chunks(layout, alignment, case.dtype, case.shape, **options)
    if fused_accumulation:
        fuse_accumulation(chunks)
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=optimizer == "adam",
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    return [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks], alignment


def train_within(
    layout: Layout,
    case: Case,
    expected: dict[str, Any],
    *,
    optimizer: str = "",
    fused_accumulation: bool = False,
    overlap: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train one step within the layout's groups, publish before and after it; how all that compares."""
    routes, vocab = expected.get("routes"), case.shape.vocab
    options |= {"fused_accumulation": fused_accumulation, "overlap": overlap}
    options["moe_enable_routing_replay"] = routes is not None
    model, alignment = build(layout, case, optimizer, **options)
    found: dict[str, Any] = compared_published(model, vocab, expected["published"])
    found["loss"] = forward_backward(model, case.shape, routes, case.documents)
    found["loss_error"] = abs(found["loss"] / expected["loss"] - 1)
    # With a distributed optimizer each rank holds only part of the reduced gradients.
    found["grad_errors"] = None if optimizer == "adam" else compared_grads(model, expected["grads"])
    _step(model, alignment, optimizer, case.dtype)
    return found | compared_step(model, vocab, case.fmt, expected["published"])


def train(layout: Layout, case: Case, expected: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Make a layout's groups, and `train_within` them."""
    with parallel(layout):
        return train_within(layout, case, expected, **options)


def record(case: Case) -> dict[str, Any]:
    """What one expert and tensor parallel rank gives, within its groups, and what the whole model publishes."""
    routes = Routes()
    options = {"fused_accumulation": False, "overlap": False, "moe_enable_routing_replay": True}
    model, _ = build(Layout(), case, "", **options)
    loss = forward_backward(model, case.shape, routes, case.documents)
    routes.share()
    grads = {name: grad.cpu() for name, grad in whole_grads(model)}
    return {"loss": loss, "grads": grads, "routes": routes} | reference(case, backward=False)
