"""AdamW and Muon against torch's own, FP32 masters, clipping, warm-up, and a state that survives a file."""

import copy
import math

import pytest
import torch
from torch import nn

from qarl_nemo.train.config import AdamWConfig, MuonConfig
from qarl_nemo.train.optimizer import MasterOptimizer
from support.asserts import assert_bitwise_equal
from support.engines import tiny_model

MATRIX = "model.layers.0.self_attn.q_proj.weight"
STACK = "model.layers.0.mlp.experts.gate_up_proj"
NO_CLIP = 1e9
CONFIGS = {
    "adamw": AdamWConfig(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9)),
    "muon": MuonConfig(lr=1e-2, weight_decay=0.1, momentum=0.9),
}
STEPS = 4
NORM = "model.norm.weight"  # every model has something that is no matrix; Muon leaves it to AdamW


def numbers(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(weights: dict[str, torch.Tensor], gradients, config, steps=STEPS) -> dict[str, torch.Tensor]:
    """Step `weights`, whose gradient at step s is `gradients(name, s)`; returns what they become."""
    parameters = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    norm = nn.Parameter(torch.ones(4))
    optimizer = MasterOptimizer([*parameters.items(), (NORM, norm)], config, NO_CLIP)
    for step in range(steps):
        for name, parameter in parameters.items():
            parameter.grad = gradients(name, step).to(parameter.dtype)
        _, applied = optimizer.step()
        assert applied
        assert all(parameter.grad is None for parameter in parameters.values())
    return {name: parameter.detach() for name, parameter in parameters.items()}


def torch_own(weight: torch.Tensor, config, **changes) -> torch.Tensor:
    parameter = nn.Parameter(weight.clone())
    if isinstance(config, AdamWConfig):
        own = torch.optim.AdamW([parameter], lr=config.lr, weight_decay=config.weight_decay, betas=config.betas)
    else:
        own = torch.optim.Muon(
            [parameter],
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            **{"adjust_lr_fn": "match_rms_adamw", **changes},
        )
    for step in range(STEPS):
        parameter.grad = numbers(*weight.shape, seed=step + 1)
        own.step()
    return parameter.detach()


def stepped(config) -> torch.Tensor:
    return run({MATRIX: numbers(24, 16)}, lambda _, step: numbers(24, 16, seed=step + 1), config)[MATRIX]


def test_adamw_steps_as_torchs_does():
    found = stepped(CONFIGS["adamw"])
    assert_bitwise_equal(found, torch_own(numbers(24, 16), CONFIGS["adamw"]))
    assert not torch.allclose(found, torch_own(numbers(24, 16), CONFIGS["muon"]), atol=1e-3)


def test_muon_steps_as_torchs_does_but_for_its_rounding_to_bf16():
    weight, config = numbers(24, 16), CONFIGS["muon"]
    own = torch_own(weight, config)

    def error(update):
        return float((update - own).norm() / (own - weight).norm())

    # BF16 rounds by 2^-9 some ten times in an iteration of five
    assert error(stepped(config)) < 0.03
    for wrong in ({"ns_steps": 4}, {"nesterov": False}, {"ns_coefficients": (3.4445, -4.7750, 2.1)}):
        assert error(torch_own(weight, config, **wrong)) > 0.06


def test_muon_orthogonalizes_in_fp32_on_a_cpu():
    # without momentum and weight decay the first step is the orthogonalized gradient, times lr * .2 * sqrt(24)
    gradient, config = numbers(24, 16), MuonConfig(lr=1.0, weight_decay=0.0, momentum=0.0)
    x = gradient.double().T / gradient.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    exact = -0.2 * math.sqrt(24) * x.T

    def error(weight):
        return float((weight - exact).norm() / exact.norm())

    found = run({MATRIX: torch.zeros(24, 16)}, lambda *_: gradient, config, steps=1)[MATRIX]
    parameter = nn.Parameter(torch.zeros(24, 16))
    in_bf16 = torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw")
    parameter.grad = gradient
    in_bf16.step()
    # 2^-9 against 2^-24 a rounding
    assert error(found) < error(parameter.detach()) / 1000


def test_stacked_experts_under_muon_are_stepped_each_alone():
    stack = numbers(3, 24, 16)

    def gradients(name, step):
        whole = numbers(3, 24, 16, seed=step + 1)
        return whole if name == STACK else whole[int(name[13])]

    together = run({STACK: stack}, gradients, CONFIGS["muon"])[STACK]
    alone = run({f"model.layers.{e}.self_attn.q_proj.weight": stack[e] for e in range(3)}, gradients, CONFIGS["muon"])
    for expert, weight in enumerate(alone.values()):
        assert_bitwise_equal(together[expert], weight)
    # orthogonalizing the stack as one tall matrix is another step
    tall = run({MATRIX: stack.view(72, 16)}, lambda _, s: gradients(STACK, s).view(72, 16), CONFIGS["muon"])[MATRIX]
    assert not torch.allclose(together.view(72, 16), tall, atol=1e-3)


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    model = tiny_model()
    optimizer = MasterOptimizer(model.named_parameters(), MuonConfig(), 1.0)
    muon, adamw = optimizer.optimizers
    assert (type(muon), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW)
    # a layer has 4 attention matrices and 4 experts of 2
    assert len(muon.param_groups[0]["params"]) == 2 * (4 + 4 * 2)
    by_adamw = {id(parameter) for parameter in adamw.param_groups[0]["params"]}
    plain = {name for name, master in optimizer.masters.items() if id(master) in by_adamw}
    assert {name.rpartition("layers.0.")[2] for name in plain if "layers.1." not in name} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "mlp.gate.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_parameters_accumulate_tiny_updates_in_fp32_masters(name):
    # near 1 BF16 numbers lie 2^-8 = .0039 apart below and 2^-7 above: a step of 1e-4 alone rounds away
    weight = torch.ones(16, 16, dtype=torch.bfloat16)
    config = CONFIGS[name].model_copy(update={"lr": 1e-4, "weight_decay": 0.0})
    parameter = nn.Parameter(weight.clone())
    optimizer = MasterOptimizer([(MATRIX, parameter), (NORM, nn.Parameter(torch.ones(4)))], config, NO_CLIP)
    for _ in range(100):
        parameter.grad = torch.eye(16, dtype=torch.bfloat16)
        optimizer.step()
    # AdamW moves by lr a step; Muon's update of the identity, scaled to AdamW's, by .2 * sqrt(16) * lr * s with s
    # in Newton-Schulz's .7 to 1.2
    moved = 1 - optimizer.masters[MATRIX].diagonal()
    expected = 100 * 1e-4 * (1 if name == "adamw" else 0.8)
    assert bool(((0.6 * expected < moved) & (moved < 1.3 * expected)).all())
    assert bool((parameter.diagonal() < 1).all())
    assert_bitwise_equal(parameter.detach(), optimizer.masters[MATRIX].detach().bfloat16())
    assert optimizer.masters[MATRIX].dtype == torch.float32


def test_without_masters_the_same_updates_are_lost():
    parameter = nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
    adamw = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        parameter.grad = torch.eye(16, dtype=torch.bfloat16)
        adamw.step()
    assert bool((parameter == 1).all())


def test_fp32_parameters_are_their_own_masters():
    parameter = nn.Parameter(numbers(4, 4))
    assert MasterOptimizer([(MATRIX, parameter)], AdamWConfig(), 1.0).masters[MATRIX] is parameter


def test_gradients_are_clipped_to_the_global_norm():
    weights = {MATRIX: numbers(4, 4), NORM: numbers(4, seed=9)}
    parameters = {name: nn.Parameter(weight) for name, weight in weights.items()}
    optimizer = MasterOptimizer(parameters.items(), AdamWConfig(betas=(0.5, 0.5)), 2.0)
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 3.0)
    # 20 elements of 3: norm 3 sqrt(20); clipped by 2 / norm, and the first moment is half the gradient
    norm, applied = optimizer.step()
    assert applied
    assert norm == pytest.approx(3 * math.sqrt(20))
    moment = optimizer.optimizers[0].state[parameters[MATRIX]]["exp_avg"]
    assert moment[0, 0].item() == pytest.approx(0.5 * 3 * 2 / (3 * math.sqrt(20)), rel=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_gradients_that_are_not_finite_change_nothing_and_are_cleared(value):
    parameter = nn.Parameter(numbers(4, 4))
    optimizer = MasterOptimizer([(MATRIX, parameter)], AdamWConfig(), 1.0)
    before = parameter.detach().clone()
    parameter.grad = torch.zeros(4, 4).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(value))
    _, applied = optimizer.step()
    assert not applied
    assert (parameter.grad, optimizer.num_steps, len(optimizer.optimizers[0].state)) == (None, 0, 0)
    assert_bitwise_equal(parameter.detach(), before)


