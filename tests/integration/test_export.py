"""Merging a run into its base: the numbers that were executed, or a refusal that says what rounding would cost."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from qarl_kernels import get_format
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.cli import app
from qarl_nemo.measure.eval.models import find_model
from qarl_nemo.train.export import export_run
from qarl_nemo.train.run import train_run
from support.engines import TOKENIZER, tiny_model
from support.runs import make_config, train

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


def test_merging_into_a_packed_base_is_refused_with_what_it_would_change(runs, tmp_path):
    folder, _ = runs
    done = export(folder / "w4a16", tmp_path / "out")
    assert done.exit_code == 2
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"% of its weights on another value .* times as large .* --dequantize"):
        export_run(folder / "w4a16", tmp_path / "out", dequantize=False, overwrite=False, progress=lambda _: None)


def test_a_packed_checkpoint_is_merged_from_its_own_codes(tmp_path):
    source = tmp_path / "source"
    tiny_model(dtype=torch.bfloat16, moe_intermediate_size=256, hidden_size=256).save_pretrained(source)
    TOKENIZER.save_pretrained(source)
    quantize_checkpoint(source, tmp_path / "int8", get_format("int8"), ["experts"])
    policy = {"_override_": True, "model_path": str(tmp_path / "int8"), "lora": {"rank": 8}}
    qarl = {"_override_": True, "format": "int8"}
    run = train(tmp_path / "run", policy=policy, qarl=qarl, grpo={"max_num_steps": 2})
    assert export(tmp_path / "run", tmp_path / "out", "--dequantize").exit_code == 0
    # Experts have no adapters here.
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    held = run.model.model.layers[0].mlp.experts.aligned["gate_up_proj"].weight.dequantize()
    assert torch.equal(load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")[name], held[3, 256:])


def test_a_run_that_trained_all_weights_is_a_checkpoint_already(tmp_path):
    train(tmp_path / "run", grpo={"max_num_steps": 2})
    with pytest.raises(ValueError, match="is a whole Hugging Face checkpoint already"):
        export_run(tmp_path / "run", tmp_path / "out", dequantize=False, overwrite=False, progress=lambda _: None)
