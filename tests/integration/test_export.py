"""Merging a run into its base: the numbers that were executed, or a refusal that says what rounding would cost."""

import itertools
import json
import math
import os
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from qarl_kernels import get_format, quantize_weight
from qarl_nemo.checkpoints import open_checkpoint, quantize_checkpoint
from qarl_nemo.checkpoints.merge import MergedReader, Training, merged_checkpoint, rounding_loss
from qarl_nemo.checkpoints.reader import DTYPES, FLOAT_DTYPES
from qarl_nemo.cli import app
from qarl_nemo.files import FileError, exclusive
from qarl_nemo.layers.frozen import FrozenBase
from qarl_nemo.measure.compare.job import prepare
from qarl_nemo.measure.compare.settings import CompareSettings
from qarl_nemo.measure.eval.models import find_model
from qarl_nemo.names import parameter_name
from qarl_nemo.refit.engine_settings import WORKER_EXTENSION
from qarl_nemo.train import export as export_module
from qarl_nemo.train.export import export_run, read_run
from qarl_nemo.train.export_packed import export_packed
from qarl_nemo.train.run import train_run
from support.engines import TOKENIZER, tiny_model
from support.runs import make_config, train
from support.whole_models import DENSE, checkpoint_of, tensors_of

LORA = {"rank": 8, "alpha": 16, "targets": ["attention", "experts"], "norms": True}
IDS = torch.tensor([[5, 3, 8, 2]])


def export(run, out, *options):
    return CliRunner().invoke(app, ["export", str(run), str(out), *options])


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    policy = {"lora": LORA, "optimizer": {"lr": 3e-3}}
    trained = {"w4a16": train_run(make_config(folder / "w4a16", policy=policy))}
    bf16 = {"_override_": True, "alignment": "none", "format": "bf16"}
    trained["bf16"] = train_run(make_config(folder / "bf16", policy=policy, qarl=bf16))
    nvfp4 = {"_override_": True, "format": "nvfp4", "targets": ["experts", "attention"]}
    # Heads of attention as vLLM's kernels take them.
    policy = policy | {"model_init": {"num_attention_heads": 4, "num_key_value_heads": 2}}
    trained["nvfp4"] = train_run(make_config(folder / "nvfp4", policy=policy, qarl=nvfp4))
    return folder, trained


@pytest.mark.parametrize(("name", "options"), [("bf16", []), ("w4a16", ["--dequantize"]), ("nvfp4", ["--dequantize"])])
def test_a_merged_model_computes_what_the_run_executed(runs, tmp_path, name, options):
    folder, trained = runs
    done = export(folder / name, tmp_path / "out", *options)
    assert done.exit_code == 0, done.output
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    executed, expected = trained[name].model, logits(merged)
    # BF16 rounds a merged weight by up to 2^-9 of it.
    assert (logits(executed) - expected).norm() < 0.02 * expected.norm()
    base = AutoModelForCausalLM.from_pretrained(folder / name / "base", dtype=torch.float32)
    assert (logits(base) - expected).norm() > 0.02 * expected.norm()
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    assert find_model(tmp_path / "out").format_name == "bf16"


def test_merging_into_a_packed_base_is_refused_with_what_it_would_change(runs, tmp_path, monkeypatch):
    folder, _ = runs
    done = export(folder / "w4a16", tmp_path / "out")
    assert done.exit_code == 2
    assert not (tmp_path / "out").exists()
    for loss, said in (
        (None, "% of model.layers.0.* would lie on .* times what that"),
        (math.inf, "has learned nothing yet"),
    ):
        if loss is not None:
            monkeypatch.setattr(export_module, "rounding_loss", lambda *_, loss=loss: (0.0, loss))
        with pytest.raises(ValueError, match=rf"{said}.* --packed .* --dequantize"):
            export_run(folder / "w4a16", tmp_path / "out", dequantize=False, overwrite=False, progress=lambda _: None)


def test_options_and_places_that_cannot_be_meant_are_refused(runs, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for name, out, options, said in (
        ("bf16", "out", ["--dequantize"], "executed BF16 weights: leave --dequantize out"),
        ("bf16", "out", ["--packed"], "executed BF16 weights: leave --packed out"),
        ("w4a16", "file/out", ["--packed"], f"cannot be made: {tmp_path / 'file'} is a file; choose another place"),
    ):
        done = export(runs[0] / name, tmp_path / out, *options)
        assert done.exit_code == 2
        assert said in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"file"}
    # Tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    for name, option in (("bf16", "--overwrite"), ("w4a16", "--packed")):
        printed = " ".join(export(runs[0] / name, tmp_path / "out", option).output.split())
        assert f"{tmp_path} cannot be written to: permission denied; choose another place" in printed


