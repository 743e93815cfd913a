"""What a Megatron learner's rank is computed to hold; `tools/bench/megatron_step.py` holds the sum against a GPU."""

import contextlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from qarl_kernels import FORMAT_NAMES, get_format, stored_layout
from qarl_nemo.architecture import read_architecture
from qarl_nemo.files import FileError
from qarl_nemo.memory import (
    OVERHEAD_BYTES,
    Learner,
    ModelSize,
    Parallelism,
    engine_bytes,
    largest_budget,
    layouts,
    logprob_bytes,
    rank_memory,
    refit_bytes,
    served_bytes,
)
from qarl_nemo.parallelism import divisors

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "models" / "qwen3-30b-a3b"


@pytest.fixture(scope="module")
def model() -> ModelSize:
    return ModelSize.read(MODEL)


def without_cache(**options) -> Learner:
    return Learner(format=None, **options)


def test_the_model_has_as_many_parameters_as_its_card_says(model):
    assert model.num_parameters == 30_532_122_624
    assert ModelSize.read(MODEL / "config.json") == model
    # Keys and values of 4 heads of 128 in 48 layers, BF16.
    assert model.cache_bytes == 2 * 2 * 48 * 4 * 128
    assert replace(model, tied_head=True).num_parameters == model.num_parameters - 151_936 * 2048


# BF16 weights, FP32 gradients and 12 bytes of Adam for each parameter, by hand: experts 28,991,029,248, others
# 1,541,093,376 on every rank, their optimizer shared by all.
@pytest.mark.parametrize(
    ("ranks", "expected_gb"),
    [
        (Parallelism(4, ep=4), 6 * (28.991 / 4 + 1.541) + 12 * (28.991 / 4 + 1.541 / 4)),
        (Parallelism(8, ep=8), 6 * (28.991 / 8 + 1.541) + 12 * (28.991 / 8 + 1.541 / 8)),
        (Parallelism(8, ep=4), 6 * (28.991 / 4 + 1.541) + 12 * (28.991 / 8 + 1.541 / 8)),
        (Parallelism(1), 18 * 30.532),
    ],
)
def test_weights_gradients_and_optimizer_are_shared_as_megatron_shares_them(model, ranks, expected_gb):
    assert rank_memory(model, ranks, without_cache()).static_bytes / 1e9 == pytest.approx(expected_gb, rel=1e-3)


def test_tensor_and_pipeline_ranks_hold_parts(model):
    one = rank_memory(model, Parallelism(8, ep=8), without_cache()).parts
    split = rank_memory(model, Parallelism(8, tp=2, ep=8), without_cache()).parts
    staged = rank_memory(model, Parallelism(8, pp=2, ep=4), without_cache()).parts
    small = 2 * model.num_layers * model.small_parameters
    experts = 2 * model.num_layers * model.expert_parameters / 8
    assert split["weights"] == pytest.approx(experts + (one["weights"] - experts - small) / 2 + small, rel=1e-4)
    # Half of the layers, twice as many of their experts, and one of the two tables.
    assert experts < staged["weights"] < one["weights"]
    assert staged["activations"] == pytest.approx(one["activations"], rel=1e-6)
    assert split["activations"] == pytest.approx(one["activations"] / 2, rel=0.01)


def test_a_pipelines_first_stage_has_half_of_the_layers_and_the_embedding_alone():
    dense = ModelSize(num_layers=4, hidden=256, num_heads=8, num_kv_heads=4, head_dim=32, vocab_size=512, inner=512)
    matrices, norms = 2 * (8 + 4) * 32 * 256 + 3 * 512 * 256, 2 * 256 + 2 * 32
    # And the final norm, though the last stage has it.
    expected = 2 * (2 * (matrices + norms) + 512 * 256 + 256)
    assert rank_memory(dense, Parallelism(2, pp=2), without_cache()).parts["weights"] == expected


SPARSE = ModelSize(2, 256, 4, 2, 64, 512, 128, num_experts=4, top_k=2)


