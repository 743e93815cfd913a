"""What one GPU of `qarl train` with adapters on a frozen base is computed to hold."""

from pathlib import Path

import pytest

from qarl_nemo.memory import Learner, ModelSize
from qarl_nemo.memory.lora import Adapters, adapted_memory

MODEL = Path(__file__).parents[2] / "examples" / "models" / "qwen3-30b-a3b"
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
    assert held["engine"] == pytest.approx(base + 5 * 2**30 + 2 * ATTENTION.num_parameters(model), rel=1e-3)
    assert memory(model, engine="packed").parts["engine"] == 2 * ATTENTION.num_parameters(model)
    # BF16 weight and gradient; FP32 master, its gradient and two moments.
    assert held["adapters"] == 20 * ATTENTION.num_parameters(model)


def test_the_built_in_samplers_cache_makes_way_for_the_update(model):
    for engine, keeps in (("packed", 0.0), ("vllm", 1.0)):
        without, cached = (memory(model, engine=engine, cache_bytes=size) for size in (0.0, 1e9))
        assert cached.update_bytes - without.update_bytes == keeps * 1e9
        assert cached.rollout_bytes - without.rollout_bytes == 1e9
        assert cached.peak_bytes == max(cached.update_bytes, cached.rollout_bytes)


def test_attention_fits_80_gb_and_experts_141(model):
    for adapters, gib in ((ATTENTION, 79), (EXPERTS, 139)):
        assert memory(model, adapters).peak_bytes + 6 * 2**30 < gib * 2**30
    bf16 = Learner("bf16", recompute="full", logits=False, logprob_chunk=1024)
    assert memory(model, learner=bf16).peak_bytes > 79 * 2**30


def test_the_command_says_what_fits(qarl):
    code, printed = qarl("memory", MODEL, "--lora", 32, "--gpu-gib", 79, "--cache-gib", 16)
    assert code == 0, printed
    lines = [line for line in printed.splitlines() if "packed" in line or "vllm" in line]
    assert ["yes" in line for line in lines] == [True, True]
    assert "26.7 M parameters" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--lora", "24"], "lora=24 is a rank that no engine serves; legal: 1, 8, 16"),
        (["--lora", "16", "--lora-targets", "mlp"], "targets mlp: this model has experts, attention"),
        (["--lora", "16", "--gpus", "8"], "--gpus: of a Megatron learner on several GPUs; leave it out with --lora"),
        (["--lora", "16", "--cache-gib", "0"], "cache_gib=0.0 must lie between 0 and"),
    ],
)
def test_what_is_not_legal_is_one_line_with_what_is(options, problem, qarl):
    code, printed = qarl("memory", MODEL, *options)
    assert code == 2
    assert problem in " ".join(printed.split())
