"""What `qarl memory` says on the command line: what fits, what it shows, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from qarl_nemo.config import QarlConfig
from qarl_nemo.memory import ModelSize

ROOT = Path(__file__).parents[2]
MODEL, GUIDE = ROOT / "examples" / "models" / "qwen3-30b-a3b", ROOT / "docs" / "guide" / "measuring.md"
TINY = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def model() -> ModelSize:
    return ModelSize.read(MODEL)


def save_config(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(json.loads((MODEL / "config.json").read_text()) | changes))
    return folder


def rows_of(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if line[:1] == "│"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--gpus", "7"], "num_gpus=7: no layout .* numbers of GPUs that have layouts: 2, 4, 8. .*e.g. tp2_ep8"),
        (["--gpus", "0"], "num_gpus=0 is not from 1 to 65536"),
        (["--gpus", "-8"], "num_gpus=-8 is not from 1 to 65536"),
        (["--gpus", "9" * 30], "num_gpus=9+ is not from 1 to 65536"),
        (["--targets", "foo"], "unknown targets: foo; legal: experts, attention, mlp"),
        (["--targets", "mlp"], "targets mlp: this model has experts, attention"),
        (["--layout", "ep3"], r"ep \* etp \* pp=3 does not divide num_gpus=8; it may be 1, 2, 4 or 8"),
        (["--layout", "tp8"], "layout tp8: tp=8 does not divide 4 key-value heads; it may be 1, 2 or 4"),
        (["--layout", "tp0"], "layout 'tp0': legal are tp, pp, cp, ep and etp with a size each"),
        (["--layout", "tp2_tp4"], "layout 'tp2_tp4': legal are"),
        (["--layout", ""], "layout '': legal are"),
        (["--optimizer", "sgd"], "unknown optimizer 'sgd'; legal: adam, adam_bf16, muon, offloaded"),
        (["--recompute", "some"], "unknown recompute 'some'; legal: none, full"),
        (["--gradient-bytes", "3"], "unknown gradient_bytes 3; legal: 4, 2"),
        (["--group-size", "100"], "unknown group_size 100; legal: 128, 64, 32"),
        (["--group-size", "64", "--format", "fp8_block"], "format 'fp8_block' takes no group_size"),
        (["--format", "nf4"], "unknown format 'nf4'; legal: w4a16, "),
        (["--format", "w5a16"], "vLLM serves no run in format 'w5a16'; legal: w4a16, "),
        (["--format", "w2a2"], r"unknown format 'w2a2' \(activations of fewer than 8 bits have no tensor-core path"),
        (
            ["--format", "nvfp4", "--targets", "attention", "--layout", "tp2_ep8"],
            "would not start: layout tp2_ep8: tensor_model_parallel_size=2: nvfp4 has one scale for a whole weight",
        ),
        (["--layout", "ep2_etp4"], r"layout ep2_etp4: fc2 shard \[2048, 192\] .*multiple of group_size=128"),
        (["--tokens", "0"], "tokens=0 is not from 1 to"),
        (["--group-size", "0"], "unknown group_size 0; legal: 128, 64, 32"),
        (["--tokens", "0", "--optimizer", "sgd"], "unknown optimizer 'sgd'; .*tokens=0 is not from 1 to"),
        (["--layout", "ep3", "--layout", "tp8"], "ep3: .*=3 does not divide.* tp8: .*=8 does not divide 4 key-value"),
        (["--gpu-gib", "-1"], "gpu_gib=-1.0 must lie between 0 and"),
        (["--gpu-gib", "nan"], "gpu_gib=nan must lie between 0 and"),
        (["--engine-tp", "3"], "engine_tp=3 does not divide 8 GPUs and 32 attention heads; it may be 1, 2, 4 or 8"),
        (["--engine-tp", "64", "--gpus", "64"], "engine_tp=64 does not divide 32 attention heads"),
        (["--format", "nf4", "--group-size", "64"], "unknown format 'nf4'; legal: w4a16, "),
        (["--engine-tp", "0"], "engine_tp=0 does not divide 8 GPUs"),
        (["--engine-ep", "0"], "engine_ep=0 does not divide 8 GPUs and 128 experts; it may be 1, 2, 4 or 8"),
        (["--engine-ep", "3"], "engine_ep=3 does not divide 8 GPUs and 128 experts; it may be 1, 2, 4 or 8"),
        (["--engine-tp", "4", "--engine-ep", "2"], "engine_ep=2 is no multiple of engine_tp=4; it may be 1, 4 or 8"),
        (["--lora", "32", "--engine-ep", "2"], "--engine-ep: of a Megatron learner on several GPUs"),
        (["--engine-tp", "4"], "engine_tp=4: down_proj: K=192 is not a multiple of group_size=128"),
        (["--engine-tp", "8", "--format", "fp8_block"], "engine_tp=8: gate_proj: N=96"),
    ],
)
def test_what_is_not_legal_is_one_line_with_what_is(options, problem, qarl):
    code, printed = qarl("memory", MODEL, *options)
    assert code == 2
    assert re.search(problem, " ".join(printed.split())), printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(("engine_tp", "legal"), [(1, True), (2, True), (3, True), (4, False), (6, True), (12, True)])
def test_an_engine_divides_key_value_heads_or_repeats_each_as_often(engine_tp, legal, tmp_path, qarl):
    save_config(tmp_path, **TINY | {"num_attention_heads": 24, "num_key_value_heads": 6})
    code, printed = qarl(
        "memory", tmp_path, "--gpus", 12, "--layout", "dp", "--format", "bf16", "--engine-tp", engine_tp
    )
    assert (code == 0) is legal, printed
    assert legal or (
        "engine_tp=4 neither divides 6 key-value heads nor is a multiple of them, as vLLM needs it; it may be 1, 2, 3, "
        "6 or 12"
    ) in " ".join(printed.split())


def test_all_that_is_not_legal_is_named_at_once(qarl):
    options = {"gpu-gib": -1, "gpus": 0, "tokens": 0, "logprob-chunk": 0, "gradient-bytes": 3, "targets": "mlp"}
    options |= {"optimizer": "sgd", "recompute": "some", "layout": "tp0", "engine-tp": 3, "nested-in": "w4"}
    code, printed = qarl("memory", MODEL, *(f"--{name}={value}" for name, value in options.items()))
    assert code == 2
    named = ("gpu_gib=", "tokens=0", "logprob_chunk=0", "gradient_bytes 3", "targets mlp", "'sgd'", "'some'", "'tp0'")
    for text in (*named, "num_gpus=0", "engine_tp=3", "nested_in='w4'"):
        assert printed.count(text) == 1, printed
    code, printed = qarl(
        "memory", MODEL, "--lora", 3, "--cache-gib", "nan", "--tokens", 0, "--gpus", 2, "--targets", ""
    )
    assert code == 2
    for text in (
        "lora=3 is a rank",
        "cache_gib=nan",
        "tokens=0",
        "--gpus: of a Megatron learner",
        "no target given; legal: experts, attention, mlp",
    ):
        assert printed.count(text) == 1, printed


def test_what_is_named_twice_stands_in_the_table_once(qarl):
    twice = ["--layout", "ep8", "--optimizer", "muon", "--recompute", "full"] * 2
    assert len(rows_of(qarl("memory", MODEL, *twice, "--all")[1])) == 1


def test_layouts_that_cut_what_a_format_scales_are_not_proposed(qarl):
    found = {}
    for name in ("w4a16", "int8"):
        code, printed = qarl("memory", MODEL, "--format", name, "--targets", "experts,attention", "--all")
        assert code == 0, printed
        found[name] = {row[0] for row in rows_of(printed)}
    assert found["w4a16"] - found["int8"] == {"tp2_ep4", "tp2_ep8", "tp4_ep4", "tp4_ep8"}
    assert found["int8"] == {"ep4", "ep8"}


def test_the_answer_comes_first_and_names_the_best(qarl):
    code, printed = qarl("memory", MODEL)
    assert code == 0, printed
    rows = rows_of(printed)
    assert len(rows) == 15
    assert all(row[-2] == "yes" for row in rows)
    assert printed.splitlines()[0] == (
        "Fits 79 GiB: tp4_ep8 + adam_bf16 + no recompute with up to 13,312 tokens a micro-batch; 14 more below."
    )
    assert (*rows[0][:3], rows[0][-1]) == ("tp4_ep8", "adam_bf16", "none", "13312")
    said = " ".join(printed.split())
    assert "The best first: state on the GPU, no recomputation" in said
    assert "fewer ranks that share experts (ep x etp), more tokens a micro-batch." in said
    assert "they do not fit: 33; --all shows them" in said


def test_a_learner_keeps_what_its_gemms_multiply_as_runs_do(model, qarl):
    assert QarlConfig().keep_operand
    asked = ("memory", MODEL, "--layout", "ep8", "--optimizer", "offloaded", "--recompute", "full")
    kept, dropped, own = (qarl(*asked, *more)[1] for more in ((), ("--no-keep-operand",), ("--format", "int8")))
    packed = [float(rows_of(printed)[0][6]) for printed in (kept, dropped, own)]
    # 2 bytes a weight beside codes of 4.125 bits.
    added = 2 * model.num_layers * model.expert_parameters / 8 / 2**30
    assert packed[0] - packed[1] == pytest.approx(added, abs=0.1)
    said = [" ".join(printed.split()) for printed in (kept, dropped, own)]
    assert "packed: with what GEMMs multiply, which runs keep by default; --no-keep-operand leaves it out." in said[0]
    assert "packed: for runs with qarl.keep_operand=false, which is not the default." in said[1]
    # INT8 codes are multiplied as they are.
    assert "keep" not in said[2]


@pytest.mark.parametrize(
    "options",
    [
        "--gpus 8 --gpu-gib 79",
        "--gpus 4 --gpu-gib 139 --layout tp2_ep4 --optimizer adam_bf16 --tokens 16384",
        "--optimizer adam --layout ep8 --layout tp2_ep8 --no-keep-operand",
    ],
)
def test_the_guide_quotes_the_answer(options, qarl):
    guide = GUIDE.read_text(encoding="utf-8")
    assert options in guide
    answer = " ".join(qarl("memory", MODEL, *options.split())[1].partition("\nGiB of")[0].split())
    assert answer.startswith(("Fits ", "Nothing fits "))
    assert f"{answer}\n" in guide
    # Another GPU has another answer.
    other = " ".join(qarl("memory", MODEL, *options.split(), "--gpu-gib", 60)[1].partition("\nGiB of")[0].split())
    assert f"{other}\n" not in guide


def test_all_shows_what_does_not_fit_too(qarl):
    code, printed = qarl("memory", MODEL, "--layout", "ep8", "--recompute", "full", "--no-keep-operand", "--all")
    assert code == 0, printed
    rows = rows_of(printed)
    assert [(row[1], row[-2]) for row in rows] == [
        *(("adam_bf16", "yes"), ("muon", "yes"), ("offloaded", "yes"), ("adam", "no"))
    ]
    assert rows[-1][-1] == "-"
    assert "--all shows" not in printed


def test_where_nothing_fits_the_nearest_says_what_to_change(qarl):
    options = ["--layout", "tp2_ep8", "--layout", "ep8", "--optimizer", "adam"]
    # Two bytes of 3.6e9 experts' weights, but for a layer's, which the backward then unpacks.
    assert "--no-keep-operand (saves 6.8 GiB)" in " ".join(qarl("memory", MODEL, *options)[1].split())
    options.append("--no-keep-operand")
    code, printed = qarl("memory", MODEL, *options)
    assert code == 0, printed
    assert [row[:3] for row in rows_of(printed)] == [["tp2_ep8", "adam", "full"]]
    said = " ".join(printed.split())
    # 75.5 + 6 of 79 GiB; half of FP32's 16.4 GiB of gradients, half of Adam's 42.7, and 5.8 GiB of logits by chunks.
    assert said.startswith(
        "Nothing fits 79 GiB. The nearest, tp2_ep8 + adam + full recompute, misses by 2.5 GiB with 8,192 tokens a "
        "micro-batch. Change: --tokens 4096 (fits tp2_ep8 + adam + full recompute), --optimizer adam_bf16 (saves "
        "21.3 GiB), --logprob-chunk 1024 (saves 1.4 GiB), --gradient-bytes 2 (saves 2.1 GiB), more --gpus or --lora"
    )
    for change in (["--tokens", 4096], ["--optimizer", "adam_bf16"]):
        assert qarl("memory", MODEL, *options, *change)[1].startswith("Fits 79 GiB: ")
    # As NeMo-RL's recipes have it, Adam copies gradients of 2 bytes to FP32 for its step.
    printed = " ".join(qarl("memory", MODEL, *options, "--gradient-bytes", 2)[1].split())
    assert printed.startswith("Nothing fits 79 GiB")
    assert "With adam a step needs more, weights + gradients + state + the FP32 copies of gradients" in printed
    assert "--recompute full (saves 36.0 GiB)" in " ".join(
        qarl("memory", MODEL, "--layout", "ep8", "--optimizer", "adam", "--recompute", "none")[1].split()
    )


def test_a_refit_that_does_not_fit_is_what_is_missing(qarl):
    code, printed = qarl("memory", MODEL, "--format", "bf16", "--layout", "tp4_ep8", "--engine-tp", 1)
    assert code == 0, printed
    said = " ".join(printed.split())
    assert "Change: more GPUs an engine (--engine-tp, --engine-ep), because its refit does not fit, more --gpus" in said
    assert rows_of(printed)[0][-5] == "no"
    code, printed = qarl("memory", MODEL, "--format", "bf16", "--layout", "tp4_ep8", "--engine-tp", 2)
    assert printed.startswith("Fits 79 GiB: tp4_ep8 + adam_bf16 + no recompute with up to ")
    assert "tokens a micro-batch, its refit layer by layer; " in printed


@pytest.mark.parametrize(
    ("engine", "has_more"),
    [
        (["--engine-tp", 1], True),
        (["--engine-tp", 1, "--engine-ep", 8], True),
        (["--engine-tp", 8, "--engine-ep", 8], False),
    ],
)
def test_more_gpus_are_proposed_only_to_engines_that_may_have_more(engine, has_more, qarl):
    code, printed = qarl("memory", MODEL, "--gpu-gib", 10, *engine)
    assert code == 0, printed
    # The refit does not fit with any of them.
    assert float(rows_of(printed)[0][-2]) > 10
    assert ("more GPUs an engine" in " ".join(printed.split())) is has_more


def test_a_refit_gets_smaller_without_kept_operands(qarl):
    asked = ("memory", MODEL, "--gpus", 16, "--gpu-gib", 35, "--engine-tp", 1)
    said = " ".join(qarl(*asked)[1].split())
    assert "because its refit does not fit, --no-keep-operand (saves " in said
    assert qarl(*asked, "--no-keep-operand")[1].startswith("Fits 35 GiB: ")


def test_more_gpus_are_proposed_alone_only_where_they_share_more(tmp_path, qarl):
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **sizes, **heads}))
    asked = ("memory", tmp_path, "--gpu-gib", 7, "--tokens", 131072, "--recompute", "full")
    for optimizer, gpus, changed in (("offloaded", 4, True), ("offloaded", 2, False), ("adam", 4, False)):
        said = " ".join(qarl(*asked, "--optimizer", optimizer, "--gpus", gpus)[1].split())
        assert said.startswith("Nothing fits 7 GiB. ")
        assert "more --gpus" in said
        assert ("more --gpus in a --layout with more tp, pp or cp" in said) is changed


def test_a_small_model_is_shown_in_mib(tmp_path, qarl):
    code, printed = qarl("memory", save_config(tmp_path, **TINY), "--gpus", 4, "--optimizer", "adam")
    assert code == 0, printed
    assert "MiB of the fullest rank" in printed
    assert "6 GiB beside tensors in 79" in " ".join(printed.split())
    # 2,361,088 parameters with every fourth expert: 1.18 million on each rank.
    size = ModelSize.read(tmp_path)
    held = 2 * (size.num_parameters - size.num_layers * size.expert_parameters * 3 / 4) / 2**20
    assert float(rows_of(printed)[0][3]) == pytest.approx(held, abs=0.05)
    assert "MiB of one GPU" in qarl("memory", tmp_path, "--lora", 8)[1]
    assert "GiB of the fullest rank" in qarl("memory", MODEL)[1]


def test_the_command_adds_a_refits_peaks(qarl):
    code, printed = qarl("memory", MODEL, "--layout", "ep8", "--format", "bf16", "--engine-tp", 2, "--all")
    assert code == 0, printed
    assert re.search(r"refit\W+layerwise\W+host", printed)
    said = " ".join(printed.split())
    assert "processes (7.6, fitted)" in said
    host = {row[1]: float(row[-1]) for row in rows_of(printed)}
    assert host["offloaded"] > host["muon"] > 7.5 + 8


def test_the_command_computes_engines_that_share_experts(model, qarl):
    def refits(*options):
        arguments = ("--layout", "ep8", "--optimizer", "muon", "--recompute", "full", "--all", *options)
        code, printed = qarl("memory", MODEL, *arguments)
        assert code == 0, printed
        return [float(cell) for cell in rows_of(printed)[0][-3:]]

    alone, shared = refits("--engine-tp", 1), refits("--engine-ep", 8)
    # Seven eighths of the experts leave each GPU.
    saved = model.num_layers * model.expert_parameters * 4.125 / 8 * 7 / 8 / 2**30
    assert [one - other for one, other in zip(alone[:2], shared[:2], strict=True)] == pytest.approx(
        [saved] * 2, abs=0.2
    )
    assert refits("--engine-tp", 1, "--engine-ep", 1) == alone
    # Whole experts are served where a part of one would not be.
    assert refits("--engine-tp", 4, "--engine-ep", 4)[0] < alone[0]


def test_a_dense_model_has_no_experts_to_share(tmp_path, qarl):
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **sizes, **heads}))
    code, printed = qarl("memory", tmp_path, "--engine-ep", 2)
    assert code == 2
    assert "engine_ep=2: this model has no experts; leave it out" in " ".join(printed.split())


def test_a_dense_model_is_computed_without_further_words(tmp_path, qarl):
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes, **heads}))
    for options in (["--gpus", "1"], ["--lora", "32"]):
        code, printed = qarl("memory", tmp_path, *options)
        assert code == 0, printed
        assert "mlp as w4a16" in " ".join(printed.split())
    code, printed = qarl("memory", tmp_path, "--targets", "experts")
    assert code == 2
    assert "targets experts: this model has mlp, attention" in " ".join(printed.split())


def test_weights_that_no_kernel_serves_do_not_fit(tmp_path, qarl):
    sizes = {"hidden_size": 96, "moe_intermediate_size": 80, "num_experts": 8, "num_experts_per_tok": 2}
    save_config(tmp_path, **sizes)
    # Muon with and without recomputation; the built-in sampler, which takes them, and vLLM.
    for options, fits in ((["--gpus", "1", "--optimizer", "muon"], [False, False]), (["--lora", "16"], [True, False])):
        code, printed = qarl("memory", tmp_path, "--format", "nvfp4", *options)
        assert code == 0, printed
        rows = [line for line in printed.splitlines() if re.match("\\W+(dp|packed|vllm) ", line)]
        assert ["yes" in line for line in rows] == fits, printed
        assert ["not served" in line for line in rows] == [not one for one in fits], printed
        said = " ".join(printed.split())
        assert ("By memory alone: fits 79 GiB" in said) is (options[0] == "--gpus")
        assert "not served: vLLM does not take these weights on any number of GPUs" in said
        assert "gate_proj: N=80 is not a multiple of 64" in said
        assert "down_proj: N=96 is not a multiple of 128" in said
        code, printed = qarl("memory", tmp_path, "--format", "w4a16", *options)
        assert code == 2
        assert "w4a16 cannot store these weights: gate_proj: K=96 is not a multiple of" in " ".join(printed.split())
    assert "not served" not in qarl("memory", MODEL, "--format", "nvfp4")[1]
