"""A share of the GPU that sends the optimizer away for a few answers, or holds few answers for nothing, gets a hint."""

from copy import deepcopy

import pytest
from test_layout import SHARE, WHOLE_NODES, launch, on_a_host_without_gpus  # noqa: F401 a fixture for every test
from test_nemo_rl_recipes import RECIPES, on_eight_gpus

from qarl_nemo.nemo_rl.checks import share_hints as share_hints_module
from qarl_nemo.nemo_rl.checks.hints import budget_hints
from qarl_nemo.nemo_rl.config import apply_qarl
from qarl_nemo.nemo_rl.residency import OFFLOAD

LONG = {"policy.logprob_batch_size": 1, "policy.max_total_sequence_length": 18432}
EIGHT_BITS = {"format": "fp8_block"}
TRITON = {"policy.generation.vllm_kwargs": {"moe_backend": "triton"}}


def share_hints(values) -> list[str]:
    return [line for line in budget_hints(values, apply_qarl(deepcopy(values))) if line.startswith(SHARE)]


def test_a_share_beside_which_the_optimizer_would_nearly_stay_names_the_one_with_which_it_does():
    (hint,) = share_hints(launch(**LONG))
    # 28.7 GiB of Muon's state, 8.2 of parameters, which stay with it, and 6 of the learner's process leave 0.45 of 79.
    # Beside 16.8 of weights and 5 of the engine's own that is a cache of 13.8, of which an answer takes 1.7.
    assert hint == (
        f"{SHARE}=0.6: 28.7 GiB of the optimizer go to the host and back in each step; with at most 0.45 they stay by "
        "computation, which leaves PyTorch's reserve out (the cache then holds 8 answer(s) of the largest length at "
        "once, now 15)"
    )
    values = launch(**LONG | {SHARE: 0.45})
    assert apply_qarl(deepcopy(values)).resident
    assert share_hints(values) == []


def test_no_share_is_named_with_which_the_optimizer_would_leave_all_the_same():
    # A refit beside it lacks a GiB, whatever the engine's share.
    assert "of the optimizer" not in str(share_hints(launch(EIGHT_BITS, **LONG | TRITON)))
    # The block says that it leaves.
    assert share_hints(launch({"resident": False}, **LONG)) == []
    # NeMo-RL's key says so, which the check overwrites with what it decided.
    assert share_hints(launch(**LONG | {OFFLOAD: True})) == []
    # Nothing has to leave beside engines with GPUs of their own.
    assert share_hints(launch(**LONG | WHOLE_NODES | {SHARE: 0.78})) == []


def test_an_optimizer_that_stays_is_no_reason_for_hardly_any_answers():
    chunks = {"policy.logprob_chunk_size": 1024, "policy.megatron_cfg.defer_fp32_logits": True}
    values = launch(**LONG | chunks)
    qarl = apply_qarl(deepcopy(values))
    for longest, said in ((32768, 1), (65536, 0)):
        values["policy"]["max_total_sequence_length"] = longest
        assert len([line for line in budget_hints(values, qarl) if "of the optimizer" in line]) == said


@pytest.mark.parametrize(("then", "said"), [(0, 0), (1, 1)])
def test_where_an_engine_gets_no_whole_answer_one_has_to_fit(monkeypatch, then, said):
    values = launch(**LONG)
    qarl = apply_qarl(deepcopy(values))
    monkeypatch.setattr(share_hints_module, "waiting_answers", lambda *_: (then, 0))
    assert len([line for line in budget_hints(values, qarl) if "of the optimizer" in line]) == said


def test_a_larger_share_keeps_the_optimizer_and_a_margin():
    resident = LONG | {SHARE: 0.3}
    (hint,) = share_hints(launch(**resident))
    # 0.8 of the 0.45 beside optimizer and parameters.
    assert hint.startswith(f"{SHARE}=0.3: an engine's cache holds 1 answer(s) of the largest length at once, of the 64")
    assert "with 0.36 it holds 3 by computation. Go half of the way first" in hint
    assert share_hints(launch(**resident | {SHARE: 0.36})) == []
    # 0.8 of the 0.81 beside the learner's process and parameters.
    (hint,) = share_hints(launch(EIGHT_BITS, **LONG | TRITON | {SHARE: 0.5}))
    assert "holds 2 answer(s)" in hint
    assert "with 0.65 it holds 9" in hint


def test_a_cache_of_ones_own_size_does_not_follow_from_the_share():
    values = launch(**LONG)
    values["policy"]["generation"]["vllm_kwargs"]["kv_cache_memory_bytes"] = 2**33
    assert share_hints(values) == []


@pytest.mark.parametrize("path", [path for path in RECIPES if "30ba3b-1n8g" in path.stem], ids=lambda path: path.stem)
def test_recipes_have_the_share_that_their_hints_would_name_or_say_why_not(path):
    hints = share_hints(on_eight_gpus(path))
    assert all("with at most 0.45 they stay" in hint for hint in hints)
    assert len(hints) == any(bits in path.stem for bits in ("w4a16", "w4a8", "nvfp4", "w3a16"))
    assert "0.45" in path.with_name("qarl-qwen3-30ba3b-1n8g-megatron-w4a16.yaml").read_text()