@pytest.mark.parametrize("name", ["w4a16", "nvfp4"])
def test_an_adapter_is_added_to_the_weight_that_was_executed_and_the_sum_rounded_once(runs, name):
    base, training = read_run(runs[0] / name)
    infos = {info.name: info for info in merged_checkpoint(base, training).tensors}
    executed, block = FrozenBase.of(runs[1][name].model).weights, "model.layers.0.self_attn"
    differing = 0
    with MergedReader(base, training) as reader:
        for part in ("q_proj", "k_proj", "v_proj"):
            module = f"{block}.{part}"
            weight, found = reader.executed(infos[f"{module}.weight"]), reader.read(infos[f"{module}.weight"])
            assert torch.equal(weight, executed[module].weight.dequantize())
            a, b = training.adapters[module]
            change = (b * training.scaling).float() @ a.float()
            assert torch.equal(found, (weight.float() + change).bfloat16())
            differing += int((found != weight + change.bfloat16()).sum())
    assert differing > 0


@pytest.mark.parametrize("name", ["w4a16", "nvfp4"])
def test_what_quantizing_a_merged_weight_would_change_is_the_adapters_share(runs, name):
    base, training = read_run(runs[0] / name)
    infos = {info.name: info for info in merged_checkpoint(base, training).tensors}
    query = "model.layers.0.self_attn.q_proj.weight"
    fused = [infos[query.replace("q_proj", one)] for one in ("q_proj", "k_proj", "v_proj")]

    def loss(scaling):
        scaled = replace(training, scaling=scaling)
        with MergedReader(base, scaled) as reader:
            return rounding_loss(reader, infos[query], fused, scaled)

    # An adapter below BF16's last bit moves nothing, and none of it arrives.
    assert loss(1e-7 * training.scaling) == (0, 1)
    assert loss(0.0) == (0, math.inf)
    moved, wrong = loss(training.scaling)
    assert 0 < moved < 1
    # One that is larger than the grid's steps arrives.
    assert loss(100 * training.scaling)[1] < wrong


@pytest.mark.parametrize("name", ["w4a16", "nvfp4"])
def test_a_run_is_packed_as_it_was_served(runs, tmp_path, name):
    folder, trained = runs
    done = export(folder / name, tmp_path / "out", "--packed")
    assert done.exit_code == 0, done.output
    adapter = folder / name / "checkpoints" / "step_000004" / "model"
    assert f"out --enable-lora --max-lora-rank 8 --lora-modules adapter={adapter}" in " ".join(done.output.split())
    assert "adapters stay in the run" in done.output
    (found,) = map(load_file, (tmp_path / "out").glob("*.safetensors"))
    published = trained[name].learner.publish(trained[name].format)
    executed = FrozenBase.of(trained[name].model).weights
    layer = "model.layers.0."
    for suffix, tensor in executed[f"{layer}mlp.experts.down_proj"].weight.tensors.items():
        assert torch.equal(found[f"{layer}mlp.experts.3.down_proj.{suffix}"], tensor[3])
    for suffix, tensor in executed[f"{layer}self_attn.q_proj"].weight.tensors.items():
        assert torch.equal(found[f"{layer}self_attn.q_proj.{suffix}"], tensor)
    norm = f"{layer}input_layernorm.weight"
    assert torch.equal(found[norm], published.tensors[norm].bfloat16())
    assert not torch.equal(found[norm], load_file(folder / name / "base" / "model.safetensors")[norm])


def trained_on_int8(tmp_path, change=lambda folder: None, **policy):
    source = tmp_path / "source"
    tiny_model(dtype=torch.bfloat16, moe_intermediate_size=256, hidden_size=256).save_pretrained(source)
    TOKENIZER.save_pretrained(source)
    quantize_checkpoint(source, tmp_path / "int8", get_format("int8"), ["experts"])
    change(tmp_path / "int8")
    policy = {"_override_": True, "model_path": str(tmp_path / "int8")} | policy
    qarl = {"_override_": True, "format": "int8"}
    return train(tmp_path / "run", policy=policy, qarl=qarl, grpo={"max_num_steps": 2})


@pytest.mark.parametrize("options", [["--dequantize"], ["--packed"]])
def test_a_base_that_was_moved_is_named(odd_rewards, tmp_path, options):
    trained_on_int8(tmp_path)
    run = tmp_path / "run"
    (tmp_path / "int8").rename(tmp_path / "moved")
    refused = export(run, tmp_path / "out", *options)
    assert "or say where it is now with --base" in " ".join(refused.output.split())
    found = export(run, tmp_path / "out", *options, "--base", str(tmp_path / "moved"))
    assert found.exit_code == 0, found.output


def interrupted_at(call):
    """Return an `os.replace` that Ctrl-C interrupts in this call."""
    calls, replace = itertools.count(1), os.replace

    def function(*paths):
        if next(calls) == call:
            raise KeyboardInterrupt
        replace(*paths)

    return function


