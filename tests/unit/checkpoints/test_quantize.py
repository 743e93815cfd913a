import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_name
from safetensors import safe_open

from qarl_kernels import get_format, quantize_weight
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.files import FileError
from qarl_nemo.names import expert_names
from support import formats
from support.whole_models import DENSE, tensors_of

FORMATS = formats.FORMATS | {"w4a16_nested": get_format("w4a16", nested_in="w8a16")}
ALL_TARGETS = ["experts", "attention", "mlp"]


def amax_of_fused(name, weights):
    """The largest magnitude of all weights that vLLM multiplies as one with this: q, k and v; gate and up."""
    for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        others = [name.replace(own, part) for own in fused if own in name for part in fused]
        if others:
            return torch.cat([weights[other] for other in others]).abs().max().float().view(1)
    return None


def test_the_guides_example_runs(source, tmp_path, monkeypatch, capsys):
    page = Path(__file__).parents[3] / "docs/guide/checkpoints.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "Qwen3-30B-A3B").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    *_, progress, ratio = capsys.readouterr().out.splitlines()
    assert progress.startswith("100% ")
    assert 0 < float(ratio) < 1


@pytest.mark.parametrize("key", FORMATS)
def test_round_trip_is_the_one_quantizer(key, source, tmp_path, read_all, read_quantized):
    fmt = FORMATS[key]
    report = quantize_checkpoint(source, tmp_path / "out", fmt, ALL_TARGETS, max_shard_bytes=500_000)
    before, after = read_all(source), read_all(tmp_path / "out")
    assert len(report.plan.shards) > 1
    assert report.plan.source_bytes == sum(tensor.nbytes for tensor in before.values())
    assert report.plan.num_bytes == sum(tensor.nbytes for tensor in after.values())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.plan.num_bytes
    quantized = [row["name"] for row in report.rows if row["quantized"]]
    # 2 sparse layers x 4 experts x 3 projections, 3 layers x 4 attention projections, 1 dense layer x 3.
    assert len(quantized) == (0 if key == "bf16" else 24 + 12 + 3)
    expected_names = set()
    for name, weight in before.items():
        if name not in quantized:
            assert torch.equal(after[name], weight)
            expected_names.add(name)
            continue
        expected = quantize_weight(weight, fmt, amax=amax_of_fused(name, before)).narrowed()
        stored = {f"{name.removesuffix('.weight')}.{suffix}": value for suffix, value in expected.tensors.items()}
        for suffix_name, value in stored.items():
            assert after[suffix_name].dtype == value.dtype
            assert after[suffix_name].equal(value)
        assert torch.equal(read_quantized(after, name, fmt.narrowed), expected.dequantize())
        assert not torch.equal(expected.dequantize(), weight)
        expected_names |= {*stored} | ({f"{name}_shape"} if fmt.weight_kind == "int" else set())
    assert set(after) == expected_names