def test_the_learning_rate_warms_up_linearly_over_applied_steps():
    parameter = nn.Parameter(numbers(4, 4))
    optimizer = MasterOptimizer([(MATRIX, parameter)], AdamWConfig(lr=0.8, warmup_steps=4), 1.0)
    rates = []
    for step in range(7):
        rates.append(optimizer.lr)
        parameter.grad = torch.full((4, 4), float("nan") if step == 1 else 1.0)
        optimizer.step()
        if step != 1:
            assert optimizer.optimizers[0].param_groups[0]["lr"] == rates[-1]
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.6, 0.8, 0.8, 0.8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_restored_optimizer_continues_to_the_same_bits(name, dtype, tmp_path):
    shapes = {MATRIX: (8, 16), STACK: (2, 8, 16), NORM: (16,), "lm_head.weight": (5, 16)}

    def step(parameters, optimizer, number):
        for seed, parameter in enumerate(parameters.values()):
            parameter.grad = numbers(*parameter.shape, seed=100 * number + seed).to(dtype)
        optimizer.step()

    config = CONFIGS[name].model_copy(update={"warmup_steps": 4})
    parameters = {name: nn.Parameter(numbers(*shape).to(dtype)) for name, shape in shapes.items()}
    optimizer = MasterOptimizer(parameters.items(), config, 1.0)
    for number in range(3):
        step(parameters, optimizer, number)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    restored_parameters = copy.deepcopy(parameters)
    restored = MasterOptimizer(restored_parameters.items(), config, 1.0)
    restored.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    forgetful_parameters = copy.deepcopy(parameters)
    forgetful = MasterOptimizer(forgetful_parameters.items(), config, 1.0)
    for number in range(3, 6):
        for pair in (
            (parameters, optimizer),
            (restored_parameters, restored),
            (forgetful_parameters, forgetful),
        ):
            step(*pair, number)
    for key, parameter in parameters.items():
        assert_bitwise_equal(restored_parameters[key].detach(), parameter.detach())
        assert_bitwise_equal(restored.masters[key].detach(), optimizer.masters[key].detach())
        assert not torch.equal(forgetful.masters[key], optimizer.masters[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_gradient_is_held_between_steps(name, dtype):
    parameters = {MATRIX: nn.Parameter(numbers(8, 16).to(dtype)), NORM: nn.Parameter(numbers(16).to(dtype))}
    optimizer = MasterOptimizer(parameters.items(), CONFIGS[name], 1.0)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    groups = [group for one in optimizer.optimizers for group in one.param_groups]
    held = [*parameters.values(), *optimizer.masters.values(), *(one for group in groups for one in group["params"])]
    assert len(held) >= 6
    assert {one.grad for one in held} == {None}


def test_a_restored_optimizer_knows_how_many_steps_were_skipped():
    made = [MasterOptimizer([(MATRIX, nn.Parameter(numbers(4, 4)))], AdamWConfig(), 1.0) for _ in range(2)]
    for _ in range(2):
        made[0].step(finite=False)
    made[1].load_state_dict(made[0].state_dict())
    made[1].step(finite=False)
    assert made[1].skipped_in_a_row == 3


def test_an_applied_step_ends_the_row_of_skipped_ones():
    parameter = nn.Parameter(numbers(4, 4))
    optimizer = MasterOptimizer([(MATRIX, parameter)], AdamWConfig(), 1.0)
    in_a_row = []
    for finite in (False, False, True, False):
        parameter.grad = torch.ones(4, 4)
        optimizer.step(finite=finite)
        in_a_row.append(optimizer.skipped_in_a_row)
    assert in_a_row == [1, 2, 0, 1]


def test_bf16_gradients_of_many_micro_batches_are_summed_in_fp32():
    parameter = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
    optimizer = MasterOptimizer([("p", parameter)], AdamWConfig(lr=1e-3), 1e6)
    for _ in range(1024):
        (parameter * 2.0**-10).sum().backward()
        optimizer.accumulate()
    norm, _ = optimizer.step()
    # 64 entries of 1; in BF16 the sum stays at 1/4, where a 1024th is half of its last digit.
    assert norm == 8.0
