"""Training on a quantized checkpoint: executed bit for bit as aligned layers would, in memory once, never changed."""

import json
import shutil

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from safetensors.torch import load_file, save_file

from qarl_formats import quantization_config
from qarl_kernels import get_format
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.checkpoints.scheme import stored_format
from qarl_nemo.files import FileError
from qarl_nemo.layers.frozen import FrozenBase
from qarl_nemo.layers.install import install
from qarl_nemo.layers.packed import PackedWeight
from qarl_nemo.train.base_files import hold_base, require_same_base
from qarl_nemo.train.checkpoint import checkpoint_dir
from qarl_nemo.train.frozen_run import FrozenRun
from qarl_nemo.train.model import load_checkpoint
from qarl_nemo.train.run import train_run
from qarl_nemo.train.trainer import Trainer
from support.asserts import assert_bitwise_equal
from support.engines import PROMPTS, TOKENIZER, tiny_model
from support.runs import make_config, read_metrics, without_clocks
from support.whole_models import DENSE, quantized_copies

SIZES = {"num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 256, "hidden_size": 256, "head_dim": 64}
TARGETS = ("experts", "attention")
NAMES = ("w4a16", "fp8_block", "int8", "nvfp4")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    tiny_model(dtype=torch.bfloat16, **SIZES).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def packed(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    quantized_copies(source, folder, NAMES, TARGETS)
    return folder


def config_of(run_dir, packed, name="w4a16", **blocks):
    policy = {"_override_": True, "model_path": str(packed / name), "train_micro_batch_size": 8}
    qarl = {"_override_": True, "format": name, "targets": list(TARGETS)}
    return make_config(run_dir, **{"policy": policy, "qarl": qarl, "rollout": {"max_new_tokens": 2}} | blocks)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPTS[2]])).logits


@pytest.mark.parametrize("name", NAMES)
def test_the_forward_is_that_of_aligned_weights_and_gradients_go_to_the_rest(name, source, packed, tmp_path):
    model = Trainer(config_of(tmp_path, packed, name)).model
    masters, _ = load_checkpoint(source, torch.float32)
    masters.config._attn_implementation = model.config._attn_implementation
    install(masters, TARGETS, get_format(name))
    assert_bitwise_equal(logits(model), logits(masters))
    for one in (model, masters):
        one(input_ids=torch.tensor([PROMPTS[2]])).logits.square().sum().backward()
    expected = dict(masters.named_parameters())
    trained = dict(model.named_parameters())
    assert expected.keys() - trained.keys() == {
        key for key in expected if key.endswith(("_proj", "_proj.weight")) and ("experts" in key or "self_attn" in key)
    }
    for key, parameter in trained.items():
        assert_bitwise_equal(parameter.grad, expected[key].grad)
    with torch.no_grad():
        masters.model.layers[0].mlp.experts.down_proj *= 1.1
    next(iter(masters.model.layers[0].mlp.experts.aligned.values())).changes.bump()
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(logits(model), logits(masters))


@pytest.mark.parametrize("name", ["w4a16", "nvfp4", "fp8_block"])
def test_a_bf16_base_under_adapters_becomes_the_quantized_one_layer_by_layer(name, source, packed, tmp_path):
    lora = {"rank": 8, "targets": ["attention"]}
    models = []
    for folder in (source, packed / name):
        policy = {"_override_": True, "model_path": str(folder), "train_micro_batch_size": 8, "lora": lora}
        qarl = {"_override_": True, "format": name, "targets": list(TARGETS), "keep_operand": False}
        models.append(Trainer(config_of(tmp_path / folder.name, packed, name, policy=policy, qarl=qarl)).model)
    assert_bitwise_equal(*map(logits, models))
    held = [dict(FrozenBase.of(model).weights) for model in models]
    for module, slot in held[0].items():
        for suffix, tensor in slot.weight.tensors.items():
            assert_bitwise_equal(tensor, held[1][module].weight.tensors[suffix])
    slot = held[1]["model.layers.1.self_attn.k_proj"]
    scale = next(tensor for suffix, tensor in slot.weight.tensors.items() if suffix.startswith("weight_scale"))
    scale.view(torch.uint8).flatten()[1] ^= 8
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(*map(logits, models))