@pytest.mark.parametrize(("etp", "projections"), [(1, 2), (2, 2), (1, 3)])
def test_a_layer_keeps_what_its_backward_reads(etp, projections):
    learner = Learner(format="w4a16" if projections == 2 else None, tokens=1024)
    # Inputs and outputs of two norms, 256 queries and 128 keys before and after rotation, values, attention's output.
    attention = 2 * 1024 * (4 * 256 + 2 * (256 + 128) + 128 + 256)
    # FP32 logits and probabilities of four experts; two rows a token, times the ranks that share an expert's width.
    experts = 1024 * 4 * 2 * 4 + 2 * 1024 * 2 * etp * (256 + projections * 128 / etp)
    held = rank_memory(SPARSE, Parallelism(etp, etp=etp), learner).parts["activations"]
    assert held == 2 * (attention + experts)
    dense = rank_memory(replace(SPARSE, num_experts=0, top_k=0), Parallelism(1), learner).parts["activations"]
    assert dense == 2 * (attention + 2 * 1024 * 3 * 128)


def test_soaps_square_matrices_are_shared_as_the_optimizer_shares_theirs():
    plain, soap = (
        rank_memory(SPARSE, Parallelism(4, ep=2), Learner(kronecker=kind)).parts["optimizer"] for kind in (False, True)
    )
    # fc1 [256, 256] and fc2 [256, 128]; qkv [512, 256], its output's [256, 256] and the router's [4, 256].
    expert = 256**2 + 256**2 + 256**2 + 128**2
    others = 512**2 + 256**2 + 256**2 + 256**2 + 4**2 + 256**2
    # A factor and its eigenvectors in FP32. Two ranks share a rank's two experts, all four the others.
    assert soap - plain == 2 * 4 * 2 * (2 * expert / 2 + others / 4)


def test_ranks_share_what_lies_between_attention_and_mlp_if_sequences_are_parallel():
    dense = ModelSize(num_layers=4, hidden=256, num_heads=8, num_kv_heads=4, head_dim=32, vocab_size=512, inner=512)

    def activations(tp: int, **options) -> float:
        return rank_memory(dense, Parallelism(tp, tp=tp), Learner(tokens=8192, **options)).parts["activations"]

    # One rank's inputs and outputs of two norms, and what a norm of which an aligned linear reads has of other ranks.
    rows, one = 4 * 2 * 8192 * 256, activations(1, format=None)
    assert activations(2, format=None) == one / 2
    assert activations(2, format=None, sequence_parallel=False) == one / 2 + 4 * rows / 2
    for targets in (("attention",), ("mlp",), ("attention", "mlp")):
        assert activations(1, targets=targets) == one
        assert activations(2, targets=targets) == one / 2 + len(targets) * rows / 2
        assert activations(2, targets=targets, sequence_parallel=False) == one / 2 + 4 * rows / 2
    assert activations(2, targets=("mlp",), recompute="full") == 4 * 2 * 8192 / 2 * 256
    assert activations(2, targets=("mlp",), recompute="full", sequence_parallel=False) == 4 * 2 * 8192 * 256


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_packed_cache_is_as_large_as_what_is_stored(model, name):
    fmt = get_format(name)
    shapes = [(model.num_experts, 2 * model.inner, model.hidden), (model.num_experts, model.hidden, model.inner)]
    stored = sum(
        math.prod(shape) * dtype.itemsize for whole in shapes for shape, dtype in stored_layout(whole, fmt).values()
    )
    packed = rank_memory(model, Parallelism(4, ep=4), Learner(format=name)).parts["packed"]
    assert packed == pytest.approx(stored * model.num_layers / 4, rel=0.005)


def test_full_recompute_keeps_one_layer(model):
    kept, recomputed = (
        rank_memory(model, Parallelism(4, ep=4), Learner(recompute=kind)).parts for kind in ("none", "full")
    )
    assert recomputed["activations"] == 48 * 8192 * model.hidden * 2
    # The layer that is computed again exists beside its backward's working memory, but not beside the logits.
    assert recomputed["working"] - kept["working"] == pytest.approx(kept["activations"] / 48, rel=1e-6)


def test_what_is_offloaded_or_smaller_is_not_counted(model):
    ranks = Parallelism(4, ep=4)
    sizes = {name: rank_memory(model, ranks, Learner(optimizer=name)).parts["optimizer"] for name in ("adam", "muon")}
    # Experts' and attention's matrices have a momentum each; embedding, head, norms and routers are stepped by Adam.
    momentum = 4 * (48 * (128 * 3 * 768 + 2 * (4096 + 512)) * 2048 / 4)
    assert sizes["adam"] - sizes["muon"] == pytest.approx(momentum, rel=1e-6)
    assert rank_memory(model, ranks, Learner(optimizer="offloaded")).parts["optimizer"] == 0
    assert rank_memory(model, ranks, Learner(logits=False)).parts["logits"] == 0


