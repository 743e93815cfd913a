"""The commands on dense models in the width of their codes: written, said, read again, compared and refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qarl_kernels import get_format
from qarl_nemo.layers.install import install
from qarl_nemo.measure.eval.models import find_model
from qarl_nemo.measure.eval.packed import PackedEngine
from qarl_nemo.measure.eval.settings import EvalSettings, prepare
from qarl_nemo.train.file_list import write_file_list
from qarl_nemo.train.model import load_checkpoint
from support.engines import TOKENIZER
from support.whole_models import DENSE, save_sparse, tensors_of

TARGETS = ("attention", "mlp")


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    torch.manual_seed(0)
    save_file(tensors_of(DENSE), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(DENSE))
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "options", "num_bits"),
    [("w2a16", ["--own-width"], 2), ("w3a16", ["--own-width"], 3), ("w6a16", [], 6), ("w2a16", [], 4)],
)
def test_quantize_writes_and_eval_reads_the_width_that_was_asked_for(qarl, name, options, num_bits, dense, tmp_path):
    out = tmp_path / "out"
    code, printed = qarl("quantize", dense, out, "--format", name, "--targets", ",".join(TARGETS), *options)
    assert code == 0, printed
    assert f"vllm serve {out}" in printed.replace("\n", "")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == num_bits
    model = find_model(out)
    assert (model.served.name, model.served.num_bits, model.targets) == (name, num_bits, TARGETS)
    # The same logits as the learner's, which holds narrow codes as int4.
    learner, tokenizer = load_checkpoint(dense, torch.float32)
    install(learner, TARGETS, get_format(name))
    engine = PackedEngine(model, tokenizer, [0], device=torch.device("cpu"), dtype=torch.float32)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        assert torch.equal(engine._sampler.model(tokens).logits, learner(tokens).logits)


def test_a_run_whose_experts_vllm_does_not_serve_is_evaluated_with_the_other_engine(tmp_path, monkeypatch):
    monkeypatch.setattr("qarl_nemo.measure.eval.settings.vllm_problem", lambda *_, **__: None)
    step = tmp_path / "run" / "checkpoints" / "step_000004"
    save_sparse(step / "model", TOKENIZER)
    write_file_list(step)
    qarl = "{format: w5a16, group_size: 64, targets: [experts]}"
    (tmp_path / "run" / "config.yaml").write_text(f"qarl: {qarl}\npolicy: {{model_init: {{}}}}\n")
    settings = EvalSettings((tmp_path / "run",), ("gsm8k",), tmp_path / "r.json", engine="vllm", device="cpu")
    with pytest.raises(ValueError, match=r"step 4: vLLM serves codes of 5 bits in dense .*; or set --engine packed"):
        prepare(settings)


@pytest.mark.parametrize("command", [("quantize", "nowhere", "out"), ("compare", "nowhere")])
def test_a_format_that_has_its_own_width_already_is_refused(qarl, command):
    code, printed = qarl(*command, "--format", "w4a16", "--own-width")
    assert code == 2
    assert "--own-width changes nothing of w4a16: it stores the codes of w3a16 and w2a16" in printed
    assert "--own-width" not in qarl(*command, "--format", "w3a16", "--own-width")[1]


@pytest.mark.parametrize("options", [("w5a16",), ("w2a16", "--own-width")])
def test_experts_are_refused_with_what_serves_them(qarl, options, tmp_path):
    sparse = save_sparse(tmp_path / "sparse", TOKENIZER)
    code, printed = qarl("quantize", sparse, tmp_path / "out", "--format", *options)
    assert code == 2
    said = " ".join(printed.split())
    assert (
        "in dense layers only, experts take 4 and 8: use w8a16 or w4a16, or w3a16 or w2a16 without --own-width" in said
    )
    assert not (tmp_path / "out").exists()
