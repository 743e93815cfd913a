"""Megatron checkpoints of every layout against the Hugging Face model they were written from, bit for bit."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from qarl_kernels import get_format
from qarl_nemo.checkpoints import open_megatron, quantize_checkpoint
from support.files import contents
from support.megatron.files import Layout

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LAYOUTS = {
    "TP1": Layout(),
    "TP2": Layout(tp=2, etp=2, padded_vocab=64),
    "TP2, own norms": Layout(tp=2, etp=1, separate_norms=True),
    "a key per layer": Layout(per_layer=True, etp=4),
    "a key per layer and expert": Layout(per_layer=True, singleton=True, tp=2, separate_norms=True),
    "two experts per chunk": Layout(experts_per_chunk=2, padded_vocab=128),
}
CASES = [
    *(("moe", layout) for layout in LAYOUTS),
    *(("mixed", layout) for layout in LAYOUTS if "layer" in layout),
    *((model, layout) for model in ("qwen3", "qwen2") for layout in ("TP2", "a key per layer and expert")),
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_bf16_gives_back_the_model_bit_for_bit(model, layout, models, megatron, tmp_path):
    source, folder = megatron(model, LAYOUTS[layout])
    targets = ["mlp"] if model.startswith("qwen") else ["experts"]
    report = quantize_checkpoint(open_megatron(source, folder), tmp_path / "out", get_format("bf16"), targets)
    found = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    expected = models[model][1]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert report.plan.source_bytes == sum(tensor.nbytes for tensor in expected.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )


def test_halves_and_heads_in_another_order_are_another_model(models, megatron):
    _, weights = models["moe"]
    stacked = torch.stack([weights[f"model.layers.0.mlp.experts.{e}.gate_proj.weight"] for e in range(4)])
    qkv = torch.cat([weights[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    replaced = {
        "decoder.layers.0.mlp.experts.experts.linear_fc1.weight": stacked.repeat(1, 2, 1),
        "decoder.layers.0.self_attention.linear_qkv.weight": qkv,
    }
    checkpoint = open_megatron(*megatron(per_layer=True, replaced=replaced))
    with checkpoint.open_reader() as reader:
        same = {info.name: torch.equal(reader.read(info), weights[info.name]) for info in checkpoint.tensors}
    differing = {re.sub(r"experts\.\d", "experts.E", name.removeprefix("model.")) for name in same if not same[name]}
    assert differing == {
        *(f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"),
        "layers.0.mlp.experts.E.up_proj.weight",
    }


@pytest.mark.parametrize(("key", "targets"), [("w4a16", ["experts", "attention"]), ("fp8_block", ["experts"])])
def test_quantized_is_what_quantizing_the_model_gives(key, targets, models, megatron, tmp_path):
    source, folder = megatron(layout=LAYOUTS["TP2"])
    quantize_checkpoint(open_megatron(source, folder), tmp_path / "a", get_format(key), targets)
    quantize_checkpoint(folder, tmp_path / "b", get_format(key), targets)
    found, expected = (load_file(tmp_path / name / "model-00001-of-00001.safetensors") for name in "ab")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in expected.items())
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()


def test_each_chunk_of_an_attention_is_read_once(megatron, monkeypatch):
    from qarl_nemo.checkpoints import chunks

    source, folder = megatron(layout=LAYOUTS["TP2"])
    checkpoint = open_megatron(source, folder)
    loaded = []
    load = chunks.load_chunk
    monkeypatch.setattr(chunks, "load_chunk", lambda *place: (loaded.append(place[2]), load(*place))[1])
    with checkpoint.open_reader() as reader:
        for info in checkpoint.tensors:
            reader.read(info)
    assert len(loaded) == len(set(loaded))


def test_chunks_that_are_held_stay_bounded(megatron, monkeypatch):
    from qarl_nemo.checkpoints import chunks

    source, folder = megatron(tp=2)
    checkpoint = open_megatron(source, folder)
    # One half of a gate is [64, 128] BF16.
    monkeypatch.setattr(chunks, "_CACHE_BYTES", 4 * 64 * 128 * 2)
    with checkpoint.open_reader() as reader:
        for info in checkpoint.tensors:
            reader.read(info)
            held = [chunk.nbytes for chunk in reader._chunks._held.values()]
            assert len(held) == 1 or sum(held) <= chunks._CACHE_BYTES


def test_the_folder_above_an_iteration_will_do(models, megatron, tmp_path):
    source, folder = megatron()
    step = tmp_path / "step_5"
    (step / "policy" / "weights").mkdir(parents=True)
    shutil.copytree(source, step / "policy" / "weights" / "iter_0000000")
    assert open_megatron(step, folder).folder == step / "policy" / "weights" / "iter_0000000"
    shutil.copytree(source, step / "policy" / "weights" / "iter_0000001")
    with pytest.raises(ValueError, match=r"holds 2; name one of them:\n  - .*iter_0000000\n  - .*iter_0000001"):
        open_megatron(step, folder)
    for description, message in (
        ('{"sharded_backend": "zarr"}', "has the format zarr; only torch_dist is read"),
        ("[]", r"metadata\.json: expected Megatron's description of a checkpoint, an object, but it holds \[\]"),
    ):
        (source / "metadata.json").write_text(description)
        with pytest.raises(ValueError, match=message):
            open_megatron(source, folder)
    with pytest.raises(ValueError, match=r"is not a torch_dist checkpoint .*; it is a Hugging Face model"):
        open_megatron(folder, folder)
    with pytest.raises(ValueError, match=r"nowhere does not exist$"):
        open_megatron(tmp_path / "nowhere", folder)


def test_the_steps_of_a_run_are_listed_in_order(models, tmp_path):
    for step in (5, 10, 100):
        (tmp_path / f"step_{step}" / "policy" / "weights" / "iter_0000000").mkdir(parents=True)
        (tmp_path / f"step_{step}" / "policy" / "weights" / "iter_0000000" / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match="it holds 3; name one of them") as error:
        open_megatron(tmp_path, models["moe"][0])
    listed = [line.removeprefix("  - ") for line in str(error.value).splitlines()[1:]]
    assert listed == [f"{tmp_path}/step_{step}/policy/weights/iter_0000000" for step in (5, 10, 100)]


def test_a_pointer_in_the_place_of_a_shard_and_a_hub_name_get_their_hints(megatron, tmp_path, monkeypatch):
    source, folder = megatron()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"what model this is: Qwen/Qwen3-8B does not exist; a model on the .*: hf download Qwen/Qwen3-8B",
    ):
        open_megatron(source, "Qwen/Qwen3-8B")
    (shard,) = source.glob("*.distcp")
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(ValueError, match=rf"{shard.name} is a Git LFS pointer, not the file itself"):
        open_megatron(source, folder)


def test_everything_that_does_not_fit_is_listed_at_once(megatron):
    layers = "decoder.layers."
    replaced = {
        f"{layers}mlp.router.weight": None,
        f"{layers}mlp.shared_experts.linear_fc2.weight": torch.zeros(2, 8, 8),
        "mtp.layers.0.weight": torch.zeros(3),
        f"{layers}self_attention.linear_qkv.weight": torch.zeros(2, 192, 128, dtype=torch.bfloat16),
        f"{layers}pre_mlp_layernorm.weight": torch.zeros(2, 128),
        f"{layers}self_attention.q_layernorm.weight": torch.zeros(2, 32, dtype=torch.int8),
        "output_layer.weight": torch.ones(64, 128),
        "embedding.word_embeddings.weight": torch.zeros(58, 128),
    }
    source, folder = megatron(replaced=replaced)
    with pytest.raises(ValueError, match="cannot convert") as error:
        open_megatron(source, folder)
    for line in (
        "missing decoder.layers.mlp.router.weight or decoder.layers.N.mlp.router.weight: "
        "for model.layers.{0..1}.mlp.gate.weight",
        "keys that this model does not have: decoder.layers.mlp.shared_experts.linear_fc2.weight, mtp.layers.0.weight",
        # (4 + 2 * 2) heads of 32
        "decoder.layers.self_attention.linear_qkv.weight has shape [2, 192, 128], the config implies [2, 256, 128]",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight and decoder.layers.pre_mlp_layernorm.weight are both there",
        "decoder.layers.self_attention.q_layernorm.weight has dtype torch.int8, not floating point",
        "output_layer.weight: 4 of 4 rows behind the vocabulary of 60 are not zero",
        "embedding.word_embeddings.weight has shape [58, 128], the config implies [60, 128] or more rows",
    ):
        assert line in str(error.value)
    assert str(error.value).count("\n  - ") == 7


def test_padding_that_training_moved_is_left_out_when_asked(models, megatron, tmp_path):
    embedding = torch.cat([models["moe"][1]["model.embed_tokens.weight"], torch.ones(4, 128, dtype=torch.bfloat16)])
    source, folder = megatron(padded_vocab=64, replaced={"embedding.word_embeddings.weight": embedding})
    with pytest.raises(ValueError, match="4 of 4 rows behind the vocabulary of 60 are not zero"):
        open_megatron(source, folder)
    checkpoint = open_megatron(source, folder, drop_vocab_padding=True)
    with checkpoint.open_reader() as reader:
        assert torch.equal(reader.read(checkpoint.tensors[0]), embedding[:60])


def test_a_config_that_is_not_enough_says_what_it_lacks(megatron, tmp_path):
    source, folder = megatron()
    config = json.loads((folder / "config.json").read_text())
    hf = tmp_path / "hf"
    hf.mkdir()
    for changes, message in (
        ({"hidden_size": None, "num_local_experts": None}, "lacks hidden_size, num_experts or num_local_experts"),
        ({"model_type": "llama"}, 'model_type is "llama"; supported: qwen3_moe, qwen3, qwen2'),
        ({"attention_bias": True}, "attention_bias set"),
        ({"quantization_config": {}}, None),
    ):
        (hf / "config.json").write_text(json.dumps(config | changes))
        if message:
            with pytest.raises(ValueError, match=message):
                open_megatron(source, hf)
    with pytest.raises(ValueError, match=f"--hf-model {hf} is quantized .* name the BF16 model's folder"):
        quantize_checkpoint(open_megatron(source, hf), tmp_path / "out", get_format("w4a16"), ["experts"])
    with pytest.raises(ValueError, match=r"missing file config\.json"):
        open_megatron(source, tmp_path)


def test_every_nan_is_listed_by_its_hugging_face_name(models, megatron, tmp_path):
    qkv = torch.zeros(2, 256, 128, dtype=torch.bfloat16)
    # Of 2 groups of (2 queries, key, value) of 32 rows: row 64 + 1 is the first key head's second, layer 1.
    qkv[1, 65, 7] = float("nan")
    norm = torch.ones(128, dtype=torch.bfloat16)
    norm[5] = float("inf")
    replaced = {"decoder.layers.self_attention.linear_qkv.weight": qkv, "decoder.final_layernorm.weight": norm}
    source, folder = megatron(replaced=replaced)
    with pytest.raises(ValueError, match="NaN or Inf in 2 weights") as error:
        quantize_checkpoint(open_megatron(source, folder), tmp_path / "out", get_format("w4a16"), ["experts"])
    assert "model.layers.1.self_attn.k_proj.weight [64, 128] (1, the first at index [1, 7]: nan)" in str(error.value)
    assert "model.norm.weight [128] (1, the first at index [5]: inf)" in str(error.value)


def test_a_stopped_conversion_goes_on_and_gives_the_same_bytes(megatron, tmp_path):
    source, folder = megatron(layout=LAYOUTS["TP2"])

    def run(name, progress=None):
        options = {"max_shard_bytes": 100_000, "progress": progress}
        return quantize_checkpoint(
            open_megatron(source, folder), tmp_path / name, get_format("w4a16"), ["experts"], **options
        )

    def stop_in_shard_three(progress):
        if progress.shard == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("out", stop_in_shard_three)
    assert run("out").num_resumed_shards == 2
    run("whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