def test_what_a_format_cannot_hold_of_a_bf16_base_is_all_named(source, packed, tmp_path):
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    folder = shutil.copytree(source, tmp_path / "source")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[names[0]][2, 3], tensors[names[1]][0, 0] = 2.0**127, -(2.0**127)
    save_file(tensors, file)
    policy = {"_override_": True, "model_path": str(folder), "lora": {"rank": 8}}
    with pytest.raises(ValueError, match=r"2\^127 and more for integer codes") as error:
        Trainer(config_of(tmp_path / "run", packed, policy=policy))
    for part in (f"{names[0]} [256, 256] (1, the first at index [2, 3]", f"{names[1]} [256, 256] (1, the first at"):
        assert part in str(error.value)


def test_a_base_that_no_checkpoint_holds_is_not_warmed_up(source, packed, tmp_path):
    policy = {"_override_": True, "model_path": str(source), "lora": {"rank": 8}, "warm_start": {"steps": 2}}
    with pytest.raises(ValueError, match=r"set policy\.warm_start\.steps=0"):
        config_of(tmp_path, packed, policy=policy)


def test_the_base_is_in_memory_once_and_no_refit_brings_it(packed, tmp_path):
    trainer = Trainer(config_of(tmp_path, packed))
    slots = [weight for module in trainer.model.modules() for weight in getattr(module, "aligned", {}).values()]
    assert len(slots) == 2 * (4 + 2)
    assert all(isinstance(slot, PackedWeight) for slot in slots)
    assert {id(slot) for slot in trainer.sampler.slots.values()} == {id(slot) for slot in slots}
    published = trainer.learner.publish(trainer.format).tensors
    assert published.keys() == trainer.sampler.layout.keys()
    assert not any("_proj" in name for name in published)


def test_a_resumed_run_goes_on_to_the_same_numbers(packed, odd_rewards, tmp_path):
    grpo = {"max_num_steps": 4, "num_prompts_per_step": 4, "train_global_batch_size": 16, "val_period": 0}
    train_run(config_of(tmp_path / "whole", packed, grpo=grpo))
    train_run(config_of(tmp_path / "parts", packed, grpo=grpo | {"max_num_steps": 2}))
    train_run(config_of(tmp_path / "parts", packed, grpo=grpo))
    whole, parts = (without_clocks(read_metrics(tmp_path / run)) for run in ("whole", "parts"))
    assert whole == parts
    found = [
        load_file(checkpoint_dir(tmp_path / run, 4) / "model" / "trained.safetensors") for run in ("whole", "parts")
    ]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0] | found[1])
    start = load_file(checkpoint_dir(tmp_path / "whole", 2) / "model" / "trained.safetensors")
    assert any(not torch.equal(found[0][name], start[name]) for name in start)


def test_a_run_goes_on_and_is_read_with_its_own_base_alone(packed, odd_rewards, tmp_path):
    grpo = {"num_prompts_per_step": 4, "train_global_batch_size": 16, "val_period": 0}
    run = tmp_path / "run"
    tensors = changed_copy(packed, tmp_path, "w4a16", lambda _: None)
    train_run(config_of(run, tmp_path, grpo=grpo | {"max_num_steps": 2}))
    assert FrozenRun.read(run, 2).base == tmp_path / "w4a16"
    (file,) = (tmp_path / "w4a16").glob("*.safetensors")
    # One bit of one norm.
    tensors["model.norm.weight"].view(torch.int16)[7] ^= 1
    save_file(tensors, file)
    for read in (
        lambda: train_run(config_of(run, tmp_path, grpo=grpo | {"max_num_steps": 4})),
        lambda: FrozenRun.read(run, 2),
    ):
        with pytest.raises(FileError, match=rf"which has changed since: {file.name}; put back what it was"):
            read()
    tensors["model.norm.weight"].view(torch.int16)[7] ^= 1
    save_file(tensors, file)
    train_run(config_of(run, tmp_path, grpo=grpo | {"max_num_steps": 4}))
    # A run of an earlier version has not noted it.
    (run / "base.json").unlink()
    assert FrozenRun.read(run, 4).base == tmp_path / "w4a16"
    with pytest.raises(
        FileError, match=r"has no base\.json, against which --base .* could be checked: leave --base out"
    ):
        FrozenRun.read(run, 4, tmp_path / "w4a16")


