"""Runs that train adapters: both sides agree, what is frozen stays, files are PEFT's, killed runs go on."""

import json
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from qarl_kernels import get_format
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.config import ConfigError
from qarl_nemo.files import FileError
from qarl_nemo.train.checkpoint import checkpoint_dir
from qarl_nemo.train.preflight import prepare
from qarl_nemo.train.run import train_run
from qarl_nemo.train.sampling import SamplingParams
from qarl_nemo.train.setup import starting_model
from support.asserts import FP32_NATS, assert_bitwise_equal
from support.engines import EOS, TOKENIZER
from support.runs import make_config, read_metrics, without_clocks

LORA = {"rank": 8, "alpha": 16, "targets": ["attention", "experts"], "norms": True, "router": True}
NOISE = {"start": 1e-2, "end": 1e-3, "stages": 4}


def config_of(run_dir, lora=LORA, steps=4, **blocks):
    policy = {"lora": lora, "optimizer": {"lr": 3e-3}} | blocks.pop("policy", {})
    return make_config(run_dir, policy=policy, grpo={"max_num_steps": steps}, **blocks)


def model_folder(run_dir, step):
    return checkpoint_dir(run_dir, step) / "model"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("lora")
    return run_dir, train_run(config_of(run_dir))


def test_both_sides_agree_and_the_adapters_learn(run):
    run_dir, trainer = run
    metrics = read_metrics(run_dir)
    assert all(row["mismatch/abs_gap_mean"] < FP32_NATS for row in metrics)
    assert all(row["optim/grad_norm"] > 0 for row in metrics)
    start, end = (load_file(model_folder(run_dir, step) / "adapter_model.safetensors") for step in (2, 4))
    changed = {name for name in end if not torch.equal(start[name], end[name])}
    assert {name.rpartition("proj.")[2] for name in changed} == {"lora_A.weight", "lora_B.weight"}
    published = trainer.learner.publish(trainer.format).tensors
    assert not [name for name in published if name.endswith(("packed", "scale", "embed_tokens.weight"))]


def test_a_sampler_that_lacks_an_adapter_shows_a_gap(run):
    _, trainer = run
    adapter = trainer.sampler.model.get_parameter("model.layers.0.mlp.experts.lora.down_proj.lora_B.weight")
    kept, adapter.data = adapter.data, torch.zeros_like(adapter)
    generator = torch.Generator().manual_seed(0)
    rollouts = trainer.generate(trainer.source.train(1, 4), SamplingParams(3, 1.0, 1.0), generator)
    adapter.data = kept
    gap = (trainer.learner.prev_logprobs(rollouts) - rollouts.generation_logprobs).abs()
    assert gap.max() > 10 * FP32_NATS