@pytest.mark.parametrize("arm", ["w4a16", "bf16", "w4a8", "fp8_channel", "fp8_block"])
def test_muons_step_holds_what_was_measured(model, arm):
    """The recipes on a sixth of the layers and two GPUs, whose step holds FP32 copies of BF16 gradients."""
    rows = {row["name"]: row["value"] for row in json.loads((ROOT / "docs" / "results" / "full_size.json").read_text())}
    measured = rows[f"full_memory_allocated_gib_update_{arm}_2gpu"] * 2**30
    learner = Learner(
        format=arm, targets=("experts", "attention"), optimizer="muon", gradient_bytes=2, optimizer_whole=True,
        tokens=19456, recompute="full", logprob_chunk=1024,
    )  # fmt: skip
    held = rank_memory(replace(model, num_layers=8), Parallelism(2, tp=2, ep=2), learner)
    assert held.peak_bytes == pytest.approx(measured, rel=0.01)
    # Packed weights, which are gone by then, would be too much, the backward alone too little.
    assert held.static_bytes + held.step > 1.02 * measured
    assert held.static_bytes + held.parts["activations"] + held.parts["working"] < 0.97 * measured
    wide = rank_memory(replace(model, num_layers=8), Parallelism(2, tp=2, ep=2), replace(learner, gradient_bytes=4))
    assert wide.step == 0
    # They are twice as large, so that they help only where a backward needs little beside them.
    assert not held.fp32_gradients_help
    assert wide.peak_bytes > held.peak_bytes
    short = replace(learner, tokens=1024)
    less, lesser = (
        rank_memory(replace(model, num_layers=8), Parallelism(2, tp=2, ep=2), replace(short, gradient_bytes=size))
        for size in (2, 4)
    )
    # BF16's stacked copies, which are gone during a step, are as large as the gradients.
    assert less.fp32_gradients_help == (lesser.peak_bytes < less.peak_bytes) == (arm != "bf16")


def test_adam_copies_gradients_unless_it_is_precision_aware(model):
    ranks, learner = Parallelism(8, ep=8), Learner(optimizer="adam", gradient_bytes=2)
    assert rank_memory(model, ranks, learner).step == 0
    copied = rank_memory(model, ranks, replace(learner, precision_aware=False)).step
    assert copied == pytest.approx(4 * (28.991e9 / 8 + 1.541e9 / 8 + 0.311e9 / 8), rel=1e-3)


def test_logits_in_chunks_keep_their_bf16(model):
    ranks = Parallelism(4, tp=2, ep=4)
    whole, half, all_at_once, more = (
        rank_memory(model, ranks, Learner(tokens=8192, logprob_chunk=chunk)).parts["logits"]
        for chunk in (None, 4096, 8192, 16384)
    )
    entry = 8192 * model.vocab_size / 2
    assert whole == 10 * entry
    assert half == 4 * entry + 28 * entry / 2
    # A chunk as large as the micro-batch costs more than none.
    assert all_at_once == more == 4 * entry + 28 * entry
    with pytest.raises(ValueError, match="logprob_chunk=0 is not from 1 to"):
        Learner(logprob_chunk=0)


def test_the_largest_budget_fits_and_the_next_does_not(model):
    learner = Learner(optimizer="adam_bf16", gradient_bytes=2, recompute="full", logprob_chunk=1024)

    def peak(tokens):
        return rank_memory(model, Parallelism(4, ep=4), replace(learner, tokens=tokens)).peak_bytes

    most = largest_budget(peak, 120 * 2**30)
    assert peak(most) <= 120 * 2**30 < peak(most + 1024)
    assert largest_budget(peak, 40 * 2**30) is None
    assert largest_budget(float, 4096) == 4096


def test_log_probabilities_hold_no_gradients(model):
    ranks, learner = Parallelism(4, ep=4), Learner(tokens=8192, logprob_chunk=1024, optimizer="adam_bf16")
    held = rank_memory(model, ranks, learner).parts
    there, gone = (logprob_bytes(model, ranks, learner, optimizer=kind) for kind in (True, False))
    assert there - gone == held["optimizer"]
    # BF16 logits of all tokens; of a chunk, three copies in FP32.
    logits = (2 * 8192 + 12 * 1024) * model.vocab_size
    assert gone == pytest.approx(held["weights"] + held["packed"] + logits)


