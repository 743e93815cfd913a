"""An optimizer whose moments are forgotten steps as a new one does, whichever state it keeps."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import nn

from qarl_nemo.moments import reset_moments

MAKERS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "muon": lambda weights: torch.optim.Muon(weights, lr=0.1),
    "soap": lambda weights: _emerging("soap", "SOAP")(weights, lr=0.1, use_kl_shampoo=True),
    "lion": lambda weights: _emerging("scalar_optimizers", "Lion")(weights, lr=0.1),
}


def _emerging(module: str, name: str) -> Callable:
    if importlib.util.find_spec("emerging_optimizers") is None:
        pytest.skip("needs Emerging-Optimizers, and Python 3.12")
    return getattr(importlib.import_module(f"emerging_optimizers.{module}"), name)


def take_steps(weight: nn.Parameter, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weight.detach().clone()


@pytest.mark.parametrize("name", MAKERS)
def test_it_steps_as_a_new_one_does(name):
    weight = nn.Parameter(torch.randn(12, 20, generator=torch.Generator().manual_seed(1)))
    old = MAKERS[name]([weight])
    start = take_steps(weight, old, 2)
    reset_moments([old])
    fresh, kept = (nn.Parameter(start.clone()) for _ in range(2))
    expected = take_steps(fresh, MAKERS[name]([fresh]), 3)
    moved = (expected - start).norm()
    assert (take_steps(weight, old, 3) - expected).norm() < 0.01 * moved
    # One that remembers other gradients steps elsewhere.
    remembers = MAKERS[name]([kept])
    take_steps(kept, remembers, 2)
    kept.data.copy_(start)
    assert (take_steps(kept, remembers, 3) - expected).norm() > 0.05 * moved


def test_bases_begin_as_identities_and_masters_stay():
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.state[weight] = {
        "step": 4, "exp_avg": torch.ones(2, 3), "L": torch.ones(2, 2), "Q_L": torch.ones(2, 2), "Q_R": torch.ones(3, 3),
        "master_param": torch.ones(2, 3),
    }  # fmt: skip
    # Transformer-Engine's Adam counts for a whole group.
    optimizer.param_groups[0]["step"] = 4
    reset_moments([optimizer])
    state = optimizer.state[weight]
    assert state["step"] == optimizer.param_groups[0]["step"] == 0
    assert not state["exp_avg"].any()
    assert not state["L"].any()
    assert torch.equal(state["Q_L"], torch.eye(2))
    assert torch.equal(state["Q_R"], torch.eye(3))
    assert state["master_param"].all()