def test_the_files_are_pefts_and_the_base_is_kept_once(run):
    run_dir, _ = run
    folder = model_folder(run_dir, 4)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 8, 16)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["base_model_name_or_path"] == str(run_dir / "base")
    tensors = load_file(folder / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.0.mlp.experts.3.down_proj.lora_A.weight"].shape == (8, 128)
    assert len(tensors) == 2 * (4 + 4 * 3)
    others = load_file(folder / "trained.safetensors")
    layer = "model.layers.0."
    assert others.keys() == {
        f"{layer}{name}.weight" for name in ("input_layernorm", "post_attention_layernorm", "mlp.gate")
    }
    AutoModelForCausalLM.from_pretrained(run_dir / "base", local_files_only=True)


@pytest.mark.parametrize("alpha", [8, 24])
def test_peft_computes_what_was_trained(tmp_path, alpha):
    import peft

    bf16 = {"_override_": True, "alignment": "none", "format": "bf16"}
    trainer = train_run(config_of(tmp_path, LORA | {"alpha": alpha, "norms": False, "router": False}, qarl=bf16))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    inputs = torch.tensor([[5, 3, 8, 2]])
    with torch.no_grad():
        for name, weight in base.named_parameters():
            if "_proj" in name:
                # As the frozen base is executed.
                weight.copy_(weight.bfloat16())
        untrained = base(inputs).logits
        found = peft.PeftModel.from_pretrained(base, model_folder(tmp_path, 4))(inputs).logits
        expected = trainer.model(inputs).logits
    assert (found - expected).abs().max() < 1e-4 < 1e-2 < (untrained - expected).abs().max()


def test_a_resumed_run_goes_on_to_the_same_numbers(run, tmp_path):
    for steps in (2, 4):
        train_run(config_of(tmp_path, steps=steps))
    assert without_clocks(read_metrics(run[0])) == without_clocks(read_metrics(tmp_path))
    for file in ("adapter_model.safetensors", "trained.safetensors"):
        whole, parts = (load_file(model_folder(folder, 4) / file) for folder in (run[0], tmp_path))
        assert whole.keys() == parts.keys()
        for name, tensor in whole.items():
            assert_bitwise_equal(parts[name], tensor)


@pytest.mark.parametrize("padding", [0, 8])
def test_a_resumed_base_lies_in_memory_as_a_new_one_does(run, padding, tmp_path):
    shutil.copytree(run[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "base" / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "padding": "x" * padding})
    config = config_of(tmp_path)
    prepared = prepare(config)
    model, _ = starting_model(config, prepared.source, prepared.encode, prepared.device, 4)
    # A CPU's GEMMs round otherwise where it is not so aligned, as a file's tensors may not be.
    assert {parameter.data_ptr() % 64 for parameter in model.parameters()} == {0}


def test_a_disk_without_room_for_the_base_is_refused_before_it_is_made(tmp_path, monkeypatch):
    room = prepare(config_of(tmp_path / "run")).checkpoint_bytes * 3 + 1000
    full = shutil.disk_usage(tmp_path)._replace(free=room)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(FileError, match=r"room for 3 checkpoints of .* and the adapters' base of \d.* needs "):
        train_run(config_of(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    (tmp_path / "run" / "base").mkdir(parents=True)
    prepare(config_of(tmp_path / "run"))


def test_a_disk_that_is_full_when_the_base_is_written_is_named_as_such(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(FileError, match=r"base: the base of the adapters cannot be written: the disk is full .* again"):
        train_run(config_of(tmp_path))
    assert not list(tmp_path.glob("base*"))


def test_noise_on_frozen_norms_reaches_the_engine_and_is_replayed(tmp_path):
    trainer = train_run(config_of(tmp_path, {"rank": 8}, steps=3, rollout={"noise": NOISE | {"stages": 3}}))
    metrics = read_metrics(tmp_path)
    assert [row["noise/sigma"] > 0 for row in metrics] == [False, True, True]
    assert all(row["mismatch/abs_gap_mean"] < FP32_NATS for row in metrics)
    name = "model.layers.0.input_layernorm.weight"
    served, own = (model.get_parameter(name) for model in (trainer.sampler.model, trainer.model))
    assert served.data_ptr() != own.data_ptr()
    assert torch.equal(own, load_file(tmp_path / "base" / "model.safetensors")[name])


def test_what_cannot_be_combined_is_listed_with_its_fix(tmp_path):
    with pytest.raises(ConfigError) as error:
        config_of(
            tmp_path,
            qarl={"alignment": "rollout_only", "backward": "high_precision"},
            policy={"optimizer": {"_override_": True, "name": "muon"}},
        )
    for fix in ("qarl.alignment=aligned", "qarl.backward=dequantized", "policy.optimizer.name=adamw"):
        assert fix in str(error.value)
    with pytest.raises(ConfigError, match="rank=24 is served by no engine; legal: 1, 8, 16, 32"):
        config_of(tmp_path, {"rank": 24})


@pytest.mark.parametrize("quantized", [False, True])
def test_a_dense_model_with_biases_and_a_tied_head_is_a_base_too(tmp_path, quantized):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    tokens = {"vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": EOS}
    config = Qwen2Config(**sizes, **tokens, num_hidden_layers=1, tie_word_embeddings=True, initializer_range=0.2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.bias)
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    targets = ["attention", "mlp"]
    if quantized:
        quantize_checkpoint(tmp_path / "model", tmp_path / "packed", get_format("w4a16"), targets)
    trainer = train_run(
        make_config(
            tmp_path / "run",
            qarl={"_override_": True, "format": "w4a16", "targets": targets},
            policy={
                "_override_": True,
                "model_path": str(tmp_path / ("packed" if quantized else "model")),
                "lora": {"rank": 8, "targets": targets},
            },
            grpo={"max_num_steps": 2},
        )
    )
    assert all(row["mismatch/abs_gap_mean"] < FP32_NATS for row in read_metrics(tmp_path / "run"))
    for side in (trainer.model, trainer.sampler.model):
        assert side.lm_head.weight.data_ptr() == side.model.embed_tokens.weight.data_ptr()
    assert {name.rpartition(".")[2] for name, _ in trainer.model.named_parameters() if "bias" in name} == {"bias"}