def test_large_files_are_sampled_from_end_to_end(tmp_path):
    file = tmp_path / "model.safetensors"
    content = bytearray(bytes(range(256)) * (1 << 13))
    file.write_bytes(content)
    hold_base(tmp_path, tmp_path, new=True)
    require_same_base(tmp_path, tmp_path)
    for place in (0, len(content) // 63 * 5, len(content) - 1):
        content[place] ^= 1
        file.write_bytes(content)
        with pytest.raises(FileError, match="has changed since"):
            require_same_base(tmp_path, tmp_path)
        content[place] ^= 1


def test_conflicts_with_the_checkpoint_are_all_named(packed, tmp_path):
    qarl = {"format": "w4a16", "group_size": 32, "targets": ["experts"], "backward": "high_precision"}
    config = config_of(tmp_path, packed, "fp8_block", qarl=qarl)
    with pytest.raises(ValueError, match="is a quantized checkpoint, frozen in training") as error:
        train_run(config)
    for fix in ("qarl.format=fp8_block", "qarl.targets=[experts,attention]", "qarl.backward=dequantized"):
        assert fix in str(error.value)


def test_muon_is_refused_where_every_matrix_is_frozen(packed, tmp_path):
    settings = {"_override_": True, "model_path": str(packed / "w4a16"), "optimizer": {"name": "muon"}}
    with pytest.raises(ValueError, match=r"all of this model's are frozen; set policy\.optimizer\.name=adamw"):
        train_run(config_of(tmp_path / "run", packed, policy=settings))
    assert not (tmp_path / "run").exists()


def changed_copy(packed, tmp_path, name, change):
    """A folder with a copy of a packed checkpoint whose tensors `change` has changed; returns them."""
    folder = shutil.copytree(packed / name, tmp_path / name)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file.name)}))
    return tensors


def test_foreign_missing_and_misshapen_tensors_are_all_named(packed, tmp_path):
    scale = "model.layers.1.self_attn.q_proj.weight_scale"

    def spoil(tensors):
        tensors[scale] = tensors[scale][:-1].clone()
        tensors["model.layers.0.self_attn.q_proj.weight_zero_point"] = torch.zeros(1)
        del tensors["model.layers.0.mlp.experts.3.up_proj.weight_packed"]

    changed_copy(packed, tmp_path, "w4a16", spoil)
    with pytest.raises(ValueError, match=r"is not what its config\.json says") as error:
        Trainer(config_of(tmp_path / "run", tmp_path))
    for part in ("weight_zero_point", "gate_up_proj.weight_packed", f"{scale} is torch.bfloat16 [255, 2], expected"):
        assert part in str(error.value)


def test_nan_in_scales_codes_and_norms_is_named(packed, tmp_path):
    def spoil(key):
        return lambda tensors: tensors[key].view(torch.uint8).flatten()[-1:].fill_(0x7F)

    for name, key in (("fp8_block", "self_attn.q_proj.weight"), ("nvfp4", "mlp.experts.3.up_proj.weight_scale")):
        changed_copy(packed, tmp_path, name, spoil(f"model.layers.1.{key}"))
        with pytest.raises(
            ValueError, match=r"layers\.1\.(self_attn\.q|mlp\.experts\.gate_up)_proj.* holds NaN or Inf"
        ):
            Trainer(config_of(tmp_path / "run", tmp_path, name))
    norm = "model.layers.0.input_layernorm.weight"
    changed_copy(packed, tmp_path, "int8", lambda tensors: tensors[norm][3:4].fill_(torch.inf))
    with pytest.raises(ValueError, match=f"{norm} holds NaN or Inf"):
        Trainer(config_of(tmp_path / "run", tmp_path, "int8"))


def test_an_lm_head_that_is_not_the_tied_embedding_is_refused(packed, tmp_path):
    tensors = changed_copy(packed, tmp_path, "w4a16", lambda _: None)
    file = tmp_path / "w4a16" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match=r"says tie_word_embeddings, but lm_head\.weight is not"):
        Trainer(config_of(tmp_path / "run", tmp_path))


def test_layers_that_a_checkpoint_ignores_are_named(packed, tmp_path):
    left_out = "model.layers.1.self_attn.o_proj"

    def ignore(tensors):
        tensors[f"{left_out}.weight"] = torch.zeros(256, 256, dtype=torch.bfloat16)
        for suffix in ("packed", "scale", "shape"):
            del tensors[f"{left_out}.weight_{suffix}"]

    changed_copy(packed, tmp_path, "w4a16", ignore)
    with pytest.raises(
        ValueError, match=f"{left_out} are not quantized, and others of experts, attention are"
    ) as error:
        train_run(config_of(tmp_path / "run", tmp_path))
    assert "what its config.json says" not in str(error.value)