def test_layouts_put_every_expert_somewhere(model):
    found = layouts(model, 8)
    assert Parallelism(8, ep=8) in found
    assert all(model.num_experts % ranks.ep == 0 and ranks.num_gpus == 8 for ranks in found)
    assert [ranks.name for ranks in layouts(ModelSize(28, 1024, 16, 8, 128, 1000, 3072), 2)] == ["dp", "tp2"]


def test_layouts_have_names():
    assert Parallelism.parse("tp2_ep2_etp2", 4) == Parallelism(4, tp=2, ep=2, etp=2)
    assert Parallelism.parse("dp", 4).name == "dp"
    assert Parallelism.parse("tp2_pp2_cp2_ep4", 16).name == "tp2_pp2_cp2_ep4"


def test_stages_and_shards_are_those_of_the_fullest_rank():
    # 11 layers of which the first stage has 1 and the last 2 leave 8 to two stages.
    assert Parallelism(4, pp=4, end_layers=(1, 2)).stage_layers(11) == 4
    assert Parallelism(4, pp=4, end_layers=(1, 6)).stage_layers(11) == 6
    assert Parallelism(4, pp=4).stage_layers(11) == 3
    shards = Parallelism(16, tp=2, cp=2, ep=2, etp=2, pp=2)
    assert (shards.optimizer_shards, shards.expert_optimizer_shards) == (4, 2)
    assert divisors(36, 144) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Parallelism(8, tp=3, ep=5), r"tp \* pp \* cp=3 .*; ep \* etp \* pp=5"),
        (lambda: Parallelism.parse("tp2-ep8", 8), "layout 'tp2-ep8': legal are tp, pp, cp, ep and etp"),
        (lambda: Learner(optimizer="adamw"), "unknown optimizer 'adamw'; legal: adam, "),
        (lambda: Learner(format="nf4"), "unknown format 'nf4'; legal: w4a16, "),
    ],
)
def test_what_cannot_be_is_an_error(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()


def config_of(tmp_path, **changes):
    """The model's config.json with other entries; None leaves one out."""
    config = json.loads((MODEL / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "deepseek_v3"}, 'model_type is "deepseek_v3"; supported: qwen3_moe, qwen3, qwen2$'),
        ({"model_type": "llama"}, 'model_type is "llama"; supported: qwen3_moe, qwen3, qwen2$'),
        ({"model_type": None}, "model_type is null; supported: "),
        ({"hidden_size": None, "moe_intermediate_size": None}, "lacks hidden_size, moe_intermediate_size"),
        ({"hidden_size": 10**12}, "hidden_size=1000000000000 is not a whole number from 1 to "),
        ({"mlp_only_layers": [3, 4]}, "2 of 48 layers have no experts .* memory is computed for layers that are alike"),
    ],
)
def test_a_config_of_another_model_is_refused(changes, problem, tmp_path):
    with pytest.raises(FileError, match=problem):
        ModelSize.read(config_of(tmp_path, **changes))


def test_both_spellings_of_the_number_of_experts_are_read(model, tmp_path):
    assert ModelSize.read(config_of(tmp_path, num_experts=None, num_local_experts=128)) == model


def test_sizes_are_those_of_the_table_of_architectures(model):
    counted = sum(math.prod(shape) for _, shape in read_architecture(MODEL).parameters())
    assert model.num_parameters == counted


def test_a_dense_learner_keeps_its_mlp_packed():
    dense = ModelSize(2, 1024, 16, 8, 64, 1000, 3072)
    # Two layers of three matrices of 3072 x 1024, an E4M3 byte each, on two tensor parallel ranks.
    packed = rank_memory(dense, Parallelism(2, tp=2), Learner(format="fp8_channel")).parts["packed"]
    assert packed == 2 * 3 * 3072 * 1024 / 2


