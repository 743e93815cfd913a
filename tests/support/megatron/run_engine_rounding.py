"""Norms, residual stream and rotation of a tiny aligned Megatron model in BF16, against the embedded engine's learner.

`python -m support.megatron.run_engine_rounding <folder>`
"""

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

from support.megatron.compare import compared_grads
from support.megatron.models import DEVICE, TINY, Layout, hugging_face_model, megatron_chunks, parallel
from support.megatron.ranks import run_ranks
from support.megatron.routes import Routes
from support.megatron.training import BATCH, forward_backward, tokens

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.packed_seq_params import PackedSeqParams

from qarl_kernels import get_format
from qarl_nemo.layers.engine_rounding import rotate
from qarl_nemo.layers.install import install
from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.train.engine_forward import follow_engine

FORMAT, TARGETS = get_format("w4a16", group_size=32), ("experts", "attention")
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ATTENTION_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
# The first records the routes that the others replay.
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "dp4": (Layout(), {}),
    "ep2": (Layout(ep=2), {}),
    "pp2": (Layout(pp=2), {}),
    "tp2_ep2": (Layout(tp=2, ep=2), {}),
    "dp4_full_recompute": (Layout(), FULL_RECOMPUTE),
    "dp4_attention_recompute": (Layout(), ATTENTION_RECOMPUTE),
}
NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "q_layernorm": "self_attn.q_norm",
    "k_layernorm": "self_attn.k_norm",
}
Record = dict[tuple[int, str], tuple[Tensor, Tensor]]


class TorchAttention(nn.Module):
    """Torch's attention for both models, because Megatron's own adds in another order."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[S, B, heads, D] each -> [S, B, heads D]."""
        heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def learners() -> tuple[nn.Module, nn.Module]:
    """The embedded engine's, and one that rounds where transformers does."""
    plain = hugging_face_model(torch.bfloat16)
    plain.config._attn_implementation = "sdpa"
    followed = follow_engine(copy.deepcopy(plain))
    install(followed, TARGETS, FORMAT)
    return followed, plain


def megatron(layout: Layout, alignment: Alignment, **options: Any) -> list[nn.Module]:
    """This rank's stages."""
    chunks = megatron_chunks(layout, alignment, torch.bfloat16, moe_enable_routing_replay=True, **options)
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        layer.self_attention.core_attention = TorchAttention()
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]


def operators_of(model: list[nn.Module]) -> Iterator[tuple[int, str, nn.Module]]:
    """Layer, name and module; the final norm is of layer -1."""
    for decoder in (chunk.module.decoder for chunk in model):
        for layer in decoder.layers:
            attention = layer.self_attention
            modules = {name: getattr(layer, name, None) or getattr(attention, name) for name in NORMS}
            modules |= {"core_attention": attention.core_attention, "attention": attention, "mlp": layer.mlp}
            yield from ((layer.layer_number - 1, name, module) for name, module in (modules | {"layer": layer}).items())
        if decoder.final_layernorm is not None:
            yield -1, "final_layernorm", decoder.final_layernorm


def recorded(model: list[nn.Module]) -> Record:
    """Make every operator keep its first input and output; core attention keeps its query and key."""
    record: Record = {}

    def keep(layer: int, name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, args: Any, named: Any, out: Any) -> None:
            read = args[0] if args else named["hidden_states"]
            put = args[1] if name == "core_attention" else out[0] if isinstance(out, tuple) else out
            record.setdefault((layer, name), (read.detach().clone(), put.detach().clone()))

        module.register_forward_hook(hook, with_kwargs=True)

    for operator in operators_of(model):
        keep(*operator)
    return record


def norm_of(model: nn.Module, layer: int, name: str) -> nn.Module:
    """The norm of a Hugging Face model that Megatron names so."""
    return model.model.norm if layer < 0 else model.model.layers[layer].get_submodule(NORMS[name])


def compared(record: Record, followed: nn.Module, plain: nn.Module) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Name, Megatron's output, and what the engine's rounding and another one make of the same inputs."""
    positions = torch.arange(TINY.sequence, device=DEVICE)[None]
    cos, sin = followed.model.rotary_emb(torch.empty(0, dtype=torch.bfloat16, device=DEVICE), positions)
    for (layer, name), (read, put) in record.items():
        if name.endswith("layernorm"):
            yield name, put, norm_of(followed, layer, name)(read), norm_of(plain, layer, name)(read)
        if name == "core_attention":
            for head, rotated in (("q", read), ("k", put)):
                before = record[layer, f"{head}_layernorm"][1].transpose(0, 1)
                wrong, _ = apply_rotary_pos_emb(before, before, cos, sin, unsqueeze_dim=2)
                yield f"rotated_{head}", rotated.transpose(0, 1), rotate(before, cos, sin), wrong
        if name == "layer":
            first, attention, mlp = (
                record[layer, "input_layernorm"][0],
                record[layer, "attention"][1],
                record[layer, "mlp"][1],
            )
            middle, unrounded = first + attention, first.float() + attention.float()
            actual = torch.stack([record[layer, "pre_mlp_layernorm"][0], put])
            wrong = torch.stack([middle, (unrounded + mlp.float()).bfloat16()])
            yield "residual", actual, torch.stack([middle, middle + mlp]), wrong


def differing(record: Record, followed: nn.Module, plain: nn.Module) -> dict[str, tuple[int, int]]:
    """For each kind of operator, how many values differ from the engine's, and from those of another rounding."""
    counts: dict[str, tuple[int, int]] = {}
    with torch.no_grad():
        for name, actual, right, wrong in compared(record, followed, plain):
            before = counts.get(name, (0, 0))
            counts[name] = (before[0] + int((actual != right).sum()), before[1] + int((actual != wrong).sum()))
    return counts