def test_a_model_without_routers_trains_none(tmp_path):
    folder = tmp_path / "dense"
    TOKENIZER.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(DENSE))
    policy = {"_override_": True, "model_path": str(folder), "lora": {"rank": 8, "router": True}}
    qarl = {"_override_": True, "format": "w4a16", "targets": ["attention"]}
    with pytest.raises(ValueError, match=r"this model has no routers; set policy\.lora\.router=false"):
        train_run(make_config(tmp_path / "run", policy=policy, qarl=qarl))


def test_projections_that_engines_fuse_must_share_their_global_scale(packed, tmp_path):
    key = "model.layers.1.self_attn.k_proj.weight_global_scale"
    changed_copy(packed, tmp_path, "nvfp4", lambda tensors: tensors[key].mul_(2))
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight, .*v_proj\.weight differ in their global"
    ):
        Trainer(config_of(tmp_path / "run", tmp_path, "nvfp4"))


@pytest.mark.parametrize("experts", [(2,), (0, 1, 2, 3)], ids=["one", "all"])
def test_gate_and_up_of_an_expert_must_share_their_global_scale(experts, packed, tmp_path):
    def spoil(tensors):
        for expert in experts:
            tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight_global_scale"].mul_(2)

    changed_copy(packed, tmp_path, "nvfp4", spoil)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts"):
        Trainer(config_of(tmp_path / "run", tmp_path, "nvfp4"))


def test_a_checkpoint_of_other_tools_is_read(packed, tmp_path):
    """16-bit scales of FP8 and INT8 rows, as llm-compressor writes them, are widened exactly."""

    def narrow(tensors):
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items() if name.endswith("weight_scale")}

    tensors = changed_copy(packed, tmp_path, "int8", narrow)
    model = Trainer(config_of(tmp_path / "run", tmp_path, "int8")).model
    held = model.model.layers[0].self_attn.q_proj.aligned["weight"].weight.tensors["weight_scale"]
    assert_bitwise_equal(held, tensors["model.layers.0.self_attn.q_proj.weight_scale"].float())


def test_a_format_that_nothing_here_executes_is_shown(packed, tmp_path):
    folder = shutil.copytree(packed / "w4a16", tmp_path / "w4a16")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"is none that the learner executes \(w4a16, .*weights.symmetric=False"
    ) as error:
        train_run(config_of(tmp_path / "run", tmp_path))
    assert "lm_head" not in str(error.value)


def test_a_base_in_its_own_width_is_refused_with_the_way_out(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "w2a16", get_format("w2a16", own_width=True), ["attention"])
    qarl = {"_override_": True, "format": "w2a16", "targets": ["attention"]}
    with pytest.raises(
        ValueError, match=r"stored in their own 2 bits, and a run holds w2a16 in 4; .* without --own-width"
    ):
        train_run(config_of(tmp_path / "run", tmp_path, "w2a16", qarl=qarl))


def test_eight_bit_groups_are_known():
    fmt = get_format("w8a16", group_size=64)
    assert stored_format(quantization_config(fmt, ignore=[])) == fmt


def test_config_groups_of_one_scheme_are_one_and_of_two_are_refused():
    fmt = get_format("w4a16")
    config = quantization_config(fmt, ignore=[])
    alike = config["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]}
    assert stored_format(config | {"config_groups": config["config_groups"] | {"group_1": alike}}) == fmt
    other = alike | {"weights": alike["weights"] | {"num_bits": 8}}
    assert stored_format(config | {"config_groups": config["config_groups"] | {"group_1": other}}) is None


@pytest.mark.parametrize(
    ("preset", "storage", "name"),
    [
        ("W4A16", "pack-quantized", "w4a16"),
        ("W8A16", "pack-quantized", "w8a16"),
        ("W4AFP8", "pack-quantized", "w4a8"),
        ("NVFP4A16", "nvfp4-pack-quantized", "nvfp4"),
        ("INT8", "int-quantized", "int8"),
        ("FP8_DYNAMIC", "float-quantized", "fp8_channel"),
        ("FP8_BLOCK", "float-quantized", "fp8_block"),
        ("W4A16_ASYM", "pack-quantized", None),
        ("NVFP4", "nvfp4-pack-quantized", None),
        ("FP8", "float-quantized", None),
    ],
)
def test_the_schemes_of_compressed_tensors_are_known_or_refused(preset, storage, name):
    groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    config = QuantizationConfig(config_groups=groups, format=storage, ignore=["lm_head"]).to_dict()
    assert stored_format(json.loads(json.dumps(config))) == (name and get_format(name))
