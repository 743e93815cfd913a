"""`--format bf16`: every tensor in the dtype that config.json says, whatever the source's is."""

import json

import pytest
import torch
from safetensors.torch import load_file

from qarl_kernels import get_format
from qarl_nemo.checkpoints import open_megatron, quantize_checkpoint
from qarl_nemo.checkpoints.merge import Training
from qarl_nemo.checkpoints.plan import plan_quantization
from qarl_nemo.checkpoints.shard import save_shard
from qarl_nemo.checkpoints.split_channels import channel_order
from support.megatron.files import Layout, write_megatron
from support.whole_models import DENSE, SPARSE, checkpoint_of, tensors_of

BF16 = get_format("bf16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bfloat16])
def test_every_tensor_is_rounded_to_what_config_json_says(dtype, make_source, tmp_path, read_all):
    weights = tensors_of(DENSE, dtype)
    folder = make_source(weights, DENSE | {"dtype": "float32"})
    report = quantize_checkpoint(folder, tmp_path / "out", BF16, ["mlp"])
    found = read_all(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(weights, torch.bfloat16)
    assert all(torch.equal(found[name], weights[name].bfloat16()) for name in weights)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert report.plan.num_bytes == 2 * sum(weight.numel() for weight in weights.values())
    assert {row["format"] for row in report.rows} == {"bf16"}


def test_shards_in_the_sources_dtypes_are_not_resumed(make_source, tmp_path, read_all):
    folder, out, work = make_source(tensors_of(DENSE, torch.float32), DENSE), tmp_path / "out", tmp_path / "out.partial"

    def stop(progress):
        if progress.shard == 2:
            raise KeyboardInterrupt

    def convert(**options):
        return quantize_checkpoint(folder, out, BF16, ["mlp"], max_shard_bytes=400_000, **options)

    with pytest.raises(KeyboardInterrupt):
        convert(progress=stop)
    # As an earlier version left it.
    (shard,) = (work / "checkpoint").glob("*.safetensors")
    crc32 = save_shard({name: tensor.float() for name, tensor in load_file(shard).items()}, shard, {})
    record = json.loads((work / "qarl_resume.json").read_text())
    del record["settings"]["dtype"]
    record["shards"][shard.name] |= {"file_bytes": shard.stat().st_size, "crc32": crc32}
    (work / "qarl_resume.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"dtype was None, now bfloat16.* delete the folder, or overwrite it"):
        convert()
    assert convert(overwrite=True).num_resumed_shards == 0
    assert {tensor.dtype for tensor in read_all(out).values()} == {torch.bfloat16}


def test_a_quantized_output_copies_what_is_no_target(make_source, tmp_path, read_all):
    weights = tensors_of(DENSE, torch.float32)
    report = quantize_checkpoint(make_source(weights, DENSE), tmp_path / "out", get_format("w4a16"), ["mlp"])
    found = read_all(tmp_path / "out")
    copied = [row["name"] for row in report.rows if not row["quantized"]]
    assert all(torch.equal(found[name], weights[name]) for name in copied)
    assert {row["format"] for row in report.rows} == {"f32", "w4a16"}


def test_a_converted_checkpoint_is_rounded_too(tmp_path, models, read_all):
    hf, _ = models["qwen3"]
    config = json.loads((hf / "config.json").read_text())
    weights = tensors_of(config, torch.float32)
    source = write_megatron(tmp_path / "megatron", weights, config, Layout())
    quantize_checkpoint(open_megatron(source, hf), tmp_path / "out", BF16, ["mlp"])
    found = read_all(tmp_path / "out")
    assert all(torch.equal(found[name], weight.bfloat16()) for name, weight in weights.items())


@pytest.mark.parametrize(("config", "targets"), [(DENSE, ["experts"]), (SPARSE, ["mlp"])], ids=["dense", "sparse"])
def test_targets_that_a_model_has_not_are_no_problem_where_nothing_depends_on_them(config, targets):
    planned = list(plan_quantization(checkpoint_of(config), BF16, targets).tensors)
    linears = [tensor for tensor in planned if tensor.kind in ("experts", "attention", "mlp")]
    assert {tensor.reason for tensor in linears} == {"format bf16 quantizes nothing"}
    with pytest.raises(ValueError, match=r"cannot quantize .*\n.*targets that match no weight"):
        plan_quantization(checkpoint_of(config), get_format("w4a16"), targets)
    with pytest.raises(ValueError, match=r"cannot convert source to bf16:\n(.*\n)?.*targets that match no weight"):
        plan_quantization(checkpoint_of(config), BF16, targets, split_channels=0.1)


@pytest.mark.parametrize("name", ["bf16", "w4a16"])
def test_what_becomes_infinite_in_bf16_is_called_so(name, make_source, tmp_path):
    weights = tensors_of(DENSE, torch.float32)
    # The largest BF16 number is 3.3895e38.
    weights["model.norm.weight"][3] = 3.4e38
    named = r"in 1 weight \(or magnitudes beyond BF16's range of 3\.39e38, to which weights are rounded, "
    with pytest.raises(ValueError, match=named) as error:
        quantize_checkpoint(make_source(weights, DENSE), tmp_path / "out", get_format(name), ["mlp"])
    assert "model.norm.weight [256] (1, the first at index [3]: 3.39" in str(error.value)
    assert "e+38, beyond BF16's range)" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_split_halves_add_up_to_the_rounded_weight(dtype, make_source, tmp_path, read_all):
    weights = tensors_of(DENSE, dtype)
    down = "model.layers.1.mlp.down_proj.weight"
    # The smallest numbers of FP16, of which some have no half in it.
    weights[down] = (weights[down] * (2.0**-22 if dtype == torch.float16 else 1)).to(dtype)
    folder = make_source(weights, DENSE)
    quantize_checkpoint(folder, tmp_path / "out", BF16, ["mlp"], split_channels=0.1)
    found, whole = read_all(tmp_path / "out"), weights[down].bfloat16()
    order = channel_order(whole, 128, 128)
    assert found[down].dtype == torch.bfloat16
    assert torch.equal(torch.zeros(256, 256).index_add_(1, order, found[down].float()), whole.float())
    up = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(found[up], weights[up].bfloat16()[order])


def test_what_an_adapter_adds_is_summed_in_fp32():
    # 1 + 2^-9, times alpha / r; BF16 would lose the second product.
    a, b = torch.tensor([[1.0], [2.0**-9]]).bfloat16(), torch.tensor([[1.0, 1.0]]).bfloat16()
    training = Training(BF16, (), {"q_proj": (a, b)}, 2.0, {}, ())
    assert training.change("q_proj").item() == 2 + 2.0**-8
    assert training.change("k_proj") is None