def embedded_run(model: nn.Module) -> dict[str, Any]:
    """Hidden states after each layer [B, S, H] and the loss of every sequence, and the gradients of their mean."""
    hidden: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda *hook: hidden.append(hook[-1].detach())) for layer in model.model.layers
    ]
    losses = []
    for one in tokens().split(1):
        logits = nn.functional.pad(model(one[:, :-1]).logits, (0, TINY.padded_vocab - TINY.vocab))
        losses.append(nn.functional.cross_entropy(logits.float().flatten(0, 1), one[:, 1:].flatten()))
    torch.stack(losses).mean().backward()
    for hook in hooks:
        hook.remove()
    return {
        "hidden": [torch.cat(hidden[layer :: TINY.layers]) for layer in range(TINY.layers)],
        "loss": float(torch.stack(losses).mean()),
        "grads": {name: parameter.grad for name, parameter in model.named_parameters()},
    }


def same_hidden(record: Record, hidden: list[Tensor]) -> bool:
    """Whether this rank's layers put out the embedded learner's bits for this rank's first sequence."""
    sequence = parallel_state.get_data_parallel_rank() * BATCH // parallel_state.get_data_parallel_world_size()
    layers = {layer: put.squeeze(1) for (layer, name), (_, put) in record.items() if name == "layer"}
    return all(torch.equal(put, hidden[layer][sequence]) for layer, put in layers.items())


def layout_case(
    layout: Layout, alignment: Alignment, options: dict[str, Any], routes: Routes, run: dict[str, Any]
) -> dict[str, Any]:
    """One training step of a layout."""
    with parallel(layout):
        model = megatron(layout, alignment, **options)
        record = recorded(model)
        loss = forward_backward(model, routes=routes)
        if not routes.keys() >= {(sequence, 1) for sequence in range(BATCH)}:
            routes.share()
        order = {
            (layer, name): norm.after_add for layer, name, norm in operators_of(model) if hasattr(norm, "after_add")
        }
        return {
            "differing": differing(record, *run["learners"]),
            "after_add": order,
            "same_hidden": layout.tp == 1 and same_hidden(record, run["hidden"]),
            "loss_error": abs(loss / run["loss"] - 1),
            "grad_errors": compared_grads(model, run["grads"]),
        }


class Kept(nn.Module):
    """Core attention that keeps its query and key."""

    def forward(self, query: Tensor, key: Tensor, *_: Any, **__: Any) -> Tensor:
        """[T, (B,) heads, D] -> [T, (B,) heads D]."""
        self.kept = torch.cat([query, key], dim=-2).view(len(query), -1)
        return query.flatten(-2)


@torch.no_grad()
def packed() -> dict[str, Any]:
    """Queries and keys of two packed documents, of each by itself, and what is said without angles."""
    with parallel(Layout()):
        (model,) = megatron_chunks(Layout(), Alignment(FORMAT, engine_rounding=True), torch.bfloat16)
        attention = model.decoder.layers[0].self_attention
        attention.core_attention = core = Kept()
        lengths = (6, 10)
        x = torch.randn(sum(lengths), 1, TINY.hidden, dtype=torch.bfloat16, device=DEVICE)
        angles = model.rotary_pos_emb(max(lengths), packed_seq=True)
        ends = torch.tensor([0, 6, 16], dtype=torch.int32, device=DEVICE)
        documents = PackedSeqParams("thd", ends, ends, None, None, max(lengths), max(lengths))
        attention(x, None, rotary_pos_emb=angles, packed_seq_params=documents)
        together, alone = core.kept, []
        for document in x.split(lengths):
            attention(document, None, rotary_pos_emb=angles[: len(document)])
            alone.append(core.kept)
        attention(x, None, rotary_pos_emb=model.rotary_pos_emb(len(x)))
        try:
            attention(x, None)
        except ValueError as error:
            refused = str(error)
    return {"together": together, "alone": torch.cat(alone), "as_one": core.kept, "refused": refused}


def everything() -> dict[str, Any]:
    """One rank's results."""
    followed, plain = learners()
    run = embedded_run(followed) | {"learners": (followed, plain)}
    routes = Routes()
    aligned = Alignment(FORMAT, TARGETS, engine_rounding=True)
    layouts = {name: layout_case(layout, aligned, options, routes, run) for name, (layout, options) in LAYOUTS.items()}
    without = Alignment(FORMAT, TARGETS)
    return {
        "layouts": layouts,
        "without": layout_case(Layout(), without, {}, routes, run),
        "after_add": {(layer, name): norm_of(followed, layer, name).after_add for layer, name in _norms()},
        "packed": packed(),
    }


def _norms() -> list[tuple[int, str]]:
    return [(layer, name) for layer in range(TINY.layers) for name in NORMS] + [(-1, "final_layernorm")]


if __name__ == "__main__":
    run_ranks(sys.argv[1], everything)
