"""QuRL's update-aware quantization as learning rates, against QuRL's own transformation of the weights."""

import pytest
import torch
from torch import nn

from qarl_kernels import get_format
from qarl_nemo.layers.install import install
from qarl_nemo.names import module_kind, reads_norm
from qarl_nemo.train.config import AdamWConfig, MuonConfig
from qarl_nemo.train.optimizer import MasterOptimizer
from qarl_nemo.update_aware import lr_factors
from support.asserts import assert_bitwise_equal
from support.engines import tiny_model

TARGETS = ("experts", "attention")
LR, DECAY, EPS, STEPS = 1e-2, 0.125, 1e-8, 4


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("attention",), {"self_attn.q_proj.weight": 2, "self_attn.k_proj.weight": 2, "self_attn.v_proj.weight": 2,
                          "input_layernorm.weight": 0.5}),
        (("experts",), {"mlp.experts.gate_up_proj": 2, "post_attention_layernorm.weight": 0.5}),
    ],
)  # fmt: skip
def test_only_what_is_quantized_and_the_norm_before_it_learn_otherwise(targets, expected):
    names = [name for name, _ in tiny_model(num_hidden_layers=2).named_parameters()]
    factors = {f"model.layers.{layer}.{name}": factor for layer in (0, 1) for name, factor in expected.items()}
    assert lr_factors(names, targets, 2.0) == factors
    assert lr_factors(names, targets, 1.0) == {}


def test_what_reads_no_norm_in_a_dense_mlp_learns_as_before():
    gate, up, down = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    expected = {gate: 2, up: 2, "model.layers.0.post_attention_layernorm.weight": 0.5}
    assert lr_factors([gate, up, down], ("mlp",), 2.0) == expected


def test_megatrons_names_give_the_same_factors():
    names = ["self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias", "self_attention.linear_proj.weight",
             "mlp.experts.linear_fc1.weight0", "mlp.experts.linear_fc1.weight11", "mlp.experts.linear_fc2.weight0",
             "mlp.router.weight", "input_layernorm.weight", "pre_mlp_layernorm.weight"]  # fmt: skip
    prefix = "module.module.decoder.layers.3."
    chosen = (0, 3, 4)
    expected = {prefix + names[place]: 1.5 for place in chosen} | {prefix + name: 1 / 1.5 for name in names[-2:]}
    assert lr_factors([prefix + name for name in names], TARGETS, 1.5) == expected
    dense = [prefix + "mlp.linear_fc1.weight", prefix + "mlp.linear_fc2.weight"]
    assert set(lr_factors(dense, ("mlp",), 1.5)) == {dense[0], prefix + "pre_mlp_layernorm.weight"}


def transform(name: str) -> float:
    """What QuRL multiplies a parameter by for s = 2."""
    module = name.removesuffix(".weight")
    if name.endswith("layernorm.weight"):
        return 2.0
    return 0.5 if reads_norm(module) or module_kind(module) == "router" else 1.0


def losses(model: nn.Module, report, step) -> list[float]:
    """Losses of four steps, whose gradients `step` applies."""
    tokens = torch.randint(model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        step()
        model.zero_grad()
        report.changes.bump()
        found.append(loss.item())
    return found


def run(scale: float):
    """Steps by learning rates."""
    model = tiny_model(num_hidden_layers=1)
    report = install(model, TARGETS, get_format("w4a16", group_size=32))
    config = AdamWConfig(lr=LR, weight_decay=DECAY, update_aware_scale=scale)
    optimizer = MasterOptimizer(model.named_parameters(), config, 1e9, TARGETS)
    return model, report, losses(model, report, optimizer.step)


def run_transformed():
    """Steps of QuRL's transformed weights, s = 2, by plain AdamW with every gradient's own scale in eps.

    The router is transformed as well, and its step halved in return, because by learning rates it learns as before.
    """
    model = tiny_model(num_hidden_layers=1)
    groups = []
    for name, parameter in model.named_parameters():
        factor = transform(name)
        parameter.data *= factor
        group = {"params": [parameter], "eps": EPS / factor}
        if module_kind(name.removesuffix(".weight")) == "router":
            group |= {"lr": LR * factor, "weight_decay": DECAY / factor}
        groups.append(group)
    report = install(model, TARGETS, get_format("w4a16", group_size=32))
    betas = AdamWConfig().betas
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, betas=betas)
    return model, report, losses(model, report, optimizer.step)


def test_learning_rates_give_the_trajectory_of_the_transformed_weights_bit_for_bit():
    ours, our_report, found = run(2.0)
    theirs, their_report, expected = run_transformed()
    assert found == expected
    assert len(set(found)) == STEPS
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert_bitwise_equal(one.detach() * transform(name), other.detach())
    for name, weight in our_report.weights.items():
        other = their_report.weights[name].quantized()
        assert_bitwise_equal(weight.quantized().codes(), other.codes())
        scale = weight.quantized().tensors["weight_scale"] * transform(name)
        assert_bitwise_equal(scale, other.tensors["weight_scale"])
    # Without the factors the steps are others.
    assert run(1.0)[2][1:] != expected[1:]


def test_more_codes_flip_where_weights_learn_faster():
    flipped = {}
    for scale in (1.0, 4.0):
        model = tiny_model(num_hidden_layers=1)
        report = install(model, TARGETS, get_format("w4a16", group_size=32))
        before = {name: weight.quantized().codes() for name, weight in report.weights.items()}
        optimizer = MasterOptimizer(
            model.named_parameters(), AdamWConfig(lr=1e-4, update_aware_scale=scale), 1e9, TARGETS
        )
        losses(model, report, optimizer.step)
        for name, weight in report.weights.items():
            flipped[name, scale] = float((weight.quantized().codes() != before[name]).double().mean())
    for name in report.weights:
        grew = flipped[name, 4.0] > 1.5 * flipped[name, 1.0]
        assert grew == reads_norm(name.removesuffix(".weight")), (name, flipped)


@pytest.mark.parametrize("config", [AdamWConfig(lr=0.5, weight_decay=0.1), MuonConfig(lr=0.5, weight_decay=0.1)])
def test_the_factors_reach_every_group_and_decay_as_before(config):
    model = tiny_model(num_hidden_layers=1)
    changed = config.model_copy(update={"update_aware_scale": 2.0, "warmup_steps": 2})
    optimizer = MasterOptimizer(model.named_parameters(), changed, 1e9, TARGETS)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    groups = [group for one in optimizer.optimizers for group in one.param_groups]
    # The first of two steps of warm-up has half the learning rate, 0.25.
    assert {group["lr"] for group in groups} == {0.25, 0.5, 0.125}
    assert [group["lr"] * group["weight_decay"] for group in groups] == pytest.approx([0.5 * 0.5 * 0.1] * len(groups))
    assert sum(len(group["params"]) for group in groups if group["lr"] == 0.125) == 2