@pytest.mark.parametrize("key", ["w4a16", "w4a16_g32_narrow"])
def test_compressed_tensors_decompresses_to_the_same_bits(key, source, tmp_path, read_all, read_quantized):
    fmt = FORMATS[key]
    quantize_checkpoint(source, tmp_path / "out", fmt, ["experts"])
    tensors = read_all(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    for name in ("model.layers.0.mlp.experts.0.gate_proj", "model.layers.1.mlp.experts.3.down_proj"):
        stored = {key: tensors[f"{name}.{key}"] for key in ("weight_packed", "weight_scale", "weight_shape")}
        theirs = PackedQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
        ours = read_quantized(tensors, f"{name}.weight", fmt)
        assert theirs.dtype == ours.dtype == torch.bfloat16
        assert torch.equal(theirs, ours)
        # One flipped code must show.
        stored["weight_packed"] = stored["weight_packed"].clone()
        stored["weight_packed"][0, 0] ^= 1
        assert not torch.equal(PackedQuantizationCompressor.decompress(stored, scheme)["weight"], ours)


def test_compressed_tensors_reads_and_writes_int8_as_we_do(source, tmp_path, read_all, read_quantized):
    fmt = FORMATS["int8"]
    quantize_checkpoint(source, tmp_path / "out", fmt, ["experts"])
    before, tensors = read_all(source), read_all(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == CompressionFormat.int_quantized.value
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    name = "model.layers.1.mlp.experts.3.down_proj"
    stored = {key: tensors[f"{name}.{key}"] for key in ("weight", "weight_scale")}
    # Its factors stay FP32, so the product is rounded to BF16 here.
    theirs = IntQuantizationCompressor.decompress(dict(stored), scheme)["weight"].to(torch.bfloat16)
    assert torch.equal(theirs, read_quantized(tensors, f"{name}.weight", fmt))
    given = {"weight": before[f"{name}.weight"].float(), "weight_scale": stored["weight_scale"]}
    assert torch.equal(IntQuantizationCompressor.compress(given, scheme)["weight"], stored["weight"])
    stored["weight"] = -stored["weight"]
    assert not torch.equal(IntQuantizationCompressor.decompress(stored, scheme)["weight"].to(torch.bfloat16), theirs)


def test_compressed_tensors_decompresses_nvfp4_to_the_same_numbers(source, tmp_path, read_all, read_quantized):
    fmt = FORMATS["nvfp4"]
    quantize_checkpoint(source, tmp_path / "out", fmt, ALL_TARGETS)
    tensors = read_all(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == CompressionFormat.nvfp4_pack_quantized.value
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    for name in ("model.layers.1.mlp.experts.3.down_proj", "model.layers.0.self_attn.k_proj"):
        stored = {key: tensors[f"{name}.{key}"] for key in ("weight_packed", "weight_scale", "weight_global_scale")}
        theirs = NVFP4PackedCompressor.decompress(dict(stored), scheme)["weight"].double()
        # It divides in BF16 where the engine does not round: two steps of 2^-8 and one of ours.
        ours = read_quantized(tensors, f"{name}.weight", fmt).double()
        assert ((theirs - ours).abs() <= 3 * 2.0**-8 * ours.abs()).all()
        stored["weight_packed"] = stored["weight_packed"] ^ 1
        changed = NVFP4PackedCompressor.decompress(stored, scheme)["weight"].double()
        assert not ((changed - ours).abs() <= 3 * 2.0**-8 * ours.abs()).all()


def test_weights_that_engines_fuse_have_one_global_scale_wherever_they_are(source, tmp_path, read_all):
    # A shard for each tensor: a weight's partners are in other files.
    quantize_checkpoint(source, tmp_path / "out", FORMATS["nvfp4"], ALL_TARGETS, max_shard_bytes=1)
    divisors = {name: tensor.item() for name, tensor in read_all(tmp_path / "out").items() if "global_scale" in name}
    attention = [f"model.layers.1.self_attn.{part}_proj.weight_global_scale" for part in "qkv"]
    expert = [f"model.layers.1.mlp.experts.2.{part}_proj.weight_global_scale" for part in ("gate", "up")]
    dense = [f"model.layers.2.mlp.{part}_proj.weight_global_scale" for part in ("gate", "up")]
    for names in (attention, expert, dense):
        assert len({divisors[name] for name in names}) == 1
    # Others have their own; two BF16 maxima may be equal.
    assert len(set(divisors.values())) > 10


@pytest.mark.parametrize("key", ["w4a16", "fp8_block", "fp8_channel", "int8"])
def test_stacked_refit_tensors_hold_the_same_bits(key, source, tmp_path, read_all):
    fmt = FORMATS[key]
    quantize_checkpoint(source, tmp_path / "out", fmt, ["experts"])
    before, after = read_all(source), read_all(tmp_path / "out")
    for projection in ("gate_up", "down"):
        block = f"model.layers.1.mlp.experts.{projection}_proj"
        stacked = torch.stack([torch.cat([before[n] for n in parts]) for parts in expert_names(f"{block}.weight", 4)])
        for suffix, value in quantize_weight(stacked, fmt).tensors.items():
            rows = [torch.cat([after[n] for n in parts]) for parts in expert_names(f"{block}.{suffix}", 4)]
            assert torch.stack(rows).equal(value)


def vllm_skips(module, config):
    """Mirror vLLM's two rules: exact names and `re:` for compressed-tensors, exact names only for fp8."""
    if config["quant_method"] == "fp8":
        kept = config["modules_to_not_convert"]
        block, found, _ = module.partition(".mlp.experts")
        return block + found in kept if found else module in kept
    return any(match_name(module, pattern) for pattern in config["ignore"])


@pytest.mark.parametrize("key", ["w4a16", "w4a8", "fp8_block", "fp8_channel", "int8", "nvfp4"])
@pytest.mark.parametrize("targets", [["experts"], ["attention"], ["experts", "attention"], ["mlp"]])
def test_exactly_the_quantized_linears_are_not_ignored(key, targets, source, tmp_path):
    report = quantize_checkpoint(source, tmp_path / "out", FORMATS[key], targets)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    linears = [row for row in report.rows if row["kind"] in {"experts", "attention", "mlp", "router"}]
    for row in linears:
        assert vllm_skips(row["name"].removesuffix(".weight"), config) == (not row["quantized"])
    routers = [row for row in linears if row["kind"] == "router"]
    assert len(routers) == 2
    assert vllm_skips("lm_head", config)
    fused = "model.layers.0.self_attn.qkv_proj"
    assert vllm_skips(fused, config) == ("attention" not in targets)


def test_config_keeps_the_model_and_adds_the_format(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "out", FORMATS["w4a8"], ["experts"])
    before = json.loads((source / "config.json").read_text())
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = after.pop("quantization_config")
    assert after == before
    assert after["dtype"] == "bfloat16"
    assert quantization["format"] == "pack-quantized"
    assert quantization["config_groups"]["group_0"]["weights"]["group_size"] == 128
    assert quantization["config_groups"]["group_0"]["input_activations"]["strategy"] == "token"


def test_a_float32_checkpoint_is_declared_bf16(make_source, tmp_path, read_all):
    weights = tensors_of(DENSE, torch.float32)
    folder = make_source(weights, DENSE | {"torch_dtype": "float32"})
    quantize_checkpoint(folder, tmp_path / "out", FORMATS["w4a16"], ["attention"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["torch_dtype"], "dtype" in config) == ("bfloat16", False)
    module = "model.layers.0.self_attn.q_proj"
    expected = quantize_weight(weights[f"{module}.weight"].to(torch.bfloat16), FORMATS["w4a16"])
    assert torch.equal(read_all(tmp_path / "out")[f"{module}.weight_packed"], expected.tensors["weight_packed"])


def test_bf16_writes_no_quantization_config(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "out", FORMATS["bf16"], ["experts"])
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("name", ["bf16", "w4a16"])
def test_a_quantization_config_of_null_says_nothing(make_source, tmp_path, name):
    # transformers writes it where a dequantized model's was set to None.
    source = make_source(tensors_of(DENSE), DENSE | {"quantization_config": None})
    quantize_checkpoint(source, tmp_path / "out", get_format(name), ["mlp"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization_config" in config) == (name != "bf16")


def test_record_and_companion_files(source, tmp_path):
    out = tmp_path / "out"
    report = quantize_checkpoint(source, out, FORMATS["w4a16_g32_narrow"], ["experts"])
    record = json.loads((out / "qarl_quantization.json").read_text())
    assert record["scale_convention"] == "narrow_range"
    assert record["group_size"] == 32
    assert record["targets"] == ["experts"]
    assert record["tensors"] == report.rows
    with safe_open(out / "model-00001-of-00001.safetensors", framework="pt") as handle:
        metadata = handle.metadata()
    assert metadata["format"] == "pt"
    assert metadata["qarl_scale_convention"] == "narrow_range"
    assert metadata["qarl_tool"] == record["tool"]
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert {path.suffix for path in out.iterdir()} == {".json", ".jinja", ".safetensors"}
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1


def test_a_source_that_is_unfit_leaves_nothing_behind(source, tmp_path):
    with pytest.raises(ValueError, match="unknown targets: expert"):
        quantize_checkpoint(source, tmp_path / "out", FORMATS["w4a16"], ["expert"])
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_no_engine_reads_is_refused_before_anything_is_written(make_source, tmp_path):
    folder = make_source(tensors_of(DENSE), DENSE | {"rms_norm_eps": -1.0})
    with pytest.raises(FileError, match=r"rms_norm_eps=-1\.0"):
        quantize_checkpoint(folder, tmp_path / "out", FORMATS["w4a16"], ["attention"])
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_source_and_destination_must_be_apart(source):
    for destination in (source, source / "inside", source.parent):
        with pytest.raises(ValueError, match="must not contain each other"):
            quantize_checkpoint(source, destination, FORMATS["w4a16"], ["experts"])


@pytest.mark.parametrize("key", ["w4a16_g32_narrow", "fp8_block", "fp8_channel"])
def test_threads_and_blocks_of_rows_change_no_bit(key, make_source, tmp_path, read_all):
    # 640 rows are converted in blocks of 256, 256 and 128.
    config = DENSE | {"hidden_size": 128, "num_attention_heads": 10, "num_hidden_layers": 4}
    weights = tensors_of(config)
    folder = make_source(weights, config)
    outputs = []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        quantize_checkpoint(folder, tmp_path / str(num_threads), FORMATS[key], ["attention"])
        assert torch.get_num_threads() == num_threads
        outputs.append((tmp_path / str(num_threads) / "model-00001-of-00001.safetensors").read_bytes())
    torch.set_num_threads(1)
    assert outputs[0] == outputs[1]
    stored = read_all(tmp_path / "1")
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(4)]
    assert all(weights[name].shape == (640, 128) for name in names)
    for name in names:
        for suffix, expected in quantize_weight(weights[name], FORMATS[key]).tensors.items():
            assert torch.equal(stored[name.removesuffix("weight") + suffix].float(), expected.float())


def test_every_weight_that_holds_nan_is_listed_also_copied_ones(make_source, tmp_path):
    weights = tensors_of(DENSE)
    weights["model.norm.weight"][3] = float("inf")
    weights["model.layers.1.self_attn.q_proj.weight"][0, 1] = float("nan")
    with pytest.raises(ValueError, match="NaN or Inf in 2 weights") as error:
        quantize_checkpoint(make_source(weights, DENSE), tmp_path / "out", FORMATS["w4a16"], ["attention"])
    assert "model.layers.1.self_attn.q_proj.weight [256, 256] (1, the first at index [0, 1]: nan)" in str(error.value)
    assert "model.norm.weight [256] (1, the first at index [3]: inf)" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_what_integer_codes_would_make_infinite_is_refused(make_source, tmp_path):
    weights = tensors_of(DENSE)
    weights["model.norm.weight"][3] = weights["model.layers.1.self_attn.q_proj.weight"][0, 1] = 3.3e38
    folder = make_source(weights, DENSE)
    with pytest.raises(ValueError, match=r"in 1 weight \(.* 2\^127") as error:
        quantize_checkpoint(folder, tmp_path / "a", FORMATS["w4a16"], ["attention"])
    assert "q_proj.weight [256, 256] (1, the first at index [0, 1]: 3.29" in str(error.value)
    quantize_checkpoint(folder, tmp_path / "b", FORMATS["fp8_channel"], ["attention"])


def test_old_rotary_buffers_and_a_tied_copy_are_left_out(make_source, tmp_path, read_all):
    config = DENSE | {"model_type": "llama", "tie_word_embeddings": True}
    weights, frequencies = tensors_of(config), "model.layers.1.self_attn.rotary_emb.inv_freq"
    extra = {frequencies: torch.ones(32), "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    report = quantize_checkpoint(make_source(weights | extra, config), tmp_path / "out", FORMATS["w4a16"], ["mlp"])
    assert set(report.plan.dropped) == set(extra)
    assert json.loads((tmp_path / "out" / "qarl_quantization.json").read_text())["dropped"] == report.plan.dropped
    assert not set(extra) & set(read_all(tmp_path / "out"))
    extra["lm_head.weight"][0, 0] += 1
    with pytest.raises(
        ValueError, match=r"lm_head.weight is not model.embed_tokens.weight; .* set tie_word_embeddings"
    ):
        quantize_checkpoint(make_source(weights | extra, config, "other"), tmp_path / "b", FORMATS["w4a16"], ["mlp"])
    assert not list(tmp_path.glob("b*"))


@pytest.mark.parametrize("kind", ["dangling", "pipe", "folder"])
def test_a_tokenizer_that_is_no_file_is_refused_before_anything_is_written(source, tmp_path, kind):
    copy = shutil.copytree(source, tmp_path / "copy")
    path = copy / "tokenizer.json"
    path.unlink(missing_ok=True)
    {"dangling": lambda: path.symlink_to("nowhere"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    with pytest.raises(FileError, match=r"tokenizer.json: expected a file to be copied"):
        quantize_checkpoint(copy, tmp_path / "out", FORMATS["w4a16"], ["experts"])
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_damaged_files_that_engines_read_are_all_named_before_anything_is_written(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    for name, text in {"tokenizer.json": "{", "generation_config.json": "[]", "tokenizer_config.json": "{}"}.items():
        (copy / name).write_text(text)
    with pytest.raises(FileError, match=r"2 file\(s\) that would be copied cannot be read:") as error:
        quantize_checkpoint(copy, tmp_path / "out", FORMATS["w4a16"], ["experts"])
    assert "tokenizer.json" in str(error.value)
    assert "generation_config.json" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
