"""Muon's steps in stacks are Megatron's own, taken together."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from qarl_nemo.megatron import stacked_muon
from qarl_nemo.megatron.stacked_muon import stack_muon
from qarl_nemo.muon import MEGATRON

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("emerging_optimizers") is None, reason="needs Emerging-Optimizers, and Python 3.12"
)

EXPERTS = [(32, 48)] * 7 + [(48, 16)] * 4
ALONE_IN_ITS_SHAPE, QKV, SHARED = (24, 24), (64, 16), (32, 48)


def group(size):
    return SimpleNamespace(size=lambda: size)


def weights():
    generator = torch.Generator().manual_seed(3)
    shapes = [*EXPERTS, ALONE_IN_ITS_SHAPE, QKV]
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    made[-1].is_qkv = True
    return made


def muon(matrices, **changed):
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    settings = {key.removeprefix("muon_"): value for key, value in MEGATRON.items() if key.startswith("muon_")}
    del settings["scalar_optimizer"]
    own = {"lr": 0.1, "is_qkv_fn": lambda one: getattr(one, "is_qkv", False), "qkv_split_shapes": [16, 8, 8]}
    return TensorParallelMuon(matrices, **own | settings | changed)


def stacked(matrices, **changed):
    optimizer = muon(matrices, **changed)
    return optimizer, stack_muon(SimpleNamespace(optimizer=optimizer))


def stepped(optimizer, matrices):
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        for place, one in enumerate(matrices):
            # Of so different sizes that one scaled by its neighbours' would be seen.
            one.grad = torch.randn(one.shape, generator=generator) * 10.0 ** (place % 5)
        optimizer.step()
    return [one.detach() for one in matrices]


def largest_difference(found, expected):
    start = [one.detach() for one in weights()]
    return max(
        float((one - other).norm() / (other - before).norm())
        for one, other, before in zip(found, expected, start, strict=True)
    )


@pytest.mark.parametrize(
    "changed", [{}, {"nesterov": False}, {"weight_decay": 0.5}, {"fp32_matmul_prec": "highest"}], ids=str
)
@pytest.mark.parametrize("most_bytes", [1, 3 * 32 * 48 * 4, 2**27])
def test_stacks_step_as_single_matrices_do(most_bytes, changed, monkeypatch):
    monkeypatch.setattr(stacked_muon, "_STACK_BYTES", most_bytes)
    matrices, own = weights(), weights()
    optimizer, count = stacked(matrices, **changed)
    # Of q, k and v each is orthogonalized on its own, which Megatron does.
    assert count == len(EXPERTS) + 1
    # BF16's last bits, five iterations long.
    assert largest_difference(stepped(optimizer, matrices), stepped(muon(own, **changed), own)) < 0.02


def test_a_stack_that_is_scaled_as_one_is_seen(monkeypatch):
    matrices, own = weights(), weights()
    optimizer, _ = stacked(matrices)
    right = optimizer.scaled_orthogonalize_fn
    wrong = lambda stack, *rest: right(stack.reshape(-1, stack.shape[-1]), *rest).view_as(stack)  # noqa: E731
    monkeypatch.setattr(optimizer, "scaled_orthogonalize_fn", wrong)
    assert largest_difference(stepped(optimizer, matrices), stepped(muon(own), own)) > 0.5


def test_matrices_without_gradients_stay():
    matrices = weights()
    optimizer, _ = stacked(matrices)
    matrices[0].grad = torch.ones_like(matrices[0])
    optimizer.step()
    before = weights()
    assert not torch.equal(matrices[0], before[0])
    assert all(torch.equal(one, other) for one, other in zip(matrices[1:], before[1:], strict=True))


@pytest.mark.parametrize(
    ("tensor_parallel", "expert_parallel", "tp_mode", "count"),
    [(1, 1, "duplicated", 2), (2, 1, "duplicated", 1), (2, 2, "duplicated", 0), (2, 2, "blockwise", 2)],
)
def test_what_ranks_share_is_left_to_megatron(tensor_parallel, expert_parallel, tp_mode, count):
    expert, attention = (torch.nn.Parameter(torch.zeros(SHARED)) for _ in range(2))
    expert.partition_dim = attention.partition_dim = 0
    expert.expert_tp = True
    groups = SimpleNamespace(tp=group(tensor_parallel), expt_tp=group(expert_parallel))
    assert stacked([expert, attention], pg_collection=groups, tp_mode=tp_mode)[1] == count


def test_a_package_that_takes_no_stacks_is_given_none(monkeypatch):
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    # New with 0.3; before, Megatron's Muon has other attributes, too, or fails at its first stack.
    monkeypatch.delattr(muon_utils, "batched_newton_schulz_step")
    matrices, own = weights(), weights()
    optimizer, count = stacked(matrices)
    assert count == 0
    assert largest_difference(stepped(optimizer, matrices), stepped(muon(own), own)) == 0


def test_a_kernel_that_takes_no_stacks_is_given_none():
    found = [
        stack_muon(SimpleNamespace(optimizer=muon(weights()), config=SimpleNamespace(muon_use_syrk=used)))
        for used in (True, False)
    ]
    assert found == [0, len(EXPERTS) + 1]


def test_other_optimizers_stay_as_they_are():
    adam = torch.optim.AdamW(weights())
    step = adam.step
    assert stack_muon(SimpleNamespace(optimizer=adam)) == 0
    assert adam.step == step
