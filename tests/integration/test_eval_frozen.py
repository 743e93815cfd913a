"""`qarl eval` of runs on a frozen base: base, adapters and what was trained beside them are all served."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from qarl_kernels import get_format
from qarl_nemo.checkpoints import open_checkpoint, quantize_checkpoint
from qarl_nemo.checkpoints.overlay import write_overlay
from qarl_nemo.config import validate
from qarl_nemo.files import FileError
from qarl_nemo.measure.eval.models import find_model
from qarl_nemo.measure.eval.packed import PackedEngine
from qarl_nemo.measure.eval.settings import EvalSettings, prepare
from qarl_nemo.measure.eval.vllm import VllmEngine, served_folder
from qarl_nemo.measure.served import adapter_problems
from qarl_nemo.train.aligned_model import align_model, lora_settings
from qarl_nemo.train.base_files import hold_base
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.file_list import FILE_LIST, write_file_list
from qarl_nemo.train.model import load_model, load_tokenizer
from qarl_nemo.train.run_dir import open_run_dir
from qarl_nemo.train.sampling import SamplingParams
from qarl_nemo.train.trained import save_trained
from qarl_nemo.train.vllm.host import vllm_problem
from support.asserts import assert_bitwise_equal
from support.engines import EOS, TOKENIZER

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
TARGETS = ["attention", "mlp"]
NORM = "model.layers.0.input_layernorm.weight"
SEVEN, EIGHT = (TOKENIZER.convert_tokens_to_ids(digit) for digit in "78")
GREEDY = SamplingParams(3, 0.0, 1.0)
PROBLEM = vllm_problem("cuda")


@torch.no_grad()
def says_seven(folder: Path) -> Path:
    """A model whose residual stream holds a constant in channel 0, which its head reads as the token 7.

    The first norm leaves that channel out. What arrives in channel 1 its head reads as the token 8.
    """
    tokens = {"vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": EOS}
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, **tokens, num_hidden_layers=1, tie_word_embeddings=False, initializer_range=0.02)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.model.embed_tokens.weight[:, 0] = 10.0
    model.model.embed_tokens.weight[:, 1] = 0.0
    model.get_parameter(NORM)[0] = 0.0
    model.lm_head.weight[:, :2] = 0.0
    model.lm_head.weight[SEVEN, 0] = 10.0
    model.lm_head.weight[EIGHT, 1] = 10.0
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@torch.no_grad()
def learns_eight(run_dir: Path, base: Path, *, lora: bool = True, **qarl) -> Path:
    """A run at step 4 that says 8: its norm lets channel 0 through, and two adapters carry it into channel 1."""
    policy = {"model_path": str(base), "precision": "bfloat16"}
    if lora:
        policy["lora"] = {"rank": 8, "alpha": 16, "targets": ["attention"], "norms": True}
    values = {"run_dir": str(run_dir), "device": "cpu", "policy": policy, "loss_fn": {"objective": "tbpo"}}
    config = validate(values | {"qarl": {"targets": TARGETS, **qarl}}, LocalConfig, source="test")
    open_run_dir(config)
    model, tokenizer = load_model(config.policy, torch.device("cpu"), 0)
    align_model(config, model, torch.device("cpu"))
    model.get_parameter(NORM)[0] = 1.0
    if lora:
        attention = model.model.layers[0].self_attn
        for layer, into in ((attention.v_proj, slice(0, None, 64)), (attention.o_proj, slice(1, 2))):
            layer.lora.lora_A["weight"].zero_()
            layer.lora.lora_A["weight"][0, 0] = 1.0
            layer.lora.lora_B["weight"][into, 0] = 1.0
    else:
        model.lm_head.weight[[SEVEN, EIGHT]] = model.lm_head.weight[[EIGHT, SEVEN]]
        model.lm_head.weight[EIGHT, 0] = 10.0
    step = run_dir / "checkpoints" / "step_000004"
    save_trained(model, step / "model", lora_settings(config.policy.lora), str(base))
    tokenizer.save_pretrained(step / "model")
    write_file_list(step)
    return run_dir


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    says_seven(folder / "bf16")
    for name in ("w4a16", "nvfp4"):
        quantize_checkpoint(folder / "bf16", folder / name, get_format(name), TARGETS)
    return {name: folder / name for name in ("bf16", "w4a16", "nvfp4")}


CASES = {
    "BF16": ("bf16", {"format": "bf16", "alignment": "none"}),
    "BF16, quantized at the start": ("bf16", {"format": "w4a16"}),
    "w4a16": ("w4a16", {"format": "w4a16"}),
    "nvfp4": ("nvfp4", {"format": "nvfp4"}),
}
ONE_QUICKLY = [case if case == "w4a16" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


def packed(model) -> PackedEngine:
    tokenizer = load_tokenizer(model.folder, model.checkpoint.folder)
    return PackedEngine(model, tokenizer, [EOS], device=torch.device("cpu"), dtype=torch.bfloat16)


def said(engine) -> list[str]:
    prompts = [TOKENIZER("1+2=", add_special_tokens=False)["input_ids"]] * 2
    return [answer.text for answer in engine.answer(prompts, GREEDY, [0, 1])]


@pytest.mark.parametrize("case", ONE_QUICKLY)
def test_base_adapters_and_norms_are_served_together(case, bases, tmp_path):
    base, qarl = CASES[case]
    model = find_model(learns_eight(tmp_path / "run", bases[base], **qarl))
    assert (model.format_name, model.label) == (qarl["format"], f"{tmp_path / 'run'}, step 4")
    assert said(packed(find_model(bases[base]))) == ["777"] * 2
    assert said(packed(model)) == ["888"] * 2


def test_without_the_norm_that_was_trained_beside_them_the_adapters_change_nothing(bases, tmp_path):
    run = learns_eight(tmp_path / "run", bases["w4a16"], format="w4a16")
    step = find_model(run).folder.parent
    beside = load_file(step / "model" / "trained.safetensors")
    beside[NORM][0] = 0.0
    save_file(beside, step / "model" / "trained.safetensors")
    (step / FILE_LIST).unlink()
    write_file_list(step)
    assert said(packed(find_model(run))) == ["777"] * 2


def test_a_packed_base_whose_other_weights_were_trained_is_served_without_adapters(bases, tmp_path):
    run = learns_eight(tmp_path / "run", bases["w4a16"], lora=False, format="w4a16")
    model = find_model(run)
    assert said(packed(model)) == ["888"] * 2
    # For vLLM they take their places in a copy of the base, which is a model by itself.
    folder = served_folder(model, tmp_path / "scratch", "cpu")
    assert said(packed(find_model(folder))) == ["888"] * 2


@pytest.mark.parametrize("case", ONE_QUICKLY)
def test_vllm_gets_a_base_with_the_trained_norm_in_the_runs_format(case, bases, tmp_path):
    base, qarl = CASES[case]
    model = find_model(learns_eight(tmp_path / "run", bases[base], **qarl))
    served = find_model(served_folder(model, tmp_path / "scratch", "cpu"))
    assert (served.format_name, served.quantized) == (qarl["format"], qarl["format"] != "bf16")
    held, own = (tensors(one.checkpoint.folder) for one in (served, model))
    assert held[NORM][0] == 1.0 != own[NORM][0]
    for name in own.keys() - {NORM} if base == qarl["format"] else ():
        assert_bitwise_equal(held[name], own[name])


def test_an_overlay_copies_what_it_changes_links_the_rest_and_names_what_does_not_fit(bases, tmp_path):
    base = open_checkpoint(bases["bf16"])
    overlay = write_overlay(base, {NORM: torch.full((256,), 2.0)}, tmp_path / "overlay")
    assert (tmp_path / "overlay" / "config.json").is_symlink()
    assert not (tmp_path / "overlay" / "model.safetensors").is_symlink()
    changed = tensors(overlay.folder)[NORM]
    assert changed.dtype == torch.bfloat16
    assert changed.eq(2).all()
    wrong = {NORM: torch.ones(3), "model.layers.9.mlp.gate.weight": torch.ones(1)}
    with pytest.raises(FileError, match=r"in another shape: .*input_layernorm.weight, model\.layers\.9\.mlp\.gate"):
        write_overlay(base, wrong, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_an_overlay_of_an_fp16_base_holds_the_bf16_numbers_that_were_trained(bases, tmp_path):
    folder = shutil.copytree(bases["bf16"], tmp_path / "fp16")
    halves = {name: tensor.half() for name, tensor in tensors(folder).items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    # In FP16 the first ones would be infinite, and the last ones 0.
    trained = torch.logspace(17, -30, 256, base=2).bfloat16()
    held = tensors(write_overlay(open_checkpoint(folder), {NORM: trained}, tmp_path / "overlay").folder)
    assert_bitwise_equal(held.pop(NORM), trained)
    assert {tensor.dtype for tensor in held.values()} == {torch.float16}


def test_an_overlay_keeps_the_stored_copy_of_a_tied_embedding_one(bases, tmp_path):
    folder = shutil.copytree(bases["bf16"], tmp_path / "tied")
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True})
    )
    embedding = torch.full_like(tensors(folder)["model.embed_tokens.weight"], 3.0)
    overlay = write_overlay(open_checkpoint(folder), {"model.embed_tokens.weight": embedding}, tmp_path / "overlay")
    assert_bitwise_equal(tensors(overlay.folder)["lm_head.weight"], embedding)


def test_answers_belong_to_what_was_trained_and_to_its_base(bases, tmp_path):
    base = shutil.copytree(bases["w4a16"], tmp_path / "base")
    model = find_model(learns_eight(tmp_path / "run", base, format="w4a16"))
    prints = {model.fingerprint()}
    for path in (model.folder / "adapter_model.safetensors", base / "model-00001-of-00001.safetensors"):
        path.write_bytes(path.read_bytes())
        prints.add(model.fingerprint())
    assert len(prints) == 3
    shutil.rmtree(base)
    with pytest.raises(FileError, match=r"trained on the frozen base .*base, and there is no such folder"):
        find_model(tmp_path / "run")


def test_a_base_that_was_moved_is_named(bases, tmp_path):
    base = shutil.copytree(bases["w4a16"], tmp_path / "base")
    run = learns_eight(tmp_path / "run", base, format="w4a16")
    hold_base(run, base, new=True)
    moved = base.rename(tmp_path / "moved")
    assert find_model(run, moved).run.base == moved
    settings = EvalSettings((run,), ("gsm8k",), tmp_path / "out.json", engine="packed", device="cpu", base=moved)
    with pytest.raises(ValueError, match="1 problem") as error:
        prepare(dataclasses.replace(settings, top_p=2.0))
    assert "base" not in str(error.value)
    with pytest.raises(ValueError, match=r"--base .*: none of the models is a run on a frozen base; leave it out"):
        prepare(dataclasses.replace(settings, models=(moved,)))


def test_adapters_that_vllm_does_not_serve_are_refused_with_the_engine_that_does(bases, tmp_path):
    run = learns_eight(tmp_path / "run", bases["w4a16"], format="w4a16")
    with pytest.raises(ValueError, match="step 4: vLLM takes adapters on a GPU; set --engine packed"):
        prepare(EvalSettings((run,), ("gsm8k",), tmp_path / "r.json", engine="vllm", device="cpu"))
    formats, gpu = [get_format("w4a8"), get_format("w4a16")], torch.device("cuda")
    (problem,) = adapter_problems(formats, ("experts",), gpu)
    assert problem.startswith("vLLM's kernels for experts of w4a8 do not run beside adapters")
    assert adapter_problems(formats, ("attention",), gpu) == []


@pytest.mark.gpu
@pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")
@pytest.mark.parametrize("case", CASES)
def test_vllm_serves_base_adapters_and_norms_together(case, bases, tmp_path):
    base, qarl = CASES[case]
    options = {"device": "cuda", "batch_size": 4, "max_model_len": 64, "gpu_memory_utilization": 0.2}
    for found, answers in (
        (find_model(bases[base]), "777"),
        (find_model(learns_eight(tmp_path / "run", bases[base], **qarl)), "888"),
    ):
        engine = VllmEngine(found, TOKENIZER, [EOS], tensor_parallel_size=1, **options)
        try:
            assert said(engine) == [answers] * 2
        finally:
            engine.close()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


def test_a_folder_of_runs_names_them(tmp_path):
    (tmp_path / "bf16" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileError, match=r"it holds 1 runs: name one of .*bf16"):
        find_model(tmp_path)
