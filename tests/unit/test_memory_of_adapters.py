"""What one GPU of `qarl train` with adapters on a frozen base is computed to hold."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from qarl_formats import get_format, quantization_config
from qarl_nemo.memory import EMBEDDED_PROCESS_BYTES, GIB, Learner, ModelSize
from qarl_nemo.memory.lora import ENGINES, Adapters, adapted_memory
from qarl_nemo.metrics.results import read_results
from support.whole_models import quantized_copies, save_sparse

ROOT = Path(__file__).parents[2]
MODEL, RESULTS = ROOT / "examples" / "models" / "qwen3-30b-a3b", ROOT / "docs" / "results"
ATTENTION, EXPERTS = Adapters(32, ("attention",)), Adapters(16, ("experts",))
BASE = Learner(recompute="full", logits=False, logprob_chunk=1024)


@pytest.fixture(scope="module")
def model() -> ModelSize:
    return ModelSize.read(MODEL)


def memory(model, adapters=ATTENTION, engine="vllm", learner=BASE, cache_bytes=16e9):
    return adapted_memory(model, learner, adapters, engine=engine, cache_bytes=cache_bytes)


def test_adapters_have_as_many_parameters_as_by_hand(model):
    # q and o: 2048 + 4096 rows and columns; k and v: 2048 + 512. Experts: three projections of 2048 + 768.
    assert ATTENTION.num_parameters(model) == 48 * 32 * 2 * (2048 + 4096 + 2048 + 512) == 26_738_688
    assert EXPERTS.num_parameters(model) == 48 * 128 * 16 * 3 * (2048 + 768) == 830_472_192
    assert Adapters(8, ("mlp",)).num_parameters(model) == 0


def test_the_base_is_packed_and_the_engine_has_its_own_only_where_it_is_vllm(model):
    # 28.991e9 weights of 4.125 bits, 1.541e9 of 16.
    base = 28.991e9 * 4.125 / 8 + 1.541e9 * 2
    held = memory(model).parts
    assert held["base"] == pytest.approx(base, rel=1e-3)
    assert held["engine"] == pytest.approx(base + 2**30 + 2 * ATTENTION.num_parameters(model), rel=1e-3)
    assert memory(model, engine="packed").parts["engine"] == 2 * ATTENTION.num_parameters(model)
    # BF16 weight, FP32 master and two moments; gradients of a micro-batch in BF16 and summed in FP32.
    assert held["adapters"] == 14 * ATTENTION.num_parameters(model)
    assert held["gradients"] == 6 * ATTENTION.num_parameters(model)


@pytest.mark.parametrize(("name", "kept_bytes"), [("w4a16", 2), ("w4a8", 1), ("int8", 0), ("bf16", 0)])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_base_may_keep_what_its_gemms_multiply_beside_its_codes(model, name, kept_bytes, engine):
    unpacking = replace(BASE, format=name)
    without = memory(model, engine=engine, learner=unpacking).parts
    keeping = memory(model, engine=engine, learner=replace(unpacking, keep_operand=True)).parts
    assert keeping["base"] - without["base"] == pytest.approx(kept_bytes * 28.991e9, rel=1e-3)
    # vLLM has a base of its own.
    assert keeping["engine"] == without["engine"]


def test_the_built_in_samplers_cache_makes_way_for_the_update(model):
    for engine, keeps in (("packed", 0.0), ("vllm", 1.0)):
        without, cached = (memory(model, engine=engine, cache_bytes=size) for size in (0.0, 1e9))
        assert cached.update_bytes - without.update_bytes == keeps * 1e9
        assert cached.rollout_bytes - without.rollout_bytes == 1e9
        assert cached.peak_bytes == max(cached.update_bytes, cached.rollout_bytes)


def test_adapters_of_experts_add_the_gradient_of_their_inputs(model):
    # BF16, for each of a token's eight rows: of the input, and of one projection's output with its own gradient.
    added = memory(model, EXPERTS).parts["working"] - memory(model, ATTENTION).parts["working"]
    assert added == 2 * 8192 * 8 * (2048 + 2 * 768)


def test_attention_fits_80_gb_and_experts_141(model):
    for adapters, gib in ((ATTENTION, 79), (EXPERTS, 139)):
        assert memory(model, adapters).peak_bytes + 2 * 2**30 < gib * 2**30
    bf16 = Learner("bf16", recompute="full", logits=False, logprob_chunk=1024)
    assert memory(model, learner=bf16).peak_bytes > 79 * 2**30


@pytest.mark.parametrize(
    ("run", "adapters", "learner", "cache_gib"),
    [
        ("attention_alone", ATTENTION, BASE, 8),
        ("attention_experts_alone", Adapters(16, ("attention", "experts")), BASE, 8),
        ("attention_nvfp4", ATTENTION, replace(BASE, format="nvfp4"), 8),
        ("attention_1024", ATTENTION, replace(BASE, tokens=16384), 16),
    ],
)
def test_whole_models_on_one_gpu_took_what_is_computed(model, run, adapters, learner, cache_gib):
    measured = {row.name: row.value * GIB for row in read_results(RESULTS / "lora.json") if row.unit == "GiB"}
    computed = memory(model, adapters, learner=learner, cache_bytes=cache_gib * GIB).peak_bytes
    assert computed == pytest.approx(measured[f"lora_peak_gib_{run}"], rel=0.05)
    # With one base instead of two, or without the cache, it would be another.
    for wrong in ({"engine": "packed"}, {"cache_bytes": 0.0}):
        other = memory(model, adapters, learner=learner, **{"cache_bytes": cache_gib * GIB} | wrong).peak_bytes
        assert other != pytest.approx(measured[f"lora_peak_gib_{run}"], rel=0.05)
    if (device := measured.get(f"lora_device_gib_{run}")) is not None:
        assert computed + EMBEDDED_PROCESS_BYTES == pytest.approx(device, rel=0.05)


def test_what_is_no_target_stays_in_16_bits(model):
    # 48 layers of 18.87e6 weights of attention, and 28.991e9 of experts, at 4.125 and at 16 bits.
    attention = 48 * 2 * (32 + 4) * 128 * 2048
    alone, both = (
        memory(model, learner=replace(BASE, targets=which)) for which in (("attention",), ("attention", "experts"))
    )
    assert alone.parts["base"] == pytest.approx(2 * 30.532e9 - attention * (2 - 4.125 / 8), rel=1e-3)
    assert both.parts["base"] == pytest.approx(2 * 30.532e9 - (attention + 28.991e9) * (2 - 4.125 / 8), rel=1e-3)
    # The backward unpacks experts where they are packed; where they are not, it keeps fc2's input as well.
    assert both.parts["working"] - alone.parts["working"] == 2 * 28_991_029_248 / 48 - 2 * 8192 * 8 * 768


def test_a_quantized_base_is_computed_as_it_is_stored(tmp_path, qarl):
    config = json.loads((MODEL / "config.json").read_text())
    config["quantization_config"] = quantization_config(get_format("nvfp4"), ignore=[])
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, printed = qarl("memory", tmp_path, "--lora", 32)
    assert code == 2
    assert "is stored as nvfp4, as which a frozen base is executed: add --format nvfp4" in " ".join(printed.split())
    code, printed = qarl("memory", tmp_path, "--lora", 32, "--format", "nvfp4")
    assert code == 0, printed


@pytest.mark.parametrize(
    ("stored", "asked"), [("w4a8", "w4a16"), ("int8", "fp8_channel"), ("fp8_channel", "int8"), ("w4a16", "nvfp4")]
)
def test_a_base_of_as_many_bits_is_none_of_another_format(stored, asked, tmp_path, qarl):
    config = json.loads((MODEL / "config.json").read_text())
    config["quantization_config"] = quantization_config(get_format(stored), ignore=[])
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, printed = qarl("memory", tmp_path, "--lora", 32, "--format", asked)
    assert code == 2
    assert f"is stored as {stored}, as which a frozen base is executed: add --format {stored}" in " ".join(
        printed.split()
    )


def test_codes_of_their_own_width_are_no_base(tmp_path, qarl):
    config = json.loads((MODEL / "config.json").read_text())
    config["quantization_config"] = quantization_config(get_format("w3a16", own_width=True), ignore=[])
    (tmp_path / "config.json").write_text(json.dumps(config))
    for options in ((), ("--format", "w3a16")):
        code, printed = qarl("memory", tmp_path, "--lora", 32, *options)
        assert code == 2
        assert "stored in their own 3 bits, and a run holds w3a16 in 4; make one with qarl quantize without" in (
            " ".join(printed.split())
        )


@pytest.mark.parametrize(("name", "num_bits"), [("w5a16", 5), ("w6a16", 6), ("w7a16", 7)])
def test_a_base_that_only_the_built_in_sampler_serves_is_computed_for_it(name, num_bits, tmp_path, qarl):
    config = json.loads((MODEL / "config.json").read_text())
    config["quantization_config"] = quantization_config(get_format(name, group_size=64), ignore=[])
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, printed = qarl("memory", tmp_path, "--lora", 32)
    assert code == 2
    assert f"add --format {name} --group-size 64" in " ".join(printed.split())
    code, printed = qarl("memory", tmp_path, "--lora", 32, "--format", name, "--group-size", 64, "--no-keep-operand")
    assert code == 0, printed
    rows = [line for line in printed.splitlines() if line.startswith(("│ packed", "│ vllm"))]
    assert ["not served" in line for line in rows] == [False, True]
    assert f"vLLM serves checkpoints, but takes no refits of {name}" in " ".join(printed.split())
    # 28.991e9 weights of experts with a BF16 scale for 64 of them, and 1.541e9 others in BF16.
    base = (28.991e9 * (num_bits + 0.25) / 8 + 1.541e9 * 2) / GIB
    assert float(rows[0].split("│")[2]) == pytest.approx(base, abs=0.1)


def test_formats_of_the_built_in_sampler_are_legal_with_adapters_alone(qarl):
    names = "w5a16, w6a16, w7a16"
    code, printed = qarl("memory", MODEL, "--lora", 32, "--format", "w9a16")
    assert code == 2
    assert names in " ".join(printed.split())
    code, printed = qarl("memory", MODEL, "--format", "w5a16")
    assert code == 2
    assert "vLLM serves no run in format 'w5a16'" in printed
    assert names not in " ".join(printed.split())


def test_a_base_that_no_run_executes_is_refused(tmp_path, qarl):
    config = json.loads((MODEL / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, printed = qarl("memory", tmp_path, "--lora", 32)
    assert code == 2
    assert "no run trains on it: nearest is" in " ".join(printed.split())


def test_a_base_with_weights_says_itself_which_layers_are_quantized(tmp_path, qarl):
    quantized_copies(save_sparse(tmp_path / "source"), tmp_path, ["w4a16"], ["experts", "attention"])
    code, printed = qarl("memory", tmp_path / "w4a16", "--lora", 8, "--group-size", 32)
    assert code == 2
    assert "add --format w4a16 --group-size 128 --targets experts,attention" in " ".join(printed.split())
    code, printed = qarl("memory", tmp_path / "w4a16", "--lora", 8, "--targets", "attention,experts")
    assert code == 0, printed


def test_engines_without_kernels_beside_adapters_fit_nowhere(qarl):
    code, printed = qarl("memory", MODEL, "--lora", 32, "--format", "w4a8")
    assert code == 0, printed
    rows = [line for line in printed.splitlines() if line.startswith(("│ packed", "│ vllm"))]
    assert ["not served" in line for line in rows] == [False, True]


def test_a_llama_is_a_base_too(tmp_path, qarl):
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, printed = qarl("memory", tmp_path, "--lora", 32, "--targets", "mlp,attention")
    assert code == 0, printed
    assert qarl("memory", tmp_path)[0] == 2


def test_the_command_says_what_fits(qarl):
    code, printed = qarl("memory", MODEL, "--lora", 32, "--gpu-gib", 79, "--cache-gib", 16, "--no-keep-operand")
    assert code == 0, printed
    assert printed.splitlines()[0].startswith(
        "Fits 79 GiB: rollouts by packed (the built-in sampler) with up to 145,408"
    )
    lines = [line for line in printed.splitlines() if line.startswith(("│ packed", "│ vllm"))]
    assert ["yes" in line for line in lines] == [True, True]
    assert "26.7 M parameters" in " ".join(printed.split())


def test_a_base_keeps_what_its_gemms_multiply_unless_the_command_says_otherwise(model, qarl):
    asked = ("memory", MODEL, "--lora", 32, "--gpu-gib", 79)
    kept, dropped = (" ".join(qarl(*asked, *more)[1].split()) for more in ((), ("--no-keep-operand",)))
    assert kept.startswith("Nothing fits 79 GiB. ")
    # 2 bytes of 28.991e9 weights, while the engine samples and no layer is unpacked.
    assert "Change: --no-keep-operand (saves 54.0 GiB), --cache-gib 5.8 or a larger GPU." in kept
    assert dropped.startswith("Fits 79 GiB: ")
    assert "base: with what GEMMs multiply, which runs keep by default; --no-keep-operand leaves it out." in kept
    assert "base: for runs with qarl.keep_operand=false" in dropped
    assert "--no-keep-operand" not in " ".join(qarl(*asked[:-1], 10, "--format", "bf16")[1].split())


def test_where_adapters_do_not_fit_the_changes_that_help_are_named(qarl):
    # Beside 2 GiB of the process, 17.2 GiB and the cache while the engine samples.
    asked = ("memory", MODEL, "--lora", 32, "--gpu-gib", 30, "--no-keep-operand")
    code, printed = qarl(*asked)
    assert code == 0, printed
    assert " ".join(printed.split()).startswith(
        "Nothing fits 30 GiB. The nearest, rollouts by packed (the built-in sampler), misses by 5.2 GiB with 8,192 "
        "tokens a micro-batch. Change: --cache-gib 10.8 or a larger GPU."
    )
    fitting = qarl(*asked, "--cache-gib", 10.8)[1]
    assert fitting.startswith("Fits 30 GiB: rollouts by packed")
    many = (*asked, "--cache-gib", 1, "--tokens", 65536)
    most = re.search(r"Change: --tokens (\d+) or", " ".join(qarl(*many)[1].split()))
    assert most
    assert qarl(*many[:-1], most[1])[1].startswith("Fits 30 GiB: ")


def test_where_neither_rollouts_nor_update_fit_two_changes_are_named_together(qarl):
    asked = ("memory", MODEL, "--lora", 32, "--no-keep-operand", "--gpu-gib", 22)
    said = " ".join(qarl(*asked)[1].split())
    assert "Change: --tokens 3072 together with --cache-gib 2.8 or a larger GPU." in said
    tokens, cache = ("--tokens", 3072), ("--cache-gib", 2.8)
    assert qarl(*asked, *tokens, *cache)[1].startswith("Fits 22 GiB: rollouts by packed")
    assert qarl(*asked, *tokens)[1].startswith("Nothing fits 22 GiB.")
    assert qarl(*asked, *cache)[1].startswith("Nothing fits 22 GiB.")
    # Not even the base and 1024 tokens.
    assert "Change: a larger GPU." in qarl(*asked[:-1], 18)[1]


def test_a_lower_rank_is_proposed_only_where_it_frees_enough(qarl):
    # While the engine samples, 10.8 GiB of adapters and 1.5 GiB of their copy, without 4.6 GiB of gradients.
    asked = ("memory", MODEL, "--no-keep-operand", "--lora-targets", "experts", "--cache-gib", 40)
    for gib, proposed in ((57, False), (60, True)):
        assert ("a lower --lora" in " ".join(qarl(*asked, "--lora", 16, "--gpu-gib", gib)[1].split())) is proposed
        assert qarl(*asked, "--lora", 1, "--gpu-gib", gib)[1].startswith("Fits ") is proposed
    # Without any adapters it would fit, with the lowest rank it does not.
    asked = ("memory", MODEL, "--no-keep-operand", "--lora-targets", "experts", "--cache-gib", 40, "--gpu-gib", 59)
    assert qarl(*asked, "--lora", 1)[1].startswith("Nothing fits ")
    assert "a lower --lora" not in " ".join(qarl(*asked, "--lora", 16)[1].split())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--lora", "24"], "lora=24 is a rank that no engine serves; legal: 1, 8, 16"),
        (["--lora", "16", "--lora-targets", "mlp"], "targets mlp: this model has experts, attention"),
        (["--lora", "16", "--all"], "--all: of a Megatron learner on several GPUs; leave it out with --lora"),
        (["--lora", "16", "--gpus", "8"], "--gpus: of a Megatron learner on several GPUs; leave it out with --lora"),
        (["--lora-targets", "mlp", "--cache-gib", "8"], "--lora-targets, --cache-gib: of adapters on a frozen base"),
        (["--lora", "16", "--logprob-chunk", "0"], "logprob_chunk=0 is not from 1 to"),
        (["--lora", "16", "--cache-gib", "0"], "cache_gib=0.0 must lie between 0 and"),
    ],
)
def test_what_is_not_legal_is_one_line_with_what_is(options, problem, qarl):
    code, printed = qarl("memory", MODEL, *options)
    assert code == 2
    assert problem in " ".join(printed.split())
