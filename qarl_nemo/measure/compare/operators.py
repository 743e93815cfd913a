"""Runs each of the learner's operators on vLLM's own inputs, so that a difference shows where it arises.

The record of `vllm_operators` holds a prefill of some prompts and several decoding steps. A request's tokens are joined
again, and each of the learner's operators reads them all at once, as in training, from the outputs that the engine's
previous operator produced.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qarl_nemo.layers.engine_rounding import rotate
from qarl_nemo.layers.router import AlignedRouter
from qarl_nemo.train.engine_forward import EngineAttention

PHASES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of one layer.

    Attributes:
        operator: the operator's name, e.g. `qkv_proj`.
        layer: which layer; None for operators after the last one.
        actual: [rows, ...] the learner's output.
        expected: [rows, ...] the engine's output.
        rows: [rows] which rows of the record these are.
    """

    operator: str
    layer: int | None
    actual: Tensor
    expected: Tensor
    rows: Tensor


@torch.inference_mode()
def compare_operators(model: PreTrainedModel, record: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Run every operator of the learner on the inputs of the engine's operator.

    Args:
        model: the learner, with its aligned layers.
        record: what `OperatorRecorder` recorded.

    Returns:
        One row for each operator, layer and phase (`prefill`, `decode`): `identical`, the fraction of values with the
        same bits; `snr_db`, None where all are; `max_abs`, the largest difference; `num_values`. For `topk_ids`,
        `identical` is the fraction of tokens with the same set of experts.
    """
    tokens = _Tokens({name: tensor.to(model.device) for name, tensor in record.items()})
    rows = []
    for step in _steps(model, tokens):
        for phase, inside in zip(PHASES, (tokens.prefill, ~tokens.prefill), strict=True):
            chosen = inside[step.rows]
            if bool(chosen.any()):
                facts = {"operator": step.operator, "layer": step.layer, "phase": phase}
                rows.append(facts | _difference(step.actual[chosen], step.expected[chosen]))
    return rows


def total_by_operator(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join all layers of an operator and phase in the rows of `compare_operators`, in the forward's order."""
    totals = []
    for key in dict.fromkeys((row["operator"], row["phase"]) for row in rows):
        parts = [row for row in rows if (row["operator"], row["phase"]) == key]
        num_values = sum(row["num_values"] for row in parts)
        signal, error = (sum(row[name] for row in parts) for name in ("signal", "error"))
        totals.append(
            {
                "operator": key[0],
                "phase": key[1],
                "identical": sum(row["identical"] * row["num_values"] for row in parts) / num_values,
                "snr_db": _decibels(signal, error),
                "max_abs": max(row["max_abs"] for row in parts),
                "num_values": num_values,
            }
        )
    return totals


class _Tokens:
    """Converts the record's rows to sequences [B, S], padded on the right, and back."""

    def __init__(self, record: dict[str, Tensor]) -> None:
        self.record = record
        positions, steps = record["positions"], record["step"]
        self.prefill = steps == 0
        starts = (positions == 0) & self.prefill
        num_requests = int(starts.sum())
        request = starts.cumsum(0) - 1
        decoding = torch.arange(int((~self.prefill).sum()), device=positions.device) % num_requests
        self.request = torch.where(self.prefill, request, 0).masked_scatter(~self.prefill, decoding)
        lengths = torch.bincount(self.request[self.prefill], minlength=num_requests)
        expected = torch.where(self.prefill, positions, lengths[self.request] + steps - 1)
        if not torch.equal(expected, positions) or int(starts[0]) != 1:
            raise RuntimeError(
                "vLLM did not read all recorded prompts in its first forward and one token of each in every other; "
                "shorten the prompts"
            )
        self.shape = num_requests, int(positions.max()) + 1
        # The rows of which the engine computes logits.
        self.ends = (~self.prefill | (positions == lengths[self.request] - 1)).nonzero().flatten()

    def __getitem__(self, name: str) -> Tensor:
        return self.record[name]

    def __contains__(self, name: str) -> bool:
        return name in self.record

    def sequences(self, rows: Tensor) -> Tensor:
        grid = rows.new_zeros(*self.shape, *rows.shape[1:])
        grid[self.request, self.record["positions"]] = rows
        return grid

    def rows(self, grid: Tensor) -> Tensor:
        return grid[self.request, self.record["positions"]].flatten(1)


def _steps(model: PreTrainedModel, tokens: _Tokens) -> Iterator[Step]:
    every = torch.arange(len(tokens.request), device=model.device)

    def step(operator: str, layer: int | None, actual: Tensor, expected: Tensor, rows: Tensor = every) -> Step:
        return Step(operator, layer, actual, expected, rows)

    stream = tokens.rows(model.model.embed_tokens(tokens.sequences(tokens["tokens"])))
    last = len(model.model.layers) - 1
    for index, layer in enumerate(model.model.layers):
        at = {name.partition(".")[2]: tensor for name, tensor in tokens.record.items() if name.startswith(f"{index}.")}
        yield step("residual" if index else "embedding", index, stream, at["residual"])
        yield step("input_norm", index, _apply(layer.input_layernorm, tokens, at["residual"]), at["input_norm"])
        for name, actual in _attention(model, layer.self_attn, tokens, at):
            yield step(name, index, actual, at[name])
        yield step("residual", index, at["residual"] + at["o_proj"], at["post_residual"])
        norm = _apply(layer.post_attention_layernorm, tokens, at["post_residual"])
        yield step("post_norm", index, norm, at["post_norm"])
        for name, actual, expected in _mlp(layer.mlp, tokens, at):
            yield step(name, index, actual, expected)
        stream = at["post_residual"] + at["mlp"]
    yield step("residual", last, stream, tokens["final_residual"])
    yield step("final_norm", None, _apply(model.model.norm, tokens, tokens["final_residual"]), tokens["final_norm"])
    logits = _apply(model.lm_head, tokens, tokens["final_norm"])[tokens.ends]
    yield step("lm_head", None, logits, tokens["logits"], tokens.ends)


def _apply(module: torch.nn.Module, tokens: _Tokens, rows: Tensor) -> Tensor:
    return tokens.rows(module(tokens.sequences(rows)))


def _attention(
    model: PreTrainedModel, attention: EngineAttention, tokens: _Tokens, at: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    yield "qkv_proj", torch.cat([_apply(module, tokens, at["input_norm"]) for module in projections], dim=-1)
    size = attention.head_dim

    def heads(name: str) -> Tensor:
        return tokens.sequences(at[name]).unflatten(-1, (-1, size))

    widths = [at[name].shape[-1] for name in "qkv"]
    projected = dict(zip("qkv", at["qkv_proj"].split(widths, dim=-1), strict=True))
    for name, norm in (("q_norm", attention.q_norm), ("k_norm", attention.k_norm)):
        grid = tokens.sequences(projected[name[0]]).unflatten(-1, (-1, size))
        yield name, tokens.rows(norm(grid).flatten(2))
    positions = torch.arange(tokens.shape[1], device=model.device)[None]
    cos, sin = model.model.rotary_emb(at["qkv_proj"], positions)
    for name in "qk":
        yield name, tokens.rows(rotate(heads(f"{name}_norm"), cos, sin).flatten(2))
    query, key, value = (heads(name).transpose(1, 2) for name in "qkv")
    out = attention.attend(query, key, value, None)
    yield "attention", tokens.rows(out.flatten(2))
    yield "o_proj", _apply(attention.o_proj, tokens, at["attention"])


def _mlp(mlp: Any, tokens: _Tokens, at: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    if "router" not in at:
        yield "mlp", _apply(mlp, tokens, at["post_norm"]), at["mlp"]
        return
    router: AlignedRouter = mlp.gate
    logits = tokens.rows(router.logits(tokens.sequences(at["post_norm"])))
    yield "router", logits, at["router"]
    weights, experts = router.choose(at["router"])
    if "topk_ids" in at:
        # A choice is a set, because experts with equal weights may come in any order.
        yield "topk_ids", experts.sort(-1).values, at["topk_ids"].long().sort(-1).values
        same = (experts == at["topk_ids"]).all(-1)
        yield "topk_weights", torch.where(same[:, None], weights, at["topk_weights"]), at["topk_weights"]
        weights, experts = at["topk_weights"], at["topk_ids"].long()
    yield "experts", mlp.experts(at["post_norm"], experts, weights), at["mlp"]


def _difference(actual: Tensor, expected: Tensor) -> dict[str, float | int | None]:
    if not expected.is_floating_point():
        same = (actual == expected).all(-1).double()
        error, signal, largest = float((1 - same).sum()), float(len(same)), float((actual != expected).any())
        identical, num_values = float(same.mean()), len(same)
    else:
        gap = actual.double() - expected.double()
        error, signal = float(gap.square().sum()), float(expected.double().square().sum())
        identical, num_values = float((gap == 0).double().mean()), gap.numel()
        largest = float(gap.abs().max())
    facts = {"identical": identical, "snr_db": _decibels(signal, error), "max_abs": largest}
    return facts | {"num_values": num_values, "signal": signal, "error": error}


def _decibels(signal: float, error: float) -> float | None:
    return 10 * float(torch.tensor(signal / error, dtype=torch.float64).log10()) if error else None
