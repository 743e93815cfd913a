"""In which order what fits is named, and what counts as fitting."""

from pathlib import Path

import pytest

from qarl_nemo.memory import GIB, EngineRanks, Learner, ModelSize, Parallelism, rank_memory, refit_bytes
from qarl_nemo.memory.candidates import adapted_candidates, candidates
from qarl_nemo.memory.lora import Adapters

MODEL = ModelSize.read(Path(__file__).parents[2] / "examples" / "models" / "qwen3-30b-a3b")
EP8, TP2 = Parallelism(8, ep=8), Parallelism(8, tp=2, ep=8)


def names(found) -> list[tuple[str, str, str]]:
    return [(one.ranks.name, one.learner.optimizer, one.learner.recompute) for one in found]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ((TP2, Learner(recompute="full")), (EP8, Learner(optimizer="offloaded"))),
        ((TP2, Learner(optimizer="adam_bf16")), (EP8, Learner(recompute="full"))),
        ((EP8, Learner(optimizer="muon")), (TP2, Learner())),
        ((EP8, Learner()), (EP8, Learner(optimizer="adam_bf16"))),
        ((EP8, Learner(optimizer="adam_bf16")), (EP8, Learner(optimizer="muon"))),
        ((Parallelism(8, ep=4), Learner()), (EP8, Learner())),
        # 303,104 tokens before 301,056.
        ((Parallelism(8, tp=2, ep=4), Learner()), (Parallelism(8, cp=2, ep=4), Learner())),
    ],
)
def test_what_fits_comes_in_the_order_that_is_said(better, worse):
    layouts, learners = zip(worse, better, strict=True)
    found = candidates(MODEL, dict.fromkeys(layouts), dict.fromkeys(learners), 1000 * GIB)
    assert all(one.fits for one in found)
    places = [(one.ranks, one.learner) for one in found]
    assert places.index(better) < places.index(worse)


def test_what_does_not_fit_comes_last_and_the_nearest_first():
    learners = [Learner(recompute=kind, optimizer=name) for kind in ("none", "full") for name in ("adam", "muon")]
    found = candidates(MODEL, [EP8], learners, 73 * GIB)
    assert names(found) == [
        *(("ep8", "muon", "full"), ("ep8", "adam", "full"), ("ep8", "muon", "none"), ("ep8", "adam", "none"))
    ]
    assert [one.fits for one in found] == [True, False, False, False]
    nearest = found[1]
    assert nearest.missing_bytes == rank_memory(MODEL, EP8, nearest.learner).peak_bytes - 73 * GIB


def test_a_refit_has_to_fit_layer_by_layer():
    learner = Learner("bf16", optimizer="offloaded", recompute="full")
    for room, fits in ((71 * GIB, False), (75 * GIB, True)):
        (one,) = candidates(MODEL, [EP8], [learner], room, EngineRanks())
        assert one.memory.peak_bytes < room
        assert (one.fits, one.tokens is not None) == (fits, fits)
        assert one.refits == tuple(refit_bytes(MODEL, EP8, learner, 1, layerwise=layerwise) for layerwise in (0, 1))
        assert one.refits[0] > room
        assert candidates(MODEL, [EP8], [learner], room)[0].fits


def test_a_micro_batch_that_fits_counts_though_it_is_no_multiple_of_1024():
    learner = Learner(tokens=12800, optimizer="adam_bf16", recompute="full")
    (one,) = candidates(MODEL, [EP8], [learner], rank_memory(MODEL, EP8, learner).peak_bytes)
    assert one.fits
    assert one.tokens == 12800
    (less,) = candidates(MODEL, [EP8], [learner], rank_memory(MODEL, EP8, learner).peak_bytes - 1)
    assert not less.fits
    assert less.tokens == 12288


def test_a_cache_that_does_not_fit_leaves_the_updates_budget():
    base = Learner(recompute="full", logits=False, logprob_chunk=1024)
    for cache_gib, fits in ((2.8, True), (16, False)):
        packed, vllm = adapted_candidates(
            MODEL, base, Adapters(32, ("attention",)), 20 * GIB, cache_gib * GIB, vllm_serves=True
        )
        assert (packed.tokens, packed.update_tokens) == (3072 if fits else None, 3072)
        # vLLM's cache stays, and counts in its update as well.
        assert (vllm.tokens, vllm.update_tokens) == (None, None)


def test_an_engine_that_does_not_serve_the_base_has_no_budget():
    base = Learner(recompute="full", logits=False, logprob_chunk=1024)
    for serves in (True, False):
        found = adapted_candidates(MODEL, base, Adapters(32, ("attention",)), 77 * GIB, 16 * GIB, vllm_serves=serves)
        assert [(one.engine, one.fits, one.tokens is not None) for one in found] == [
            *(("packed", True, True), ("vllm", serves, serves))
        ]
