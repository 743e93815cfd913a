import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from qarl_nemo.layers.router import NO_ROUTE, AlignedRouter, RouteControl, engine_softmax, route_tokens
from support.asserts import assert_bitwise_equal, assert_snr


def make_router(weight, *, top_k=2, norm=True, layer=0, control=None):
    gate = SimpleNamespace(weight=nn.Parameter(weight), top_k=top_k, num_experts=weight.shape[0], norm_topk_prob=norm)
    return AlignedRouter(gate, control or RouteControl(), layer)


def by_hand_router(**options):
    # For x = [1, 0] the logits are log 4, log 1, log 2, log 1: probabilities 1/2, 1/8, 1/4, 1/8.
    weight = torch.tensor([[math.log(4), 0.0], [0.0, 0.0], [math.log(2), 0.0], [0.0, 0.0]])
    return make_router(weight, **options), torch.tensor([[1.0, 0.0]])


def test_weights_by_hand():
    router, x = by_hand_router()
    logits, weights, experts = router(x)
    assert experts.tolist() == [[0, 2]]
    assert weights[0].tolist() == pytest.approx([2 / 3, 1 / 3], rel=1e-6)
    assert logits[0].tolist() == pytest.approx([math.log(4), 0, math.log(2), 0], rel=1e-6)
    router, x = by_hand_router(norm=False)
    assert router(x)[1][0].tolist() == pytest.approx([0.5, 0.25], rel=1e-6)


def test_weights_are_fp32_and_renormalized_in_fp32():
    router = make_router(torch.randn(8, 32).bfloat16(), top_k=3)
    x = torch.randn(64, 32).bfloat16()
    logits, weights, experts = router(x)
    assert (logits.dtype, weights.dtype, experts.dtype) == (torch.bfloat16, torch.float32, torch.int64)
    expected = logits.double().softmax(-1).gather(-1, experts)
    expected = expected / expected.sum(-1, keepdim=True)
    assert_snr(weights, expected, 120)
    assert (weights.sum(-1) - 1).abs().max() < 1e-6
    # What BF16 weights, as Hugging Face's router returns them, would be.
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(weights.bfloat16(), expected, 120)


