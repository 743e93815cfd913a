"""Checkpoints whose codes take no more bits than their grid has, which vLLM's Humming kernels for dense layers read."""

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open

from qarl_kernels import QuantizedWeight, get_format, quantize_weight
from qarl_nemo.checkpoints import open_checkpoint, quantize_checkpoint
from qarl_nemo.checkpoints.stored import Stored, stored_layers
from support.whole_models import DENSE, tensors_of

TARGETS = ["attention", "mlp"]
FORMATS = [
    pytest.param(get_format(f"w{bits}a16", group_size=group_size, own_width=True), id=f"w{bits}a16_g{group_size}")
    for bits, group_size in ((2, 128), (2, 32), (3, 32), (3, 128), (5, 128), (6, 64), (7, 32))
]


@pytest.fixture
def dense(make_source):
    torch.manual_seed(0)
    return make_source(tensors_of(DENSE), DENSE)


def numbers(packed: torch.Tensor, scale: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The weight that an engine multiplies, read bit by bit: bit i of a row is bit i % 32 of its word i // 32."""
    words = packed.long() & 0xFFFFFFFF
    stream = torch.stack([(words >> place) & 1 for place in range(32)], dim=-1).flatten(-2)
    assert not stream[:, columns * bits :].any()
    places = stream[:, : columns * bits].unflatten(-1, (columns, bits))
    codes = (places << torch.arange(bits)).sum(-1) - 2 ** (bits - 1)
    return codes.to(torch.bfloat16) * scale.repeat_interleave(columns // scale.shape[1], dim=1)


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_written_is_what_the_learner_executes(fmt, dense, tmp_path, read_all):
    report = quantize_checkpoint(dense, tmp_path / "out", fmt, TARGETS)
    before, after = read_all(dense), read_all(tmp_path / "out")
    names = [row["name"].removesuffix(".weight") for row in report.rows if row["quantized"]]
    assert len(names) == 7 * DENSE["num_hidden_layers"]
    for name in names:
        weight = before[f"{name}.weight"]
        packed, scale = after[f"{name}.weight_packed"], after[f"{name}.weight_scale"]
        assert after[f"{name}.weight_shape"].tolist() == list(weight.shape)
        # int32 words of a row, without gaps: a code takes its bits and no more.
        assert packed.shape == (weight.shape[0], weight.shape[1] * fmt.grid_bits // 32)
        read = numbers(packed, scale, fmt.grid_bits, weight.shape[1])
        executed = quantize_weight(weight, fmt).dequantize()
        assert torch.equal(read, executed)
        # As w4a16's storage holds them, where that holds them at all.
        in_int4 = get_format(fmt.name, group_size=fmt.group_size)
        assert torch.equal(read, quantize_weight(weight, in_int4).dequantize())
        assert not torch.equal(numbers(packed ^ 1, scale, fmt.grid_bits, weight.shape[1]), executed)


@pytest.mark.parametrize("fmt", FORMATS)
def test_config_json_says_the_width(fmt, dense, tmp_path):
    report = quantize_checkpoint(dense, tmp_path / "out", fmt, TARGETS)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert (config["format"], group["weights"]["num_bits"]) == ("pack-quantized", fmt.grid_bits)
    assert (group["weights"]["strategy"], group["weights"]["group_size"]) == ("group", fmt.group_size)
    assert group["input_activations"] is None
    QuantizationConfig.model_validate(config)
    record = json.loads((tmp_path / "out" / "qarl_quantization.json").read_text())
    assert (record["format"], record["num_bits"]) == (fmt.name, fmt.grid_bits)
    with safe_open(tmp_path / "out" / report.plan.shards[0].file, framework="pt") as handle:
        assert handle.metadata()["qarl_num_bits"] == str(fmt.grid_bits)


@pytest.mark.parametrize("group_size", [128, 32])
def test_compressed_tensors_reads_two_bits_as_we_do(group_size, dense, tmp_path, read_all):
    """It pads other widths than 2, 4 and 8 bits where a word ends, which vLLM's kernels do not read."""
    fmt = get_format("w2a16", group_size=group_size, own_width=True)
    quantize_checkpoint(dense, tmp_path / "out", fmt, TARGETS)
    before, after = read_all(dense), read_all(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj"):
        stored = {key: after[f"{name}.{key}"] for key in ("weight_packed", "weight_scale", "weight_shape")}
        executed = quantize_weight(before[f"{name}.weight"], fmt).dequantize()
        assert torch.equal(PackedQuantizationCompressor.decompress(dict(stored), scheme)["weight"], executed)
        stored["weight_packed"] = stored["weight_packed"] ^ 1
        assert not torch.equal(PackedQuantizationCompressor.decompress(stored, scheme)["weight"], executed)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_checkpoint_is_known_again_and_read_as_it_is_stored(fmt, dense, tmp_path, read_all):
    quantize_checkpoint(dense, tmp_path / "out", fmt, TARGETS)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert Stored.of(checkpoint) == Stored(fmt, ("attention", "mlp"))
    name = "model.layers.0.self_attn.o_proj"
    weight = read_all(dense)[f"{name}.weight"]
    expected = quantize_weight(weight, fmt)
    layout = {f"{name}.{key}": (tuple(one.shape), one.dtype) for key, one in expected.tensors.items()}
    (layer,) = stored_layers(checkpoint, layout)
    found = {key.rpartition(".")[2]: tensor for key, tensor in layer.items()}
    assert torch.equal(QuantizedWeight(fmt, expected.shape, found).dequantize(), expected.dequantize())


@pytest.mark.parametrize("name", ["w2a16", "w3a16", "w4a16"])
def test_narrow_grids_in_int4_are_known_by_their_record(name, dense, tmp_path):
    quantize_checkpoint(dense, tmp_path / "out", get_format(name), TARGETS)
    assert Stored.of(open_checkpoint(tmp_path / "out")) == Stored(get_format(name), ("attention", "mlp"))


def test_codes_of_two_bits_may_be_rounded_from_eight(dense, tmp_path, read_all):
    fmt = get_format("w2a16", nested_in="w8a16", own_width=True)
    quantize_checkpoint(dense, tmp_path / "out", fmt, TARGETS)
    name = "model.layers.0.mlp.up_proj"
    weight, after = read_all(dense)[f"{name}.weight"], read_all(tmp_path / "out")
    read = numbers(after[f"{name}.weight_packed"], after[f"{name}.weight_scale"], 2, weight.shape[1])
    assert torch.equal(read, quantize_weight(weight, get_format("w2a16", nested_in="w8a16")).dequantize())
    assert not torch.equal(read, quantize_weight(weight, get_format("w2a16")).dequantize())
    with pytest.raises(ValueError, match=r"nested_in='w8a16' \(legal: w8a16, for codes stored in 8, 4 or 2 bits\)"):
        get_format("w3a16", nested_in="w8a16", own_width=True)


def test_a_killed_conversion_does_not_go_on_in_another_width(dense, tmp_path, monkeypatch):
    own, in_int4 = get_format("w2a16", own_width=True), get_format("w2a16")

    def killed(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(dense, tmp_path / "out", in_int4, TARGETS, progress=killed)
    with pytest.raises(ValueError, match="num_bits"):
        quantize_checkpoint(dense, tmp_path / "out", own, TARGETS)
