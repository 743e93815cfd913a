"""Batches for the loss tests: built from gaps, random, cut into micro-batches."""

import dataclasses

import torch
from pydantic import TypeAdapter
from torch import Tensor

from qarl_nemo.losses.build import OBJECTIVES, build_loss
from qarl_nemo.losses.config import EVERYTHING, LossConfig
from qarl_nemo.losses.ratios import LossData, LossOutput

NAMES = sorted(OBJECTIVES)
LOSS_CONFIG = TypeAdapter(LossConfig)
CONFIGS = {name: LOSS_CONFIG.validate_python({"objective": name}) for name in NAMES}
CLIPPED = [name for name, config in CONFIGS.items() if config.bands.positive != EVERYTHING]
SEQUENCE_LEVEL = [name for name, config in CONFIGS.items() if config.band_unit == "response"]


def make_loss(objective: str, **settings: float):
    return build_loss(LOSS_CONFIG.validate_python({"objective": objective, **settings}))


def batch_from_gaps(log_prox, log_mismatch, advantages, *, dtype=torch.float64) -> tuple[Tensor, LossData]:
    """Rows of log r and log w per token; a short row is padded with masked positions. All responses count."""
    longest = max(len(row) for row in log_prox)
    pad = lambda rows: torch.tensor([[*row, *[0.0] * (longest - len(row))] for row in rows], dtype=dtype)  # noqa: E731
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in log_prox])
    prev = torch.full(mask.shape, -1.0, dtype=dtype)
    curr = (prev + pad(log_prox)).requires_grad_()
    data = LossData(
        prev_logprobs=prev,
        generation_logprobs=prev - pad(log_mismatch),
        advantages=torch.tensor(advantages, dtype=dtype).unsqueeze(-1).expand(mask.shape),
        token_mask=mask,
        sample_mask=torch.ones(len(log_prox)),
        global_valid_seqs=torch.tensor(float(len(log_prox))),
        global_valid_toks=mask.sum(),
    )
    return curr, data


def random_batch(seed: int, *, num_seqs=4, scale=0.1, dtype=torch.float64) -> tuple[Tensor, LossData]:
    """Ragged masks, one response in four not counted, advantages of both signs and 0; curr needs no grad yet."""
    num_toks, generator = 5, torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    prev = -normal(num_seqs, num_toks).abs()
    curr = prev + scale * normal(num_seqs, num_toks)
    lengths = torch.randint(1, num_toks + 1, (num_seqs, 1), generator=generator)
    token_mask = (torch.arange(num_toks) < lengths).to(dtype)
    sample_mask = (torch.rand(num_seqs, generator=generator) > 0.25).to(dtype)
    advantages = normal(num_seqs, 1) * (torch.rand(num_seqs, 1, generator=generator) > 0.2)
    data = LossData(
        prev_logprobs=prev,
        generation_logprobs=prev + scale * normal(num_seqs, num_toks),
        advantages=advantages.expand(num_seqs, num_toks).clone(),
        token_mask=token_mask,
        sample_mask=sample_mask,
        global_valid_seqs=sample_mask.sum(),
        global_valid_toks=(token_mask * sample_mask.unsqueeze(-1)).sum(),
        entropy=normal(num_seqs, num_toks).abs(),
    )
    return curr, data


def rows(data: LossData, index) -> LossData:
    """The micro-batch of these rows; global counts stay those of the whole batch."""
    per_row = [field.name for field in dataclasses.fields(data) if not field.name.startswith("global_")]
    present = [name for name in per_row if getattr(data, name) is not None]
    return dataclasses.replace(data, **{name: getattr(data, name)[index] for name in present})


def run(loss_fn, curr: Tensor, data: LossData) -> tuple[LossOutput, Tensor]:
    """Return the output and the gradient at `curr`."""
    leaf = curr.detach().clone().requires_grad_()
    output = loss_fn(leaf, data)
    output.loss.backward()
    return output, leaf.grad


def close(found, expected, tolerance=1e-9) -> bool:
    found, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
