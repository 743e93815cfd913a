"""The comparison with ModelOpt's NVFP4: what is counted, the engine's arithmetic, ModelOpt itself if installed."""

import pytest
import torch
from torch import nn

from qarl_kernels import get_format, nvfp4, quantize_weight
from qarl_nemo.layers.linear import AlignedLinear
from qarl_nemo.layers.weight import MasterChanges

RECIPE = """
quantize:
  algorithm: max
  quant_cfg:
    - {quantizer_name: '*', enable: false}
    - quantizer_name: '*weight_quantizer'
      enable: true
      cfg: {num_bits: e2m1, block_sizes: {-1: 16, type: dynamic, scale_bits: e4m3}}
    - {quantizer_name: '*lm_head*', enable: false}
"""


@pytest.fixture(autouse=True)
def comparison(tools):
    tools("bench/nvfp4_modelopt")


def weight_of(*groups):
    """One row; a group is its largest weight, then another one, the rest zeros."""
    return torch.tensor([[value for group in groups for value in (*group, *[0.0] * 14)]], dtype=torch.bfloat16)


def differences(weight, **changed):
    from code_differences import count_differences
    from modelopt_model import Exported

    ours = quantize_weight(weight, get_format("nvfp4"), name="weight")
    divisor = ours.tensors["weight_global_scale"]
    theirs = Exported(ours.tensors["weight_packed"], ours.tensors["weight_scale"], divisor.reciprocal())
    return count_differences(weight, weight.abs().max().float().view(1), ours, theirs._replace(**changed))


def with_code(weight, column, code):
    codes = nvfp4.unpack(quantize_weight(weight, get_format("nvfp4"), name="weight").tensors["weight_packed"])
    codes[0, column] = code
    return {"packed": nvfp4.pack(codes)}


def with_scale(weight, group, value):
    scale = quantize_weight(weight, get_format("nvfp4"), name="weight").tensors["weight_scale"].float()
    scale[0, group] = value
    return {"scale": scale.to(torch.float8_e4m3fn)}


def test_equal_tensors_have_no_differences():
    counts = differences(weight_of((6.0, 0.3), (1.0, -0.7)))
    assert counts["bytes"] == counts["bytes_equal"] == 16
    assert counts["scales"] == counts["scales_equal"] == 2
    assert counts["global_scales_equal"] == counts["weights"] == 1
    assert counts["unexplained"] == counts["codes_tied"] == counts["scales_tied"] == 0


def test_a_global_scale_that_differs_in_its_last_bit_is_another():
    weight = weight_of((6.0, 0.3))
    other = torch.nextafter(torch.tensor(1 / 448), torch.tensor(1.0))
    counts = differences(weight, global_scale=other)
    assert (counts["global_scales_equal"], counts["unexplained"]) == (0, 0)
    assert differences(weight, global_scale=torch.tensor(1 / 448) * (1 + 2.0**-20))["unexplained"] == 1


# amax 6, G = 448, s = 448: a weight is its own quotient, and 0.25 lies half-way between the codes 0 and 1.
@pytest.mark.parametrize(("value", "tied"), [(0.25, 1), (0.26171875, 0)])
def test_only_half_way_codes_are_tied(value, tied):
    weight = weight_of((6.0, value))
    counts = differences(weight, **with_code(weight, 1, 1 - int(value > 0.25)))
    assert (counts["codes_tied"], counts["unexplained"]) == (tied, 1 - tied)
    assert counts["bytes_equal"] == 7


# amax 7: s = 64 * amax(group), which is 17 for 17/64, half-way between 16 and 18, and 16.5 for 33/128.
@pytest.mark.parametrize(("largest", "other", "tied"), [(17 / 64, 18.0, 1), (33 / 128, 18.0, 0)])
def test_only_half_way_scales_are_tied(largest, other, tied):
    weight = weight_of((7.0, 0.0), (largest, largest))
    ours = quantize_weight(weight, get_format("nvfp4"), name="weight").tensors["weight_scale"].float()[0, 1]
    counts = differences(weight, **with_scale(weight, 1, 34.0 - ours if tied else other))
    assert (counts["scales_tied"], counts["unexplained"]) == (tied, 1 - tied)


def test_scales_of_zeros_may_be_anything():
    weight = weight_of((6.0, 0.0), (0.0, 0.0))
    counts = differences(weight, **with_scale(weight, 1, 1.0))
    assert (counts["scales_of_zeros"], counts["scales_tied"], counts["unexplained"]) == (1, 0, 0)


def test_codes_of_another_scale_are_counted_with_it():
    weight = weight_of((7.0, 0.0), (17 / 64, 0.01))
    scale = with_scale(weight, 1, 18.0)
    if differences(weight, **scale)["scales_equal"] == 2:
        scale = with_scale(weight, 1, 16.0)
    counts = differences(weight, **scale, **with_code(weight, 17, 7))
    assert (counts["codes_scaled"], counts["codes_tied"], counts["unexplained"]) == (1, 0, 0)


def test_engine_multiplies_what_the_aligned_layer_does():
    # Integers up to 4 and codes times 448 in eight columns: every sum is exact, in whatever order.
    from engine_arithmetic import EngineLinear, Served

    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(32, 4, dtype=torch.bfloat16)
    codes = torch.randint(-3, 4, (4, 32), generator=generator) * 2.0
    linear.weight.data.copy_(codes.index_fill(1, torch.tensor([0, 16]), 6.0))
    aligned = AlignedLinear(linear, get_format("nvfp4"), MasterChanges())
    x = torch.randint(-4, 5, (3, 32), generator=generator).to(torch.bfloat16)
    tensors = aligned.aligned["weight"].quantized().tensors
    values = nvfp4.unscaled(tensors["weight_packed"], tensors["weight_scale"])
    served = Served(values, tensors["weight_global_scale"].reciprocal())
    assert torch.equal(EngineLinear(served, linear.bias, 2)(x), aligned(x))
    wrong = served._replace(factor=served.factor * 1.5)
    assert not torch.equal(EngineLinear(wrong, linear.bias, 2)(x), aligned(x))


def test_modelopt_learner_multiplies_what_it_exports(tmp_path):
    pytest.importorskip("modelopt", reason="needs ModelOpt: pip install nvidia-modelopt==0.47.0")
    import modelopt_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    config = Qwen2Config(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=64)
    config.num_attention_heads = config.num_key_value_heads = 2
    model = Qwen2ForCausalLM(config).to(modelopt_model.DEVICE, torch.bfloat16)
    linears = modelopt_model.quantize(model, recipe)
    exported = {name: modelopt_model.export(linear) for name, linear in linears.items()}
    modelopt_model.fold(model)
    assert len(linears) == 7
    attention = [one.global_scale for name, one in exported.items() if name[-6:] in ("q_proj", "k_proj", "v_proj")]
    assert len(attention) == 3
    assert len({scale.item() for scale in attention}) == 1
    for name, one in exported.items():
        assert torch.equal(linears[name].weight, modelopt_model.fake_weight(one).to(torch.bfloat16)), name