def test_logits_are_bf16_as_the_engines_gate_computes_them():
    weight, x = torch.randn(8, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    assert_bitwise_equal(make_router(weight)(x)[0], nn.functional.linear(x, weight))


@pytest.mark.parametrize("norm", [True, False])
def test_the_gradient_reaches_the_router_weight(norm):
    router = make_router(torch.randn(8, 32), top_k=3, norm=norm)
    x = torch.randn(5, 32, requires_grad=True)
    _, weights, experts = router(x)
    grad_out = torch.randn(5, 3)
    weights.backward(grad_out)
    # Renormalized: w = softmax over the chosen logits, dl = w (g - sum w g) on the chosen experts, 0 elsewhere.
    # Not renormalized: p = softmax over all, dl = p (g - sum p g) with g = 0 on the others.
    logits = x.detach().double() @ router.weight.detach().double().mT
    scope = torch.full_like(logits, -torch.inf).scatter(-1, experts, 0.0) if norm else 0.0
    probabilities = (logits + scope).softmax(-1)
    grads = torch.zeros_like(logits).scatter(-1, experts, grad_out.double())
    grad_logits = probabilities * (grads - (probabilities * grads).sum(-1, keepdim=True))
    assert_snr(router.weight.grad, grad_logits.mT @ x.detach().double(), 100)
    assert_snr(x.grad, grad_logits @ router.weight.detach().double(), 100)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(router.weight.grad, (probabilities * grads).mT @ x.detach().double(), 100)


def test_routes_are_recorded_in_layer_order():
    control = RouteControl()
    routers = [make_router(torch.randn(8, 32), layer=layer, control=control) for layer in range(3)]
    x = torch.randn(5, 32)
    with control.record() as recorded:
        chosen = [router(x)[2] for router in routers]
    assert len(recorded) == 3
    for layer in range(3):
        assert_bitwise_equal(recorded[layer], chosen[layer])
    routers[0](x)
    assert len(recorded) == 3


def test_replayed_routes_take_the_place_of_the_routers_choice():
    control = RouteControl()
    routers = [make_router(torch.randn(8, 32), layer=layer, control=control) for layer in range(2)]
    x = torch.randn(4, 32)
    own = torch.stack([router(x)[2] for router in routers], dim=1)
    routes = (own + 1) % 8
    with control.replay(routes.to(torch.int16)):
        for layer, router in enumerate(routers):
            logits, weights, experts = router(x)
            assert_bitwise_equal(experts, routes[:, layer])
            probabilities = logits.softmax(-1).gather(-1, experts)
            assert_snr(weights, probabilities / probabilities.sum(-1, keepdim=True), 120)
    for layer, router in enumerate(routers):
        assert_bitwise_equal(router(x)[2], own[:, layer])


def test_no_route_leaves_the_choice_to_the_router():
    router = make_router(torch.randn(8, 32))
    x = torch.randn(4, 32)
    own = router(x)[2]
    routes = (own + 1) % 8
    routes[1] = NO_ROUTE
    with router.control.replay(routes[:, None]):
        experts = router(x)[2]
    assert_bitwise_equal(experts[1], own[1])
    assert_bitwise_equal(experts[[0, 2, 3]], routes[[0, 2, 3]])
    with router.control.replay(None):
        assert_bitwise_equal(router(x)[2], own)


def test_gradients_flow_through_replayed_routes():
    router = make_router(torch.randn(8, 32))
    x = torch.randn(4, 32)
    routes = (router(x)[2] + 1) % 8
    with router.control.replay(routes[:, None]):
        router(x)[1][:, 0].sum().backward()
    assert router.weight.grad[routes.unique()].any(-1).all()


def test_recording_and_replaying_end_with_an_error_inside():
    control = RouteControl()
    with pytest.raises(RuntimeError, match="inside"), control.record(), control.replay(torch.zeros(1, 1, 1)):
        raise RuntimeError("inside")
    assert control.recorded is None
    assert control.replayed is None


def add_as_the_engine(values):
    """Threads of eight neighbours each; every thread adds its own in order, then what its xor-partner holds."""
    threads = [[np.float32(value) for value in values[start : start + 8]] for start in range(0, len(values), 8)]
    sums = [functools.reduce(np.add, thread) for thread in threads]
    mask = len(sums) // 2
    while mask:
        sums = [sums[thread] + sums[thread ^ mask] for thread in range(len(sums))]
        mask //= 2
    return sums[0]


@pytest.mark.parametrize("num_experts", [8, 32, 128, 256])
def test_softmax_adds_in_the_engines_order(num_experts):
    torch.manual_seed(0)
    logits = (3 * torch.randn(64, num_experts)).to(torch.bfloat16)
    exponentials = (logits.float() - logits.float().amax(-1, keepdim=True)).exp()
    sums = torch.tensor(np.array([add_as_the_engine(row) for row in exponentials.numpy()]))
    expected = exponentials * (1 / sums[:, None])
    assert_bitwise_equal(engine_softmax(logits), expected)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(logits.float().softmax(-1), expected)


def test_the_weights_of_a_token_are_added_in_the_order_of_its_choices():
    torch.manual_seed(0)
    logits = (3 * torch.randn(256, 64)).to(torch.bfloat16)
    chosen, _ = route_tokens(logits, 6, renormalize=False)
    forwards, backwards = (
        torch.tensor(np.array([functools.reduce(np.add, row[::step]) for row in chosen.numpy()])) for step in (1, -1)
    )
    weights, _ = route_tokens(logits, 6, renormalize=True)
    assert_bitwise_equal(weights, chosen / forwards[:, None])
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(weights, chosen / backwards[:, None])


# 24 are three eights, which have no halves to be added.
@pytest.mark.parametrize("num_experts", [4, 24, 60])
def test_any_number_of_experts_has_a_softmax(num_experts):
    logits = torch.randn(16, num_experts)
    torch.testing.assert_close(engine_softmax(logits), logits.softmax(-1))
