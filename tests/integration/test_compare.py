"""`qarl compare` on a tiny random checkpoint: with the packed engine anywhere, with vLLM on a CPU if installed.

Set QARL_COMPARE_RESULTS to a file to keep vLLM's figures as rows of docs/results.
"""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qarl_kernels import get_format
from qarl_nemo.layers.install import install
from qarl_nemo.layers.lora import LoraSettings, add_adapters
from qarl_nemo.measure.compare.engines import serve
from qarl_nemo.measure.compare.job import prepare
from qarl_nemo.measure.compare.operators import PHASES, compare_operators
from qarl_nemo.measure.compare.record import comparison_rows, gap_figures
from qarl_nemo.measure.compare.run import Comparison, compare, load_learner
from qarl_nemo.measure.compare.score import Response, model_scores, read_responses
from qarl_nemo.measure.compare.settings import CompareSettings
from qarl_nemo.metrics.machine import hardware, versions
from qarl_nemo.metrics.results import Figure
from qarl_nemo.train.model import load_checkpoint
from qarl_nemo.train.trained import save_trained
from support.asserts import FP32_NATS
from support.engines import TOKENIZER
from support.figures import keep
from support.whole_models import save_sparse

DECODINGS = ("sampled", "greedy")
BF16 = get_format("bf16")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_sparse(tmp_path_factory.mktemp("compare") / "tiny", TOKENIZER, max_position_embeddings=128)


def settings(checkpoint, **options) -> CompareSettings:
    sizes = {"num_prompts": 4, "prompt_tokens": 8, "num_responses": 2, "max_new_tokens": 20, "device": "cpu"}
    return CompareSettings(checkpoint, **{"group_size": 64} | sizes | options)


def rows_by_arm(comparison) -> dict:
    return {(row["arm"], row["format"], row["decoding"]): row for row in comparison.rows}


