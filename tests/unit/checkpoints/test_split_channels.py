"""Channel splitting: the same function in a wider MLP, and a smaller error once it is quantized."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from qarl_kernels import get_format, quantize_weight
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.checkpoints.split_channels import channel_order, plan_splitting, split_columns

W4 = get_format("w4a16", group_size=32)
BF16 = get_format("bf16")


def with_outliers(rows, columns, outliers):
    weight = torch.randn(rows, columns)
    weight[:, outliers] *= 12
    return weight.bfloat16()


def test_outliers_are_split_and_pairs_share_a_group():
    # 16 in each of two groups, neighbours among them, so that some would be cut by the end of a group.
    outliers = [*range(1, 33, 2), *range(80, 96)]
    down = with_outliers(64, 128, outliers)
    order = channel_order(down, 32, 32).tolist()
    assert len({*outliers} & {channel for channel in range(128) if order.count(channel) == 2}) > 28
    assert set(order) == set(range(128))
    firsts = [place for place in range(159) if order[place] == order[place + 1]]
    assert len(firsts) == 32
    assert all(place % 32 != 31 for place in firsts)


def test_by_hand():
    # One row in one group of four: 8 sets the scale, 3 would if 8 were halved twice. Halves of 4 lead still.
    assert channel_order(torch.tensor([[1.0, 3.0, 8.0, 2.0]]), 2, 4).tolist()[2:5] != [2, 2, 2]
    assert channel_order(torch.tensor([[1.0, 2.0, 8.0, 7.0]]), 1, 0).tolist() == [0, 1, 2, 2, 3]


def test_the_channel_is_split_that_lowers_the_squared_scales_most():
    # Behind 8 its group has 6: 64 - 36 = 28. Half of the other group's 6 leads still: 36 - 9 = 27.
    down = torch.tensor([[8.0, 6, 0, 0, 6, 1, 1, 1]])
    assert channel_order(down, 1, 4).tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]


def test_a_channel_that_was_halved_makes_way_for_the_next_of_its_group():
    # 64 - 49 = 15 is more than 16 - 4 = 12; then 7 leads before the half of 8: 49 - 16 = 33.
    down = torch.tensor([[8.0, 7, 1, 1, 4, 2, 1, 1]])
    assert channel_order(down, 2, 4).tolist() == [0, 0, 1, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "fmt",
    [W4, get_format("int8"), *(get_format(name, group_size=32, nested_in="w8a16") for name in ("w4a16", "w2a16"))],
    ids=["w4a16", "int8", "nested w4a16", "nested w2a16"],
)
def test_halves_are_shifted_by_a_quarter_of_the_step_of_the_grid_that_they_lie_on(fmt):
    down = with_outliers(8, 62, [5, 40])
    order = channel_order(down, 2, 32)
    assert order[:8].tolist() == [0, 1, 2, 3, 4, 5, 5, 6]
    wide = split_columns(down, order, fmt)
    step = quantize_weight(wide, fmt).tensors["weight_scale"][:, 0].float().flatten()
    step *= 2.0 ** (fmt.nested_bits - fmt.grid_bits) if fmt.nested_bits else 1.0
    # Two rounds leave less than 1 / (4 d)^2, d the largest weight's divisor, 1.6 % with two bits. One would leave
    # 1 / (4 d), 3.3 % with four bits. BF16 rounds weight and scale by up to 2^-8 each.
    torch.testing.assert_close(wide[:, 5] - wide[:, 6], step / 2, rtol=0.024, atol=0)


def test_two_halves_are_the_whole():
    down = with_outliers(64, 128, [5, 77])
    order = channel_order(down, 32, 32)
    for fmt in (W4, get_format("int8"), BF16, get_format("w2a16", group_size=32, nested_in="w8a16")):
        wide = split_columns(down, order, fmt)
        back = torch.zeros(64, 128).index_add_(1, order, wide.float())
        assert (back - down.float()).abs().max() <= down.abs().max() * 2.0**-22
        assert (wide[:, 1:] != wide[:, :-1])[:, order[1:] == order[:-1]].all() == fmt.is_quantized
        doubled = wide.clone()
        doubled[:, 0] *= 2
        assert (torch.zeros(64, 128).index_add_(1, order, doubled.float()) - down.float()).abs().max() > 1e-3
    assert wide.dtype == torch.float32


def test_shifted_halves_have_a_quarter_of_the_error_of_equal_ones():
    down = with_outliers(256, 128, [5, 77])
    order = channel_order(down, 32, 32)
    halved = torch.zeros(160, dtype=torch.bool)
    halved[1:] = order[1:] == order[:-1]
    halved[:-1] |= halved[1:].clone()

    def errors(wide, order, width):
        served = quantize_weight(wide, W4).dequantize().float()
        error = (torch.zeros(256, width).index_add_(1, order, served) - down.float()).square()
        return error[:, order[halved].unique()].mean(), error.mean()

    shifted, whole = errors(split_columns(down, order, W4), order, 128)
    equal, _ = errors(split_columns(down, order, BF16), order, 128)
    assert float(shifted) == pytest.approx(float(equal) / 4, rel=0.15)
    before = (quantize_weight(down, W4).dequantize().float() - down.float()).square().mean()
    assert whole < before / 2


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(24)[None]).logits


@pytest.mark.parametrize("name", ["mixed", "qwen2"])
def test_a_split_model_is_the_same_model_of_greater_width(name, models, tmp_path):
    folder, _ = models[name]
    targets = ["experts", "mlp"] if name == "mixed" else ["mlp"]
    report = quantize_checkpoint(folder, tmp_path / "out", BF16, targets, split_channels=0.1)
    assert report.plan.splitting.widths == dict.fromkeys(targets, (256, 384))
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out"))
    widths = ["intermediate_size", "moe_intermediate_size"][: len(targets)]
    assert [(before[key], after[key]) for key in widths] == [(256, 384)] * len(targets)
    expected, found = logits(folder), logits(tmp_path / "out")
    # The same products, added in another order.
    bound = 1e-5 * expected.abs().max()
    assert (found - expected).abs().max() < bound
    quantize_checkpoint(folder, tmp_path / "w4", W4, targets, split_channels=0.1)
    quantize_checkpoint(folder, tmp_path / "plain", BF16, targets)
    assert torch.equal(logits(tmp_path / "plain"), expected)
    assert json.loads((tmp_path / "w4" / "qarl_quantization.json").read_text())["split_channels"] == 0.1


def test_what_is_stored_is_the_quantized_split_weight(models, tmp_path, read_all):
    folder, before = models["mixed"]
    quantize_checkpoint(folder, tmp_path / "out", W4, ["experts", "mlp"], split_channels=0.05)
    after = read_all(tmp_path / "out")
    for block in ("model.layers.0.mlp", "model.layers.1.mlp.experts.3"):
        down = before[f"{block}.down_proj.weight"]
        order = channel_order(down, 128 if block.endswith("mlp") else 32, 32)
        wide = {
            "gate_proj": before[f"{block}.gate_proj.weight"][order],
            "down_proj": split_columns(down, order, W4),
        }
        for projection, weight in wide.items():
            module = f"{block}.{projection}"
            assert after[f"{module}.weight_shape"].tolist() == list(weight.shape)
            for suffix, tensor in quantize_weight(weight, W4).tensors.items():
                assert torch.equal(after[f"{module}.{suffix}"], tensor)


@pytest.mark.parametrize("fmt", [W4, BF16], ids=["w4a16", "bf16"])
def test_a_bad_value_is_named_where_the_source_has_it(fmt, models, tmp_path):
    folder, weights = models["mixed"]
    shutil.copytree(folder, tmp_path / "bad")
    bad = {name: one.clone() for name, one in weights.items()}
    bad["model.layers.1.mlp.experts.3.down_proj.weight"][3, 200] = torch.nan
    bad["model.layers.0.mlp.up_proj.weight"][201, 7] = torch.inf
    save_file(bad, tmp_path / "bad" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="NaN or Inf in 2 weights") as error:
        quantize_checkpoint(tmp_path / "bad", tmp_path / "out", fmt, ["experts", "mlp"], split_channels=0.1)
    for place in ("(1, the first at index [3, 200]: nan)", "(1, the first at index [201, 7]: inf)"):
        assert place in str(error.value)


def test_widths_grow_to_what_the_kernels_take():
    assert plan_splitting(0.1, {"experts": 768}, get_format("w4a16")).config == {"moe_intermediate_size": 896}
    assert plan_splitting(1 / 6, {"experts": 768}, get_format("w4a16")).config == {"moe_intermediate_size": 896}
    assert plan_splitting(0.17, {"experts": 768}, get_format("w4a16")).config == {"moe_intermediate_size": 1024}
    # 400 * 0.28 is a little more than 112.
    assert plan_splitting(0.28, {"experts": 400}, get_format("int8")).config == {"moe_intermediate_size": 512}
    # Its kernels take multiples of 256 for w4a8, of 16 for int8, and of 64 rows for a dense w4a16.
    assert plan_splitting(0.1, {"experts": 768}, get_format("w4a8")).config == {"moe_intermediate_size": 1024}
    assert plan_splitting(0.01, {"mlp": 4864}, get_format("int8")).config == {"intermediate_size": 4928}
    assert plan_splitting(0.01, {"mlp": 4864}, get_format("w4a16")).config == {"intermediate_size": 4992}


@pytest.mark.parametrize(
    ("share", "name", "targets", "problem"),
    [
        (0.0, "w4a16", ["experts"], "split_channels=0.0 is not above 0 and at most 1"),
        (1.5, "w4a16", ["experts"], "split_channels=1.5 is not above 0 and at most 1"),
        (0.1, "fp8_block", ["experts"], "fp8_block has no grid of equal steps"),
        (0.1, "w4a16", ["attention"], "targets name neither"),
    ],
)
def test_what_cannot_be_split_is_refused_before_a_weight_is_read(share, name, targets, problem, models, tmp_path):
    folder, _ = models["moe"]
    with pytest.raises(ValueError, match=re.escape(problem)):
        quantize_checkpoint(folder, tmp_path / "out", get_format(name), targets, split_channels=share)
    assert not (tmp_path / "out").exists()


def test_no_channel_is_split_more_than_once():
    assert plan_splitting(1.0, {"experts": 128}, get_format("w4a16")).config == {"moe_intermediate_size": 256}
    # w4a8's kernels take multiples of 256.
    with pytest.raises(ValueError, match=r"more than once: 64 experts channels -> 256"):
        plan_splitting(1.0, {"experts": 64}, get_format("w4a8"))


def test_bench_multiplies_by_the_sum_of_what_is_stored(models, tmp_path, read_all, tools):
    tools("bench")
    from channel_splitting import effective

    folder, before = models["qwen2"]
    quantize_checkpoint(folder, tmp_path / "out", W4, ["mlp"], split_channels=0.05)
    name = "model.layers.0.mlp.down_proj"
    down, stored = before[f"{name}.weight"], read_all(tmp_path / "out")
    served, width = effective(down, W4, 5)
    order = channel_order(down, width - down.shape[1], 32)
    wide = quantize_weight(split_columns(down, order, W4), W4)
    assert torch.equal(wide.tensors["weight_packed"], stored[f"{name}.weight_packed"])
    assert torch.equal(served, torch.zeros(down.shape).index_add_(1, order, wide.dequantize().float()))
    plain, unsplit_width = effective(down, W4, 0)
    assert unsplit_width == down.shape[1] < width
    assert not torch.equal(plain, served)
