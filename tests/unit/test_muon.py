"""One Muon in all learners: the recipes' keys, the embedded engine's step and Megatron's own are the same rule."""

import importlib.util

import muon_rms
import pytest
import torch

from qarl_nemo.muon import ADAM_BETAS, MEGATRON, MOMENTUM, TORCH, different_settings

needs_emerging_optimizers = pytest.mark.skipif(
    importlib.util.find_spec("emerging_optimizers") is None, reason="needs Emerging-Optimizers, and Python 3.12"
)


def test_every_recipe_with_muon_sets_every_key_of_the_rule():
    blocks = muon_rms.recipe_settings()
    assert "qarl-paper.yaml" in blocks
    assert [name for name, block in blocks.items() if different_settings(block)] == []


def test_recipes_step_as_far_as_the_embedded_engine():
    assert muon_rms.measure() <= 1.01


@pytest.mark.parametrize("shape", muon_rms.SHAPES)
def test_an_update_is_nearly_a_fifth_of_the_learning_rate(shape):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for update in (muon_rms.embedded_update(gradient), muon_rms.megatron_update(MEGATRON, gradient)):
        # .2 times singular values of .7 to 1.2
        assert 0.14 < muon_rms.rms(update) < 0.24


def test_megatrons_defaults_step_five_times_as_far():
    gradient = muon_rms.gradients()[0]
    own = muon_rms.rms(muon_rms.megatron_update({}, gradient)) / muon_rms.rms(muon_rms.embedded_update(gradient))
    assert 5.0 < own < 6.0


@pytest.mark.parametrize(
    ("wrong", "factor"), [({"muon_extra_scale_factor": 0.5}, 2.5), ({"muon_scale_mode": "shape_scaling"}, 1 / 16)]
)
def test_another_scale_is_seen(wrong, factor):
    gradient = muon_rms.gradients()[0]  # 256 x 256: sqrt(max) is 16, and sqrt(max(1, rows / columns)) is 1
    right, other = (muon_rms.rms(muon_rms.megatron_update(MEGATRON | change, gradient)) for change in ({}, wrong))
    assert other / right == pytest.approx(factor, rel=1e-5)


def test_torchs_words_say_the_same_rule():
    assert muon_rms.COEFFICIENTS[MEGATRON["muon_coefficient_type"]] == [TORCH["ns_coefficients"]]
    assert (MEGATRON["muon_num_ns_steps"], MEGATRON["muon_nesterov"]) == (TORCH["ns_steps"], TORCH["nesterov"])
    assert (MEGATRON["adam_beta1"], MEGATRON["adam_beta2"]) == ADAM_BETAS
    # torch's own: lr * .2 * sqrt(max(rows, columns))
    own = torch.optim._muon._adjust_lr(1.0, TORCH["adjust_lr_fn"], torch.Size([512, 128]))
    megatrons = muon_rms.megatron_scale(MEGATRON["muon_scale_mode"], 512, 128) * MEGATRON["muon_extra_scale_factor"]
    assert own == pytest.approx(megatrons)


def test_only_other_settings_are_named():
    assert different_settings(dict(MEGATRON)) == {}
    assert different_settings(MEGATRON | {"muon_extra_scale_factor": 1.0}) == {"muon_extra_scale_factor": 0.2}
    assert different_settings({"optimizer": "dist_muon"}) == MEGATRON


@needs_emerging_optimizers
def test_the_definitions_are_emerging_optimizers_own():
    from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    for gradient in muon_rms.gradients():
        for mode in ("spectral", "shape_scaling", "unit_rms_norm"):
            own = get_muon_scale_factor(*gradient.shape, mode=mode)
            assert muon_rms.megatron_scale(mode, *gradient.shape) == pytest.approx(own)
        for name in muon_rms.COEFFICIENTS:
            own = newton_schulz(gradient, 5, name)
            torch.testing.assert_close(muon_rms.orthogonalized(gradient, name, 5), own, rtol=1e-3, atol=1e-4)


@needs_emerging_optimizers
def test_megatrons_muon_takes_the_step_of_the_embedded_engine():
    pytest.importorskip("megatron", reason="needs megatron-core")
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    fields = {name for name in OptimizerConfig.__dataclass_fields__ if name.startswith("muon_")}
    # Which kernel multiplies is no part of the rule.
    assert fields - {"muon_use_syrk"} == {key for key in MEGATRON if key.startswith("muon_")}
    config = OptimizerConfig(**MEGATRON)
    for gradient in muon_rms.gradients():
        weight = torch.nn.Parameter(torch.zeros_like(gradient))
        optimizer = TensorParallelMuon(
            [weight],
            lr=1.0,
            weight_decay=0.0,
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            fp32_matmul_prec=config.muon_fp32_matmul_prec,
            coefficient_type=config.muon_coefficient_type,
            num_ns_steps=config.muon_num_ns_steps,
            scale_mode=config.muon_scale_mode,
            extra_scale_factor=config.muon_extra_scale_factor,
        )
        weight.grad = gradient.clone()
        optimizer.step()
        quotient = muon_rms.rms(weight.detach()) / muon_rms.rms(muon_rms.embedded_update(gradient))
        assert quotient == pytest.approx(1.0, abs=0.01)
    assert config.muon_momentum == MOMENTUM