def test_the_aligned_learner_is_at_the_floor_and_the_other_is_not(checkpoint):
    comparison = compare(settings(checkpoint, precision="float32", targets=("experts", "attention")))
    rows = rows_by_arm(comparison)
    assert set(rows) == {
        (arm, fmt, decoding)
        for arm, fmt in (
            ("bf16", "bf16"),
            ("attention", "bf16"),
            ("engine", "bf16"),
            ("aligned", "w4a16"),
            ("rollout_only", "w4a16"),
            ("attention", "w4a16"),
            ("engine", "w4a16"),
        )
        for decoding in DECODINGS
    }
    for decoding in DECODINGS:
        aligned, other = rows["aligned", "w4a16", decoding], rows["rollout_only", "w4a16", decoding]
        assert aligned["gap_max"] < FP32_NATS < 1e-2 < other["gap_mean"]
        assert aligned["kl_k3"] < FP32_NATS**2 < 1e-4 < other["kl_k3"]
        assert aligned["top1_agreement"] == 1.0 > other["top1_agreement"]
        assert rows["bf16", "bf16", decoding]["gap_over_floor"] == 1.0
        assert rows["engine", "w4a16", decoding]["gap_max"] < FP32_NATS
        assert rows["attention", "w4a16", decoding]["gap_max"] < FP32_NATS
        assert rows["attention", "w4a16", decoding]["gap_over_own"] == 1.0
        assert sum(interval["num_tokens"] for interval in aligned["by_position"]) == aligned["num_tokens"]
    assert rows["aligned", "w4a16", "sampled"]["num_responses"] == 8
    assert rows["aligned", "w4a16", "greedy"]["num_responses"] == 4
    assert set(comparison.methods["w4a16"].values()) == {"packed w4a16"}


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory) -> Path:
    folder, lora = tmp_path_factory.mktemp("adapter"), LoraSettings(8, 16.0, ("experts", "attention"))
    model, _ = load_checkpoint(checkpoint, torch.float32)
    install(model, ("experts",), BF16, plain=("attention",))
    model.requires_grad_(False)
    add_adapters(model, lora, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    norm = model.model.layers[0].input_layernorm.weight.requires_grad_(True)
    norm.data += torch.linspace(-0.5, 0.5, len(norm))
    save_trained(model, folder, lora, str(checkpoint))
    return folder


def test_both_sides_add_a_saved_adapter_and_what_was_trained_beside_it(checkpoint, adapter):
    wanted = settings(checkpoint, precision="float32", adapter=adapter)
    rows = rows_by_arm(compare(wanted))
    for decoding in DECODINGS:
        aligned, other = rows["aligned", "w4a16", decoding], rows["rollout_only", "w4a16", decoding]
        assert aligned["gap_max"] < FP32_NATS < 1e-2 < other["gap_mean"]
        assert rows["bf16", "bf16", decoding]["gap_max"] < FP32_NATS
    # A learner that lacks the adapter, or the norm alone, is far from what was served with both.
    job = prepare(wanted)
    (fmt,), responses = job.formats, serve(job, job.formats[0]).responses["greedy"]
    without = replace(job, adapter=None), replace(job, adapter=replace(job.adapter, others={}))
    for lacking in without:
        read = read_responses(load_learner(lacking, fmt), responses, batch_size=4, pad_id=job.pad_id)
        scores = model_scores(responses, *read)
        assert (scores.logprobs - scores.generation_logprobs)[scores.mask].abs().mean() > 1e-2


def test_adapters_that_cannot_be_compared_are_refused_with_every_reason(checkpoint, adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "copy")
    config = json.loads((adapter / "adapter_config.json").read_text())
    changed = config | {"use_dora": True, "bias": "all", "r": 0, "init_lora_weights": "pissa", "lora_alpha": 1e999}
    (tmp_path / "copy" / "adapter_config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="use_dora=True") as raised:
        prepare(settings(checkpoint, adapter=tmp_path / "copy"))
    assert "init_lora_weights='pissa'; legal: True, False, gaussian" in str(raised.value)
    assert "bias='all'; legal: none" in str(raised.value)
    assert "r=0 is no rank\n  lora_alpha=inf is no positive number" in str(raised.value)
    with pytest.raises(ValueError, match="layers does not know adapters") as raised:
        prepare(settings(checkpoint, adapter=adapter, engine="vllm", layers=True, formats=("w4a16", "fp8_channel")))
    for text in (
        "on a GPU; set --engine packed",
        "experts of fp8_channel do not run",
    ):
        assert text in str(raised.value)
    run = tmp_path / "checkpoints" / "step_000002"
    shutil.copytree(adapter, run / "model")
    for folder in (tmp_path, run):
        hint = rf"the adapters of {tmp_path} are in {run / 'model'}"
        with pytest.raises(ValueError, match=f"is no PEFT folder: it has no adapter_config.json; {hint}"):
            prepare(settings(checkpoint, adapter=folder))
    (tmp_path / "copy" / "adapter_config.json").write_text(json.dumps(config))
    for module, factors, problem in (
        ("7.self_attn.q_proj", "AB", r"not of this model: .*layers\.7"),
        ("0.mlp.up_proj", "AB", r"copy is not of this model: targets \['mlp'\] match no module"),
        # The other factor is zero at the start, so that this would be the base.
        ("0.self_attn.q_proj", "A", r"safetensors lacks lora_A or lora_B of model\.layers\.0\.self_attn\.q_proj"),
    ):
        names = [f"base_model.model.model.layers.{module}.lora_{factor}.weight" for factor in factors]
        save_file({name: torch.zeros(8, 256) for name in names}, tmp_path / "copy" / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=problem):
            prepare(settings(checkpoint, adapter=tmp_path / "copy"))


def test_a_folder_without_tokenizer_or_tensors_is_refused_with_the_rest_before_anything_is_served(checkpoint, tmp_path):
    shutil.copy(checkpoint / "config.json", tmp_path)
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    shown: list[str] = []
    with pytest.raises(ValueError, match=r"^3 problem\(s\) with this comparison") as raised:
        compare(settings(tmp_path, max_new_tokens=0), shown.append)
    for text in ("max_new_tokens=0", "its tokenizer knows no words", "model.norm.weight"):
        assert text in str(raised.value)
    assert shown == []


def test_tokens_of_another_response_are_far_from_the_engine(checkpoint):
    job = prepare(settings(checkpoint))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt, tokens = job.prompts[0], job.prompts[1]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    chosen = logprobs[range(len(tokens)), tokens].tolist()
    tops = logits.argmax(-1).tolist()
    right = Response(prompt, tokens, chosen, tops, chosen, tops)
    wrong = Response(prompt, tokens[::-1], chosen, tops, chosen, tops)
    short = Response(prompt, tokens[:3], chosen[:3], tops[:3], chosen[:3], tops[:3])
    responses = [right, short, wrong]
    scores = model_scores(responses, *read_responses(model, responses, batch_size=2, pad_id=0))
    gaps = (scores.logprobs - scores.generation_logprobs).abs()
    assert scores.mask.sum(-1).tolist() == [8, 3, 8]
    assert gaps[:2][scores.mask[:2]].max() < FP32_NATS < 0.1 < gaps[2].mean()
    assert scores.same_top[:2][scores.mask[:2]].all()


@pytest.mark.slow
def test_the_command_writes_table_json_and_figure(qarl, checkpoint, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "12+34="}, {"prompt_token_ids": [5, 6, 7]}, {"problem": "7*8="}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = ["--format", "w4a16", "--format", "fp8_block", "--prompts", prompts, "--max-new-tokens", 6]
    options += ["--device", "cpu", "--output", tmp_path / "out"]
    code, printed = qarl("compare", checkpoint, *options)
    assert code == 0, printed
    for text in ("aligned w4a16", "rollout_only fp8_block", "engine bf16", "k3 KL", "greedy"):
        assert text in printed
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert len(written["rows"]) == 22
    assert written["rows"][0]["arm"] == "bf16"
    assert written["rows"][0]["num_responses"] == 12
    assert (tmp_path / "out" / "compare.png").stat().st_size > 20_000


def test_everything_wrong_is_listed_at_once(checkpoint, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1="}\n{"answer": 2}\nnot json\n')
    wrong = settings(
        checkpoint,
        formats=("w4a16", "bf16", "w9", "w4a16"),
        group_size=48,
        scale_convention="wide",
        targets=("experts", "heads"),
        engine="sglang",
        max_new_tokens=0,
        prompts=prompts,
    )
    with pytest.raises(ValueError, match="problem") as error:
        prepare(wrong)
    for text in ("max_new_tokens=0", "'heads'", "'sglang'", "group_size=48", "'wide'", "bf16 is the floor", "'w9'"):
        assert text in str(error.value)
    assert str(error.value).count("w4a16 is named more than once") == 1
    assert "line 2, line 3: no prompt" in str(error.value)


def test_prompts_outside_vocabulary_or_length_are_listed(checkpoint, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [[5, 99], [4] * 120, [4]]
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": row}) for row in rows))
    with pytest.raises(ValueError, match="problem") as error:
        prepare(settings(checkpoint, prompts=prompts))
    assert "prompt 1 has token ids [99]" in str(error.value)
    assert "prompt 2 has 120 tokens" in str(error.value)
    assert "prompt 3" not in str(error.value)


def test_options_of_integer_formats_reach_them_alone(checkpoint):
    options = {"scale_convention": "clipped_range", "nested_in": "w8a16"}
    job = prepare(settings(checkpoint, formats=("w2a16", "fp8_channel"), **options))
    assert [(fmt.name, fmt.group_size, fmt.scale_convention, fmt.published_name) for fmt in job.formats] == [
        ("w2a16", 64, "clipped_range", "w8a16"),
        ("fp8_channel", 0, None, "fp8_channel"),
    ]


def test_the_engines_codes_have_their_own_width_on_request(checkpoint, monkeypatch):
    asked = settings(checkpoint, formats=("w2a16", "w4a16", "fp8_channel"), targets=("attention",))
    assert [fmt.num_bits for fmt in prepare(asked).formats] == [4, 4, 8]
    assert [fmt.num_bits for fmt in prepare(replace(asked, own_width=True)).formats] == [2, 4, 8]
    with pytest.raises(ValueError, match=r"engine packed rounds nested codes .* leave out --own-width"):
        prepare(replace(asked, own_width=True, nested_in="w8a16"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match=r"codes of 2 bits in dense layers only, experts take 4 and 8") as error:
        prepare(replace(asked, formats=("w2a16",), own_width=True, engine="vllm", targets=("experts",)))
    assert "CPU does not serve w2a16" in str(error.value)


def test_codes_of_any_width_are_compared(checkpoint):
    few = {"precision": "float32", "max_new_tokens": 4, "num_responses": 1, "targets": ("attention",)}
    rows = rows_by_arm(compare(settings(checkpoint, formats=("w2a16", "w5a16"), own_width=True, **few)))
    for name, far in (("w2a16", 1e-2), ("w5a16", 1e-4)):
        assert (
            rows["aligned", name, "greedy"]["gap_max"]
            < FP32_NATS
            < far
            < rows["rollout_only", name, "greedy"]["gap_mean"]
        )


def test_shapes_and_targets_a_model_lacks_are_refused_before_weights_are_read(checkpoint):
    with pytest.raises(ValueError, match=r"targets \['mlp'\] match no module"):
        prepare(settings(checkpoint, targets=("mlp",)))


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_what_vllm_does_not_serve_on_a_cpu_is_refused_before_it_starts(checkpoint, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    formats = ("w4a16", "w4a8", "fp8_channel", "int8", "nvfp4", "fp8_block")
    with pytest.raises(ValueError, match="problem") as error:
        prepare(settings(checkpoint, engine="vllm", formats=formats, group_size=128, device=device))
    refused = [name for name in formats if f"CPU does not serve {name}" in str(error.value)]
    assert refused == ["w4a8", "fp8_channel", "int8", "nvfp4"]


def needs_cpu_vllm(test):
    test = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")(test)
    return pytest.mark.skipif(torch.cuda.is_available(), reason="for a CPU build of vLLM")(test)


EXPERTS = "model.layers.0.mlp.experts.routed_experts"


def keep_figures(comparison):
    """Print the gaps; with QARL_COMPARE_RESULTS they become rows of docs/results."""
    figures = []
    for (arm, fmt, decoding), row in rows_by_arm(comparison).items():
        name = "floor_bf16" if arm == "bf16" else f"{arm}_{fmt}"
        print(f"FIGURE {name} {decoding} gap {row['gap_mean']:.4f} k3 {row['kl_k3']:.2e}")
        figures.append(Figure(f"vllm_cpu_gap_{name}_{decoding}", float(f"{row['gap_mean']:.4g}"), "nats", "<="))
    keep(
        figures,
        variable="QARL_COMPARE_RESULTS",
        results="fidelity",
        test="tests/integration/test_compare.py -k vllm",
        hardware=hardware("cpu"),
        versions=versions() | dict([comparison.engine.split(" ")]),
    )


@pytest.mark.slow
@needs_cpu_vllm
def test_vllm_on_a_cpu_is_closer_to_the_aligned_learner(checkpoint):
    options = {"formats": ("w4a16", "fp8_block"), "num_prompts": 16, "max_new_tokens": 48}
    comparison = compare(settings(checkpoint, engine="vllm", **options))
    keep_figures(comparison)
    assert comparison.engine.startswith("vllm ")
    assert comparison.methods["w4a16"][EXPERTS].startswith("CompressedTensorsWNA16")
    assert comparison.methods["fp8_block"][EXPERTS].startswith("Fp8MoEMethod")
    gaps = {key: row["gap_mean"] for key, row in rows_by_arm(comparison).items()}
    for decoding in DECODINGS:
        assert gaps["bf16", "bf16", decoding] < 0.05
        # The CPU's int4 kernel rounds activations to 8 bits, so the aligned gap is above the floor here.
        assert gaps["aligned", "w4a16", decoding] < 0.5 * gaps["rollout_only", "w4a16", decoding]


@pytest.mark.slow
@needs_cpu_vllm
def test_an_operator_that_differs_is_named_and_no_other(checkpoint):
    job = prepare(settings(checkpoint, engine="vllm", group_size=None, formats=("fp8_block",), layers=True))
    record = serve(job, BF16).record
    model = load_learner(job, BF16)
    before = {(row["operator"], row["layer"], row["phase"]): row for row in compare_operators(model, record)}
    for operator in ("embedding", "residual", "qkv_proj", "q", "k", "o_proj", "router", "lm_head"):
        assert all(row["identical"] == 1.0 for key, row in before.items() if key[0] == operator), operator
    assert all(row["snr_db"] is None or row["snr_db"] > 40 for row in before.values())
    assert {key[2] for key in before} == {"prefill", "decode"}
    model.model.layers[1].self_attn.o_proj.weight.data *= 1.02
    after = {(row["operator"], row["layer"], row["phase"]): row for row in compare_operators(model, record)}
    assert {key for key in before if after[key] != before[key]} == {("o_proj", 1, phase) for phase in PHASES}
    assert after["o_proj", 1, "decode"]["snr_db"] < 40


def test_operators_of_the_packed_engine_are_not_looked_into(checkpoint):
    with pytest.raises(ValueError, match="--layers looks into vLLM's operators; set --engine vllm"):
        prepare(settings(checkpoint, layers=True))


def test_the_engines_attention_is_refused_where_it_cannot_run(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"attention=engine does not run here: .* needs a Hopper GPU"):
        prepare(settings(checkpoint, attention="engine"))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_figures_become_rows(checkpoint, precision):
    asked = settings(checkpoint, precision=precision, targets=("experts", "attention"))
    measured = compare(asked)
    figures = gap_figures(measured, precision)
    asked_for = "_experts_attention_group_size_64"
    rows = {row["name"]: row for row in comparison_rows(asked, measured.engine, figures, "cpu", "qarl compare")}
    assert {f"gap_floor_bf16{asked_for}", f"gap_aligned_w4a16{asked_for}"} <= set(rows)
    assert rows[f"gap_ratio_own_w4a16{asked_for}"]["goal"] is None
    far = rows_by_arm(measured)["rollout_only", "w4a16", "sampled"]
    assert far["gap_over_own"] > 4


@pytest.mark.parametrize(
    ("precision", "floor", "own", "recorded"),
    [
        ("bfloat16", 1e-3, 2e-3, True),
        # BF16 engines that agree but for a few bits, as with vLLM's own attention in the learner
        ("bfloat16", 5e-8, 1e-3, False),
        # the rounding of FP32 logprobs, whatever this CPU makes of it
        ("float32", 7e-7, 6e-7, False),
        ("float32", 2e-6, 6e-7, False),
    ],
)
def test_a_ratio_to_the_floor_needs_a_floor(precision, floor, own, recorded):
    gaps = {("bf16", "bf16"): floor, ("aligned", "w4a16"): 1.5 * floor, ("rollout_only", "w4a16"): 0.3}
    rows = [
        {
            "arm": arm,
            "format": fmt,
            "decoding": "sampled",
            "gap_mean": gap,
            "gap_over_floor": gap / floor,
            "gap_over_own": gap / own,
        }
        for (arm, fmt), gap in gaps.items()
    ]
    figures = {name: (value, goal) for name, value, _, _, goal in gap_figures(Comparison("", {}, rows, []), precision)}
    assert figures["gap_floor_bf16"] == (floor, None)
    ratios = {name for name in figures if name in ("gap_ratio_w4a16", "gap_ratio_rollout_only_w4a16")}
    assert len(ratios) == (2 if recorded else 0)
    if recorded:
        assert figures["gap_ratio_w4a16"] == (pytest.approx(1.5), 1.05)
