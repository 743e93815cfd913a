"""Every layout of a tiny aligned Megatron model on four gloo ranks; what each gave goes to a file, for the tests.

A program of its own: Megatron on a CPU needs patches that no other test should meet, and ranks are processes.
`python run_megatron.py <file>`
"""

import copy
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron_on_cpu import CudaMeansCpu
from megatron_models import PADDED_VOCAB, SEQUENCE, VOCAB, Layout, hugging_face_model, megatron_model
from torch import Tensor, nn

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from qarl_kernels import get_format, quantize_weight
from qarl_nemo.layers.install import install
from qarl_nemo.nemo.alignment import Alignment, aligned_weights
from qarl_nemo.nemo.gather import gather_sharded, gather_stacked
from qarl_nemo.nemo.hf_parameters import layer_parameter
from qarl_nemo.nemo.publish import publish_shards
from qarl_nemo.refit.publish import publish

WORLD, BATCH = 4, 4
FORMAT = get_format("w4a16", group_size=32)
RUNS = {
    "tp1_ep1": (Layout(), {}),
    "ep2": (Layout(ep=2), {}),
    "ep4": (Layout(ep=4), {}),
    "tp2_ep2": (Layout(tp=2, ep=2), {}),
    "tp2_ep2_etp2": (Layout(tp=2, ep=2, etp=2), {}),
    "pp2": (Layout(pp=2), {}),
    "pp2_ep2": (Layout(pp=2, ep=2), {}),
    "ep2_allgather": (Layout(ep=2), {"moe_token_dispatcher_type": "allgather"}),
    "tp2_ep2_etp2_allgather": (Layout(tp=2, ep=2, etp=2), {"moe_token_dispatcher_type": "allgather"}),
    "ep2_full_recompute": (
        Layout(ep=2),
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "ep2_selective_recompute": (Layout(ep=2), {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    "ep4_fused_accumulation": (Layout(ep=4), {"fused": True}),
}


def tokens() -> Tensor:
    """[B, S + 1]; the last column is a label alone."""
    return torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(3))


def reference() -> dict:
    """What the embedded engine's learner gives, with the same weights."""
    model = hugging_face_model()
    report = install(model, ("experts",), FORMAT)
    batch = tokens()
    logits = nn.functional.pad(model(batch[:, :-1]).logits, (0, PADDED_VOCAB - VOCAB))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    return {
        "loss": float(loss),
        "grads": {name: parameter.grad for name, parameter in model.named_parameters()},
        "published": publish(report.weights, model.named_parameters(), FORMAT, version=0).tensors,
    }


def forward_step(batches: Iterator[Tensor], model: nn.Module) -> tuple:
    """Megatron's protocol: the output, and how to get the loss of it."""
    batch = next(batches)
    positions = torch.arange(SEQUENCE).expand(len(batch), -1)
    mask = ~torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    output = model(batch[:, :-1], positions, mask, labels=batch[:, 1:])
    return output, lambda per_token: (per_token.mean(), {"loss": per_token.mean().detach()})


def train_step(model: nn.Module, config) -> float:
    """Forward and backward of this rank's share of the batch, gradients reduced; the loss of the whole batch."""
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
    total = torch.stack([entry["loss"] for entry in losses]).mean() if losses else torch.tensor(0.0)
    dist.all_reduce(total)
    config_copies = parallel_state.get_tensor_model_parallel_world_size() * size
    return float(total / config_copies)


def whole_grads(model: nn.Module) -> dict[str, Tensor]:
    """This stage's gradients under Hugging Face's names; experts stacked."""
    grads: dict[str, Tensor] = {}
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    expert_tensor_group = parallel_state.get_expert_tensor_parallel_group()
    expert_group = parallel_state.get_expert_model_parallel_group()
    for layer in model.module.decoder.layers:
        for name, parameter in layer.named_parameters():
            if "mlp.experts" in name:
                continue
            grad = parameter.main_grad
            if getattr(parameter, "tensor_model_parallel", False):
                grad = gather_sharded(grad, tensor_group, parameter.partition_dim)
            grads.update(layer_parameter(layer.layer_number - 1, name, grad, layer.config))
        experts = layer.mlp.experts
        for linear, dim, parts in ((experts.linear_fc1, -2, 2), (experts.linear_fc2, -1, 1)):
            stacked = torch.stack([master.main_grad for master in linear.aligned.master])
            local = gather_sharded(stacked, expert_tensor_group, dim, num_parts=parts)
            grads[linear.aligned.name] = gather_stacked(local, expert_group)
    return grads


def whole_masters(model: nn.Module) -> dict[str, Tensor]:
    """This stage's expert masters, gathered: what publishing never does."""
    masters = {}
    for weight in aligned_weights([model]):
        dim, parts = (-2, 2) if "gate_up" in weight.name else (-1, 1)
        stacked = torch.stack([master.detach() for master in weight.master])
        local = gather_sharded(stacked, parallel_state.get_expert_tensor_parallel_group(), dim, num_parts=parts)
        masters[weight.name] = gather_stacked(local, parallel_state.get_expert_model_parallel_group())
    return masters


def run(layout: Layout, options: dict) -> dict:
    """Build, train one step, publish before and after it."""
    options = dict(options)
    fused = options.pop("fused", False)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    alignment = Alignment(FORMAT)
    core = megatron_model(layout, alignment, **options)
    if fused:
        for layer in core.decoder.layers:
            # Megatron's own linears need Apex for it.
            layer.mlp.experts.config = copy.copy(core.config)
            layer.mlp.experts.config.gradient_accumulation_fusion = True
    model = DistributedDataParallel(
        core.config, DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False), core
    )
    published = {name: tensor.clone() for name, tensor in publish_shards([model], vocab_size=VOCAB)}
    loss = train_step(model, core.config)
    result = {"loss": loss, "grads": whole_grads(model), "published": published}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.main_grad, alpha=0.5)
    alignment.version.bump()
    stepped = dict(publish_shards([model], vocab_size=VOCAB))
    result["stepped"] = {name: tensor.clone() for name, tensor in stepped.items() if "experts" in name}
    result["requantized"] = {
        f"{name}.{suffix}": tensor
        for name, master in whole_masters(model).items()
        for suffix, tensor in quantize_weight(master, FORMAT).tensors.items()
    }
    parallel_state.destroy_model_parallel()
    return result


def rank_main(rank: int, store: str, out: str) -> None:
    """All runs on one rank; every rank's results are kept, since stages hold different layers."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    with CudaMeansCpu():
        results = {name: run(layout, options) for name, (layout, options) in RUNS.items()}
    torch.save(results, f"{out}.rank{rank}")
    dist.barrier()
    dist.destroy_process_group()


def main(out: str) -> None:
    """Write the reference's results to `out`, and each rank's to `out`.rank<n>."""
    torch.set_num_threads(1)
    torch.save(reference(), out)
    store = f"{out}.store"
    Path(store).unlink(missing_ok=True)
    # Forked, not spawned: Megatron is imported once.
    mp.start_processes(rank_main, args=(store, out), nprocs=WORLD, start_method="fork")


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(sys.argv[1])