def test_a_packed_base_is_copied_with_what_was_trained(odd_rewards, tmp_path, monkeypatch):
    run = trained_on_int8(tmp_path)
    # What a kill of an earlier export has left, which had just taken the old one away.
    (tmp_path / "out.unfinished-x1" / "copy").mkdir(parents=True)
    (tmp_path / "out.unfinished-x1" / "replaced").mkdir()
    done = export(tmp_path / "run", tmp_path / "out", "--packed")
    assert "exists and was not written by this tool" in str(done.exception) + done.output
    (tmp_path / "out").rmdir()
    for options in ([], ["--overwrite"]):
        done = export(tmp_path / "run", tmp_path / "out", "--packed", *options)
        assert done.exit_code == 0, done.output
    assert done.output.split()[-4:] == ["serve", str(tmp_path / "out"), "--worker-extension-cls", WORKER_EXTENSION]
    before = sorted((tmp_path / "out").iterdir())
    with monkeypatch.context() as interrupted:
        interrupted.setattr("os.replace", interrupted_at(2))
        done = export(tmp_path / "run", tmp_path / "out", "--packed", "--overwrite")
    assert (done.exit_code != 0, sorted((tmp_path / "out").iterdir())) == (True, before)
    with exclusive(tmp_path / ".out.lock", "it"):
        done = export(tmp_path / "run", tmp_path / "out", "--packed", "--overwrite")
    assert f"the export {tmp_path / 'out'} is in use by process" in str(done.exception) + done.output
    (found,), (base,) = (list(map(load_file, (tmp_path / one).glob("*.safetensors"))) for one in ("out", "int8"))
    assert found.keys() == base.keys()
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, base[name])}
    assert "model.embed_tokens.weight" in changed
    assert not [name for name in changed if "experts" in name]
    for name in changed:
        assert torch.equal(found[name], run.model.get_parameter(parameter_name(name)).bfloat16())
    assert {path.name for path in tmp_path.iterdir()} == {"source", "int8", "run", "out"}
    for out, wrong, problem in (
        ("out", ["--packed"], "exists; choose another"),
        ("out", ["--packed", "--dequantize"], "leave one"),
        ("int8", ["--packed", "--overwrite"], "must not contain each other"),
    ):
        done = export(tmp_path / "run", tmp_path / out, *wrong)
        assert problem in str(done.exception) + done.output


def test_a_copy_of_another_tools_base_is_overwritten_as_every_output_is(odd_rewards, tmp_path):
    def change(folder):
        (folder / "qarl_quantization.json").unlink()
        (folder / "model.safetensors.index.json").unlink()
        (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
        (folder / "README.md").write_text("its model card")

    trained_on_int8(tmp_path, change)
    for options in ([], ["--overwrite"]):
        done = export(tmp_path / "run", tmp_path / "out", "--packed", *options)
        assert done.exit_code == 0, done.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"model.safetensors", "qarl_quantization.json", "config.json", "tokenizer.json"}
    assert "README.md" not in names
    copy = find_model(tmp_path / "out")
    assert (copy.format_name, copy.targets, copy.quantized) == ("int8", ("experts",), True)
    (tmp_path / "out" / "notes.txt").touch()
    (tmp_path / "out" / "vocab_notes.txt").touch()
    (tmp_path / "out" / "tokenizer_config.json").write_text("{}")
    done = export(tmp_path / "run", tmp_path / "out", "--packed", "--overwrite")
    named = "move away notes.txt, tokenizer_config.json (edited since it was copied), vocab_notes.txt"
    assert named in " ".join(done.output.split())
    (tmp_path / "link").symlink_to("out")
    done = export(tmp_path / "run", tmp_path / "link", "--packed", "--overwrite")
    assert f"a link is not replaced; name {tmp_path / 'out'} itself" in " ".join(done.output.split())


def test_a_packed_copy_says_in_its_files_what_it_is(tmp_path):
    trained_on_int8(tmp_path)
    assert export(tmp_path / "run", tmp_path / "out", "--packed").exit_code == 0
    (file,) = (tmp_path / "out").glob("*.safetensors")
    with safe_open(file, framework="pt") as handle:
        assert handle.metadata()["qarl_format"] == "int8"


