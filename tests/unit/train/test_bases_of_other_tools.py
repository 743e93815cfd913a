"""Frozen bases that compressed-tensors wrote: executed with the numbers that vLLM holds for a BF16 model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from qarl_formats import quantization_config
from qarl_kernels import get_format
from qarl_nemo.checkpoints import open_checkpoint
from qarl_nemo.checkpoints.merge import Training, merged_checkpoint
from qarl_nemo.measure.eval.models import find_model
from qarl_nemo.measure.eval.packed import PackedEngine
from qarl_nemo.train.export_packed import _precision
from qarl_nemo.train.run import train_run
from qarl_nemo.train.trainer import Trainer
from support.asserts import assert_bitwise_equal
from support.engines import EOS, PROMPTS, TOKENIZER, tiny_model
from support.other_tools import decompressed, write_compressed
from support.runs import make_config

SIZES = {"num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 256, "hidden_size": 256, "head_dim": 64}
TARGETS = ("experts", "attention")
Q_PROJ, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.experts.2.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    tiny_model(dtype=torch.bfloat16, **SIZES).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def config_of(folder, name):
    policy = {"_override_": True, "model_path": str(folder), "train_micro_batch_size": 8}
    qarl = {"_override_": True, "format": name, "targets": list(TARGETS)}
    return make_config(folder.parent / "run", policy=policy, qarl=qarl, rollout={"max_new_tokens": 2})


def model_of(folder, name):
    return Trainer(config_of(folder, name)).model


def held(model, module):
    """What the learner holds of one weight: its dequantized numbers, of one expert alone."""
    parent, _, leaf = module.rpartition(".")
    if ".experts." not in module:
        return model.get_submodule(module).aligned["weight"].weight.dequantize()
    block, _, expert = parent.rpartition(".")
    return model.get_submodule(block).aligned[leaf].weight.dequantize()[int(expert)]


@pytest.mark.parametrize("module", [Q_PROJ, DOWN])
@pytest.mark.parametrize(
    ("preset", "name", "scale_dtype", "engine_dtype"),
    [
        ("W4A16", "w4a16", torch.float16, torch.bfloat16),
        ("W4A16", "w4a16", torch.float32, torch.bfloat16),
        ("W8A16", "w8a16", torch.float16, torch.bfloat16),
        ("W4AFP8", "w4a8", torch.float16, torch.bfloat16),
        ("FP8_BLOCK", "fp8_block", torch.bfloat16, torch.float32),
        ("FP8_BLOCK", "fp8_block", torch.float32, torch.float32),
        ("FP8_DYNAMIC", "fp8_channel", torch.bfloat16, torch.float32),
        ("FP8_DYNAMIC", "fp8_channel", torch.float32, torch.float32),
    ],
)
def test_weights_are_compressed_tensors_own_with_scales_as_vllm_holds_them(
    preset, name, scale_dtype, engine_dtype, module, source, tmp_path
):
    folder = write_compressed(source, tmp_path / "base", preset, TARGETS, scale_dtype)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    ours = held(model_of(folder, name), module)
    assert_bitwise_equal(ours, decompressed(folder, preset, module, dtype=torch.bfloat16, scale_dtype=engine_dtype))
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    if scale_dtype != engine_dtype and engine_dtype == torch.bfloat16:
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(ours, decompressed(folder, preset, module).bfloat16())


def test_a_block_may_be_cut_off_at_the_last_row(tmp_path):
    # Keys of two heads have 64 rows, half a block.
    tiny_model(dtype=torch.bfloat16, **SIZES | {"head_dim": 32}).save_pretrained(tmp_path / "source")
    TOKENIZER.save_pretrained(tmp_path / "source")
    folder = write_compressed(tmp_path / "source", tmp_path / "base", "FP8_BLOCK", TARGETS)
    module = Q_PROJ.replace("q_proj", "k_proj")
    theirs = decompressed(folder, "FP8_BLOCK", module, dtype=torch.bfloat16, scale_dtype=torch.float32)
    assert theirs.shape == (64, 256)
    assert_bitwise_equal(held(model_of(folder, "fp8_block"), module), theirs)


def test_nvfp4_of_compressed_tensors_is_read(source, tmp_path):
    folder = write_compressed(source, tmp_path / "base", "NVFP4A16", TARGETS)
    ours, theirs = held(model_of(folder, "nvfp4"), DOWN), decompressed(folder, "NVFP4A16", DOWN)
    # e2m1 * e4m3 is exact; times 1/G in FP32 and rounded to BF16 here, e4m3 / G in BF16 or finer there.
    bound = 2**-7 * theirs.abs()
    assert (ours - theirs).abs().le(bound).all()
    assert not (ours.roll(1, 0) - theirs).abs().le(bound).all()


def gemm_bound(x, weight):
    """K products of FP32 summed in any order, in FP32."""
    return x.shape[-1] * 2**-23 * (x.abs() @ weight.abs().T)


def test_int4_products_are_those_of_the_rounded_scales(source, tmp_path):
    folder = write_compressed(source, tmp_path / "base", "W4A16", TARGETS, torch.float16)
    layer = model_of(folder, "w4a16").get_submodule(Q_PROJ)
    x = torch.randn(5, 256, dtype=torch.float64).bfloat16()
    with torch.no_grad():
        found = layer(x.float()).double()
    right = decompressed(folder, "W4A16", Q_PROJ, dtype=torch.float64, scale_dtype=torch.bfloat16)
    wrong = decompressed(folder, "W4A16", Q_PROJ, dtype=torch.float64)
    for weight, same in ((right, True), (wrong, False)):
        assert bool((found - x.double() @ weight.T).abs().le(gemm_bound(x.double(), weight)).all()) is same


def test_block_products_are_those_of_fp8_activations_in_groups(source, tmp_path):
    folder = write_compressed(source, tmp_path / "base", "FP8_BLOCK", TARGETS)
    layer = model_of(folder, "fp8_block").get_submodule(Q_PROJ)
    x = torch.randn(5, 256).bfloat16()
    groups = x.float().unflatten(1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    eights = ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1).double()
    weight = decompressed(folder, "FP8_BLOCK", Q_PROJ, dtype=torch.float64, scale_dtype=torch.float32)
    with torch.no_grad():
        found = layer(x.float()).double()
    assert (found - eights @ weight.T).abs().le(2 * gemm_bound(eights, weight)).all()
    assert not (found - x.double() @ weight.T).abs().le(2 * gemm_bound(eights, weight)).all()


def test_blocks_of_either_layout_are_one_model(source, tmp_path):
    theirs = write_compressed(source, tmp_path / "theirs", "FP8_BLOCK", TARGETS)
    ours = write_compressed(source, tmp_path / "ours", "FP8_BLOCK", TARGETS)
    (file,) = ours.glob("*.safetensors")
    save_file({name.replace("weight_scale", "weight_scale_inv"): one for name, one in load_file(file).items()}, file)
    quantize(ours, quantization_config(get_format("fp8_block"), ignore=["lm_head"]))
    tokens = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        outputs = [model_of(folder, "fp8_block")(input_ids=tokens).logits for folder in (theirs, ours)]
    assert_bitwise_equal(*outputs)


@pytest.mark.parametrize(
    ("preset", "name", "scale_dtype"),
    [("W4A16", "w4a16", torch.float16), ("FP8_BLOCK", "fp8_block", torch.bfloat16)],
)
def test_export_and_eval_read_the_numbers_that_are_trained_on(preset, name, scale_dtype, source, tmp_path):
    folder = write_compressed(source, tmp_path / "base", preset, TARGETS, scale_dtype)
    learner, base = model_of(folder, name), open_checkpoint(folder)
    merged = merged_checkpoint(base, Training(get_format(name), TARGETS, {}, 1.0, {}, ()))
    infos = {info.name: info for info in merged.tensors}
    with merged.open_reader() as reader:
        for module in (Q_PROJ, DOWN):
            assert_bitwise_equal(reader.read(infos[f"{module}.weight"]), held(learner, module))
    model = find_model(folder)
    assert (model.format_name, model.targets) == (name, TARGETS)
    engine = PackedEngine(model, TOKENIZER, [EOS], device=torch.device("cpu"), dtype=torch.bfloat16)
    slots = engine._sampler.slots
    assert_bitwise_equal(slots[Q_PROJ].weight.dequantize(), held(learner, Q_PROJ))
    experts, _, leaf = DOWN.replace(".2.", ".").rpartition(".")
    assert_bitwise_equal(slots[f"{experts}.{leaf}"].weight.dequantize()[2], held(learner, DOWN))
    wrong = merged_checkpoint(base, Training(get_format("int8"), TARGETS, {}, 1.0, {}, ()))
    with pytest.raises((KeyError, AssertionError)), wrong.open_reader() as reader:
        assert_bitwise_equal(reader.read(infos[f"{Q_PROJ}.weight"]), held(learner, Q_PROJ))


def test_an_fp16_model_is_served_in_the_dtype_that_it_was_trained_in(source, tmp_path):
    folder = write_compressed(source, tmp_path / "base", "W4A16", TARGETS, torch.float16)
    assert _precision(open_checkpoint(folder)) == ""
    file = folder / "config.json"
    config = {key: one for key, one in json.loads(file.read_text()).items() if key != "dtype"}
    file.write_text(json.dumps(config | {"torch_dtype": "float16"}))
    assert _precision(open_checkpoint(folder)) == " --dtype bfloat16"


def quantize(folder, quantization):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))


def quantization_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def changed(folder, change):
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def test_scales_that_bf16_cannot_hold_are_all_named(source, tmp_path):
    def spoil(tensors):
        tensors[f"{Q_PROJ}.weight_scale"][3, 1] = 1e-45
        tensors[f"{DOWN}.weight_scale"][0, 0] = 3.4e38
        # Zero is what the file says, not what became of it.
        tensors[f"{DOWN}.weight_scale"][1, 0] = 0

    folder = changed(write_compressed(source, tmp_path / "base", "W4A16", TARGETS, torch.float32), spoil)
    with pytest.raises(ValueError, match="has scales that engines cannot hold; quantize it anew") as error:
        model_of(folder, "w4a16")
    assert f"{Q_PROJ}.weight_scale: 1 of 512 become 0 or infinite in torch.bfloat16, the first at [3, 1]" in str(
        error.value
    )
    assert f"{DOWN}.weight_scale: 1 of 512" in str(error.value)


def test_one_scale_that_bf16_cannot_hold_is_enough(source, tmp_path):
    folder = write_compressed(source, tmp_path / "base", "W4A16", TARGETS, torch.float32)
    changed(folder, lambda tensors: tensors[f"{Q_PROJ}.weight_scale"][3, 1].fill_(1e-45))
    with pytest.raises(ValueError, match=f"{Q_PROJ}.weight_scale: 1 of 512 become 0"):
        model_of(folder, "w4a16")


def test_scales_of_other_kinds_and_names_are_named_as_the_file_has_them(source, tmp_path):
    def spoil(tensors):
        scale, other = f"{Q_PROJ}.weight_scale", f"{DOWN}.weight_scale"
        tensors[scale] = tensors[scale].to(torch.float8_e8m0fnu)
        tensors[other + "_inv"] = tensors.pop(other)
        tensors[f"{Q_PROJ}.input_scale"] = torch.ones(1)

    folder = changed(write_compressed(source, tmp_path / "base", "FP8_BLOCK", TARGETS), spoil)
    with pytest.raises(ValueError, match=r"is not what its config\.json says") as error:
        model_of(folder, "fp8_block")
    for part in (
        f"2 of no such model: {DOWN}.weight_scale_inv, {Q_PROJ}.input_scale",
        f"{Q_PROJ}.weight_scale is torch.float8_e8m0fnu [2, 2], expected torch.float32 [2, 2]",
        "1 missing: model.layers.1.mlp.experts.down_proj.weight_scale",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("preset", "side", "said", "differs"),
    [
        ("FP8_DYNAMIC", "weights", {"strategy": "tensor"}, "weights.strategy='tensor' in place of 'channel'"),
        ("FP8_DYNAMIC", "input_activations", {"dynamic": False}, "input_activations.dynamic=False in place of True"),
        ("FP8_BLOCK", "weights", {"block_structure": [64, 64]}, "weights.block_structure=[64, 64] in place of"),
        ("FP8_BLOCK", "input_activations", {"group_size": 64}, "input_activations.group_size=64 in place of 128"),
        ("W4A16", "weights", {"symmetric": False}, "weights.symmetric=False in place of True"),
        ("W4A16", "weights", {"actorder": "group"}, "weights.actorder='group' in place of None"),
    ],
)
def test_what_is_not_executed_is_refused_with_the_difference(preset, side, said, differs, source, tmp_path):
    folder = write_compressed(source, tmp_path / "base", preset, TARGETS)
    quantization = quantization_of(folder)
    quantization["config_groups"]["group_0"][side] |= said
    quantize(folder, quantization)
    with pytest.raises(ValueError, match="is none that the learner executes") as error:
        train_run(config_of(folder, "w4a16"))
    assert differs in str(error.value)
