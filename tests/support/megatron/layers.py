"""One aligned MoE layer of Megatron against the embedded engine's, in every format."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from support.formats import FORMATS
from support.megatron.compare import relative_error
from support.megatron.models import (
    DEVICE,
    TINY,
    Layout,
    hugging_face_model,
    megatron_model,
    parallel,
)

# isort: split
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from qarl_kernels import QuantFormat, QuantizedWeight, dispatch
from qarl_kernels.weights import quantize_weight_reference, unfit_values
from qarl_nemo.layers.install import install
from qarl_nemo.layers.router import route_tokens
from qarl_nemo.megatron.alignment import Alignment, aligned_weights, release
from qarl_nemo.megatron.publish import publish_layers

TOKENS = 6  # a rank


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (dist.get_world_size(), TOKENS, TINY.hidden)
    x, grad = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2))
    return x, grad


def _embedded(fmt: QuantFormat, dtype: torch.dtype, ep: int) -> dict[str, Tensor]:
    # GEMMs on a CPU round differently with other numbers of rows: routers see a rank's tokens, experts see those of
    # all ranks they serve, in the order in which Megatron's meet them.
    model = hugging_face_model(dtype)
    install(model, ("experts",), fmt)
    layer = model.model.layers[0].mlp
    x, grad = _inputs(dtype)
    x.requires_grad_()
    out = []
    for tokens in x.split(ep):
        routes = [layer.gate(one)[1:] for one in tokens]
        weights, chosen = (torch.cat(parts) for parts in zip(*routes, strict=True))
        out.append(layer.experts(tokens.flatten(0, 1), chosen, weights))
    out = torch.cat(out).view_as(grad)
    out.backward(grad)
    rank = dist.get_rank()
    grads = {name: getattr(layer.experts, f"{name}_proj").grad for name in ("gate_up", "down")}
    return {"out": out[rank].detach(), "x": x.grad[rank], "router": layer.gate.weight.grad, **grads}


def _megatron(layout: Layout, fmt: QuantFormat, dtype: torch.dtype, dispatcher: str) -> dict[str, Tensor]:
    model = megatron_model(layout, Alignment(fmt), dtype, num_layers=1, moe_token_dispatcher_type=dispatcher)
    layer = model.decoder.layers[0].mlp
    x, grad = (part[dist.get_rank()].unsqueeze(1) for part in _inputs(dtype))
    x.requires_grad_()
    out, _ = layer(x)
    out.backward(grad)
    # Without data parallel wrappers a rank's gradients are those of its tokens, or of its experts.
    router = layer.router.weight.grad.clone()
    dist.all_reduce(router)
    result = {"out": out.detach().squeeze(1), "x": x.grad.squeeze(1), "router": router}
    if layout.ep == dist.get_world_size():
        linears = {"gate_up": layer.experts.linear_fc1, "down": layer.experts.linear_fc2}
        for name, linear in linears.items():
            result[name] = torch.stack([master.grad for master in linear.aligned.master])
        result["experts"] = layer.local_expert_indices
    return result


def _compared(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    errors = {}
    for part in actual.keys() - {"out", "experts"}:
        whole = expected[part][actual["experts"]] if part in ("gate_up", "down") else expected[part]
        errors[part] = relative_error(actual[part], whole)
    return {"same_bits": torch.equal(actual["out"], expected["out"]), "errors": errors}


def layer_cases() -> dict[str, dict[str, Any]]:
    """For every case, whether the output has the embedded engine's bits, and how far its gradients are from them."""
    cases = {}
    for ep, dispatcher in ((4, "alltoall"), (2, "alltoall"), (4, "allgather")):
        # Process groups are made once for all cases, because that is what takes time here.
        with parallel(Layout(ep=ep)):
            for name, fmt in FORMATS.items():
                for dtype in (torch.float32, torch.bfloat16):
                    key = f"{name}-{str(dtype).removeprefix('torch.')}-ep{ep}-{dispatcher}"
                    actual = _megatron(Layout(ep=ep), fmt, dtype, dispatcher)
                    cases[key] = _compared(actual, _embedded(fmt, dtype, ep))
    return cases


def dropped_caches() -> tuple[int, int]:
    """Number of quantized weights after a forward, and after `release`."""
    with parallel(Layout()):
        model = megatron_model(Layout(), Alignment(FORMATS["w4a16"]))
        weights = aligned_weights([model])
        model.decoder.layers[0].mlp(torch.randn(TOKENS, 1, TINY.hidden, device=DEVICE))
        held = [weight for weight in weights if weight._quantized is not None]
        release([model])
        return len(held), len([weight for weight in weights if weight._quantized is not None])


def replayed_routes() -> dict[str, Any]:
    """A layer's output by its own choices and by others, replayed, and what the embedded engine gives for those."""
    with parallel(Layout()):
        model = megatron_model(Layout(), Alignment(FORMATS["w4a16"]), num_layers=1, moe_enable_routing_replay=True)
        layer = model.decoder.layers[0].mlp
        replay = layer.router.router_replay
        x = _inputs(torch.float32)[0][0]
        embedded = hugging_face_model()
        install(embedded, ("experts",), FORMATS["w4a16"])
        block = embedded.model.layers[0].mlp
        replay.set_router_replay_action(RouterReplayAction.RECORD)
        own = layer(x.unsqueeze(1))[0].squeeze(1)
        recorded = replay.get_recorded_indices()
        # Less probable experts first: the order of the sum is the order of the routes.
        other = (recorded.flip(-1) + torch.tensor([1, 0], device=DEVICE)) % TINY.experts
        routes = torch.where(other[:, :1] == other[:, 1:], recorded.flip(-1), other)
        replay.set_target_indices(routes)
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        replayed = layer(x.unsqueeze(1))[0].squeeze(1)
        replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        again = layer(x.unsqueeze(1))[0].squeeze(1)
        RouterReplay.clear_global_router_replay_instances()
        logits, _, chosen = block.gate(x)
        weights, _ = route_tokens(logits, TINY.top_k, renormalize=True, routes=routes)
        return {
            "recorded": torch.equal(recorded, chosen),
            "expected": block.experts(x, routes, weights).detach(),
            "own": own.detach(),
            "replayed": replayed.detach(),
            "again": again.detach(),
        }


def _counting(weight: Tensor, fmt: QuantFormat, *, name: str, amax: Tensor | None = None) -> QuantizedWeight:
    # On a CPU the quantizer raises at the first bad weight.
    bad = torch.tensor(int(unfit_values(weight, fmt, name) is not None))
    return replace(quantize_weight_reference(weight.nan_to_num(), fmt, name=name, amax=amax), nonfinite=bad)


def refused_publication() -> str:
    """What publishing says on this rank when others' weights hold NaN or Inf, counted as on a GPU."""
    with parallel(Layout(ep=4)), patch.object(dispatch, "quantize_weight_reference", _counting):
        model = megatron_model(Layout(ep=4), Alignment(FORMATS["fp8_channel"], ("experts", "attention")))
        first, last = model.decoder.layers
        bad = (
            (last.mlp.experts.linear_fc2.weight0, "nan"),
            (first.self_attention.linear_qkv.weight, "nan"),
            (first.self_attention.linear_proj.weight, "inf"),
            (last.mlp.router.weight, "nan"),
            (model.embedding.word_embeddings.weight, "-inf"),
        )
        if dist.get_rank() == 2:
            with torch.no_grad():
                for weight, value in bad:
                    weight[3, 5] = float(value)
        try:
            list(publish_layers([model], vocab_size=TINY.vocab))
        except ValueError as error:
            return str(error)
        return "published"