@pytest.mark.parametrize("base", ["bf16", "int8"])
def test_a_packed_model_without_its_adapters_is_not_taken_for_a_model(runs, tmp_path, base):
    run, step, rank = runs[0] / "w4a16", 4, 8
    if base == "int8":
        trained_on_int8(tmp_path, lora={"rank": 16})
        run, step, rank = tmp_path / "run", 2, 16
    assert export(run, tmp_path / "out", "--packed").exit_code == 0
    record = json.loads((tmp_path / "out" / "qarl_quantization.json").read_text())
    assert record["adapters"] == {"run": str(run), "step": step, "rank": rank}
    said = rf"run {run} trained up to step {step} without its adapters of rank {rank}, .* qarl export {run} DESTINATION"
    policy = {"_override_": True, "model_path": str(tmp_path / "out")}
    qarl = {"_override_": True, "format": record["format"], "targets": record["targets"]}
    for use in (
        lambda: find_model(tmp_path / "out"),
        lambda: train(tmp_path / "again", policy=policy, qarl=qarl),
        lambda: prepare(CompareSettings(tmp_path / "out")),
    ):
        with pytest.raises(ValueError, match=said):
            use()
    record["adapters"] = "none"
    (tmp_path / "out" / "qarl_quantization.json").write_text(json.dumps(record))
    with pytest.raises(FileError, match="expected adapters, an object with run, step and rank, found 'none'"):
        find_model(tmp_path / "out")


@pytest.mark.parametrize("lora", [None, {"rank": 8}])
def test_a_checkpoint_without_its_base_leads_to_the_run(tmp_path, lora):
    trained_on_int8(tmp_path, **({"lora": lora} if lora else {}))
    step = tmp_path / "run" / "checkpoints" / "step_000002"
    for folder in (step, step / "model"):
        assert f"{tmp_path / 'run'}" in export(folder, tmp_path / "out").output.split("it has no config.yaml;")[1]
    for folder in (step / "model", tmp_path / "run"):
        with pytest.raises(ValueError, match="qarl eval takes the run") as error:
            open_checkpoint(folder)
        assert "name one of" not in str(error.value)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_a_base_of_any_floats_is_merged_as_it_was_executed(tmp_path, dtype):
    tensors, fmt = tensors_of(DENSE, DTYPES[dtype]), get_format("w4a16")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    base, training = open_checkpoint(tmp_path), Training(fmt, ("mlp",), {}, 1.0, {}, ())
    name = "model.layers.0.mlp.up_proj.weight"
    info = next(one for one in merged_checkpoint(base, training).tensors if one.name == name)
    with MergedReader(base, training) as reader:
        assert torch.equal(reader.read(info), quantize_weight(tensors[name].bfloat16(), fmt).dequantize())


def test_a_merged_bias_is_read_from_its_bases_file(tmp_path):
    base = checkpoint_of(DENSE | {"model_type": "qwen2"})
    training = Training(get_format("bf16"), (), {}, 1.0, {}, (tmp_path / "trained.safetensors",))
    files = {info.name: info.files for info in merged_checkpoint(base, training).tensors}
    assert set(files.values()) == {("model.safetensors", str(tmp_path / "trained.safetensors"))}
    assert "model.layers.0.self_attn.q_proj.bias" in files


def test_no_command_serves_experts_whose_kernels_do_not_run_beside_adapters(tmp_path):
    qarl = {"_override_": True, "format": "fp8_channel"}
    train(tmp_path / "run", policy={"lora": {"rank": 8}}, qarl=qarl, grpo={"max_num_steps": 2})
    done = export(tmp_path / "run", tmp_path / "out", "--packed")
    assert done.exit_code == 0, done.output
    printed = " ".join(done.output.split())
    assert "whose kernels for fp8_channel experts do not run beside adapters" in printed
    assert f"qarl eval {tmp_path / 'run'} --engine packed" in printed
    assert "vllm serve" not in done.output


def test_bf16_is_not_packed(runs, tmp_path):
    with pytest.raises(ValueError, match="executed BF16 weights: leave --packed out"):
        export_packed(runs[0] / "bf16", tmp_path / "out", overwrite=False, progress=lambda _: None)


def test_a_packed_checkpoint_is_merged_from_its_own_codes(tmp_path):
    run = trained_on_int8(tmp_path, lora={"rank": 8})
    assert export(tmp_path / "run", tmp_path / "out", "--dequantize").exit_code == 0
    # Experts have no adapters here.
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    held = run.model.model.layers[0].mlp.experts.aligned["gate_up_proj"].weight.dequantize()
    assert torch.equal(load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")[name], held[3, 256:])


def test_a_refusal_names_adapters_only_where_a_run_has_some(tmp_path):
    trained_on_int8(tmp_path)
    with pytest.raises(
        ValueError, match=r"a base in int8\. Pass --packed for the quantized checkpoint that was served, or"
    ):
        export_run(tmp_path / "run", tmp_path / "out", dequantize=False, overwrite=False, progress=lambda _: None)


def test_a_run_that_trained_all_weights_is_a_checkpoint_already(tmp_path):
    train(tmp_path / "run", grpo={"max_num_steps": 2})
    with pytest.raises(ValueError, match="is a whole Hugging Face checkpoint already"):
        export_run(tmp_path / "run", tmp_path / "out", dequantize=False, overwrite=False, progress=lambda _: None)