def test_a_dense_backward_holds_the_mlps_gradients_or_the_weight_that_ran():
    dense, tokens = ModelSize(2, 1024, 16, 8, 64, 1000, 3072), 4096

    def working(tokens, **options):
        return rank_memory(dense, Parallelism(1), Learner(tokens=tokens, logits=False, **options)).parts["working"]

    # Gradients of the layer's output, input and residuals, and of SwiGLU's output and input.
    expected = 2 * tokens * (4 * 1024 + 3 * 3072)
    assert working(tokens, format=None) == working(tokens, format="w4a16", targets=("mlp",)) == expected
    # Few tokens: fc1 unpacked, its gradient, and the gradient of its output.
    fc1 = 2 * 2 * 3072 * 1024
    assert working(1024, format="w4a16", targets=("mlp",)) == 2 * 1024 * (4 * 1024 + 2 * 3072) + 2 * fc1
    # FP8's operand is what is stored: kept or not, the backward unpacks it.
    assert working(1024, format="fp8_channel", targets=("mlp",), keep_operand=True) == working(
        1024, format="fp8_channel", targets=("mlp",)
    )
    kept = working(1024, format="w4a16", targets=("mlp",), keep_operand=True)
    assert kept == max(2 * 1024 * (4 * 1024 + 3 * 3072), 2 * 1024 * (4 * 1024 + 2 * 3072) + fc1)


def test_group_sizes_are_those_of_the_formats():
    for name in FORMAT_NAMES:
        legal = get_format(name).group_sizes
        for size in (16, 32, 64, 128, 256):
            with (
                contextlib.nullcontext()
                if size in legal or not legal
                else pytest.raises(ValueError, match="group_size")
            ):
                Learner(name, size)


FITTING = re.compile(r"\| (\d) x (\d+) GB \| `(\w+)` \| `(\w+)` \| (\w+) \| ([\d.]+) \| (yes|no) \|")


def test_the_guide_says_what_is_computed(model):
    rows = FITTING.findall((ROOT / "docs" / "evidence" / "megatron_cost.md").read_text())
    assert len(rows) >= 16
    for gpus, size, layout, optimizer, recompute, peak, fits in rows:
        gpu_gib = {"80": 79, "141": 139}[size]
        learner = Learner(optimizer=optimizer, recompute=recompute)
        needed = rank_memory(model, Parallelism.parse(layout, int(gpus)), learner)
        fitting = needed.peak_bytes + OVERHEAD_BYTES <= gpu_gib * 2**30
        assert (f"{needed.peak_bytes / 2**30:.0f}", "yes" if fitting else "no") == (peak, fits)


# By hand: 28,991,029,248 parameters of experts, 1,541,093,376 others in BF16; on EP8 an eighth of the experts.
@pytest.mark.parametrize(("name", "bits", "engine_tp"), [("w4a16", 4.125, 1), ("fp8_channel", 8, 2), ("bf16", 16, 4)])
def test_a_refit_holds_learner_engine_and_update(model, name, bits, engine_tp):
    ranks, learner = Parallelism(8, ep=8), Learner(format=name)
    experts, others = 28.991029248, 2 * 1.541093376
    served = experts * bits / 8 + others
    held = experts / 8 * (2 + bits / 8) + others + served / engine_tp
    whole = refit_bytes(model, ranks, learner, engine_tp, layerwise=False)
    assert whole / 1e9 == pytest.approx(held + served, rel=1e-4)
    by_layers = refit_bytes(model, ranks, learner, engine_tp, layerwise=True)
    assert by_layers / 1e9 == pytest.approx(held + max(served / 48, 2 * 151936 * 2048 / 1e9), rel=1e-4)


def test_experts_that_are_not_quantized_are_shared_by_more_gpus_in_bf16(model):
    served = Learner(targets=("attention",))
    experts, others = 2 * 28.991029248, 2 * (1.541093376 - 0.905969664) + 0.905969664 * 4.125 / 8
    assert engine_bytes(model, served, 1, ep=8) / 1e9 == pytest.approx(experts / 8 + others, rel=1e-4)


def test_nested_codes_take_their_eight_bits_in_the_learner_and_on_the_way():
    model = ModelSize(2, 256, 4, 4, 64, 512, 256, num_experts=4, top_k=2)
    plain, nested = (Learner("w4a16", nested_in=finer) for finer in (None, "w8a16"))
    experts = model.num_layers * model.expert_parameters
    held = [rank_memory(model, Parallelism(1), one).parts["packed"] for one in (plain, nested)]
    assert held[1] - held[0] == experts * 4 / 8
    assert served_bytes(model, nested) == served_bytes(model, plain)
    assert served_bytes(model, nested, published=True) - served_bytes(model, plain) == experts * 4 / 8
    refits = [refit_bytes(model, Parallelism(1), one, 1, layerwise=False) for one in (plain, nested)]
    assert refits[1] - refits[0] == experts * 2 * 4 / 8
    with pytest.raises(ValueError, match="takes no nested_in=w8a16"):
        rank_memory(model, Parallelism(1), Learner("int8", nested_in="w8a16"))
