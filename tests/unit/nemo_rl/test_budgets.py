"""Token budgets and shares of a GPU that do not fit are refused with what does; wasteful ones get a hint."""

import json
import re

import pytest
from test_layout import SHARE, WHOLE_NODES, launch, on_a_host_without_gpus  # noqa: F401 a fixture for every test
from test_nemo_rl_config import problems

from qarl_nemo.nemo_rl.block import NemoQarlConfig
from qarl_nemo.nemo_rl.budgets import token_budgets
from qarl_nemo.nemo_rl.checks import hints
from qarl_nemo.nemo_rl.checks.hints import budget_hints
from qarl_nemo.nemo_rl.config import apply_qarl
from qarl_nemo.nemo_rl.layout_memory import needed_memory


def packed(train: int, logprob: int) -> dict:
    return {"policy.sequence_packing": {"enabled": True, "train_mb_tokens": train, "logprob_mb_tokens": logprob}}


def token_hints(values) -> list[str]:
    return [line for line in budget_hints(values, apply_qarl(values)) if not line.startswith(SHARE)]


def test_a_micro_batch_that_does_not_fit_is_refused_with_the_largest_that_does():
    keys = ("train_mb_tokens", "logprob_mb_tokens")
    lines = problems(launch(**packed(*[2**20] * 2)))
    assert [line.split("=")[0] for line in lines] == [f"memory: policy.sequence_packing.{key}" for key in keys]
    largest = [int(line.partition("at most ")[2].split(",")[0]) for line in lines]
    assert all(tokens % 1024 == 0 for tokens in largest)
    # A token of log-probabilities has no gradient.
    assert largest[1] > largest[0]
    assert token_hints(launch(**packed(*largest))) == []
    assert len(problems(launch(**packed(*[tokens + 1024 for tokens in largest])))) == 2


def test_no_budget_is_too_large_to_be_refused():
    for beyond in (2**24 + 1, 10**9):
        lines = problems(launch(**packed(beyond, beyond)))
        assert [line.partition(":")[2].partition(":")[0] for line in lines] == [
            f" policy.sequence_packing.{key}={beyond}" for key in ("train_mb_tokens", "logprob_mb_tokens")
        ]
        assert all("set at most " in line for line in lines)
    # Of responses there are never more than a rank has, of which they are a part.
    apply_qarl(launch(**{"policy.logprob_batch_size": 128, "policy.max_total_sequence_length": 256}))


@pytest.mark.parametrize("said", ["false", 0, "auto", []])
def test_whether_the_optimizer_leaves_is_true_or_false(said):
    (line,) = problems(launch(**{"policy.offload_optimizer_for_refit": said}))
    assert line == f"policy.offload_optimizer_for_refit={said}: not true or false; set one, or remove it"


def test_an_optimizer_without_an_engine_beside_it_stays_during_log_probabilities():
    def logprobs(**changes):
        values = launch(**packed(8192, 8192), **changes)
        found = token_budgets(values, qarl := apply_qarl(values), optimizer_stays=qarl.resident)
        return next(budget for budget in found if not budget.trains)

    # Nothing sends it to the host but the key that does so for this phase.
    apart, sent = logprobs(**WHOLE_NODES), logprobs(**WHOLE_NODES, **{"policy.offload_optimizer_for_logprob": True})
    values = launch(**WHOLE_NODES)
    needed = needed_memory(values, apply_qarl(values), optimizer_stays=True)
    assert apart.needed - sent.needed == needed.learner.parts["optimizer"] > 0


def test_a_budget_beyond_what_a_rank_has_is_what_it_has():
    # 128 responses of an optimizer step and 512 of a rollout batch, on four data-parallel ranks.
    values = launch(**packed(2**20, 2**20), **{"policy.max_total_sequence_length": 512})
    assert [problem.partition("=")[0] for problem in problems(values)] == [
        "memory: policy.sequence_packing.logprob_mb_tokens"
    ]
    values = launch(**packed(2**20, 32768), **{"policy.max_total_sequence_length": 512})
    qarl = apply_qarl(values)
    assert token_hints(values) == []
    # What is said of the run is what it can hold.
    (budget, _), needed = (
        token_budgets(values, qarl, optimizer_stays=False),
        needed_memory(values, qarl, optimizer_stays=False),
    )
    assert needed.learner.peak_bytes == budget.needed


def test_an_engine_has_room_for_a_response_at_least():
    small = {SHARE: 0.2, "policy.logprob_batch_size": 1, "policy.max_total_sequence_length": 8192}
    (line,) = problems(launch(**small))
    # 16.8 GiB of weights, 5 of the engine's own, and 0.75 of the cache are 22.5 of 79.
    assert line.startswith(f"{SHARE}=0.2: an engine's weights are 17 GiB a GPU, where it has 79")
    assert "set at least 0.29, or" in line
    apply_qarl(launch(**small | {SHARE: 0.29}))


def test_small_micro_batches_are_a_hint():
    train, logprob = token_hints(launch(**packed(4096, 4096)))
    assert train.startswith("policy.sequence_packing.train_mb_tokens=4096: small micro-batches")
    assert logprob.startswith("policy.sequence_packing.logprob_mb_tokens=4096: small micro-batches")
    assert "policy.logprob_chunk_size=1024" in train


LONGEST = "policy.max_total_sequence_length"
DYNAMIC = {"enabled": True, "train_mb_tokens": 9024, "logprob_mb_tokens": 9000, "sequence_length_round": 64}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {LONGEST: 9001, "policy.make_sequence_length_divisible_by": 8, **packed(9001, 9008)},
            f"policy.sequence_packing.train_mb_tokens=9001: a response of {LONGEST}=9001 does not fit, once it is "
            "padded to a multiple of 8; set at least 9008",
        ),
        (
            {LONGEST: 9000, "policy.sequence_packing.enabled": False, "policy.dynamic_batching": DYNAMIC},
            f"policy.dynamic_batching.logprob_mb_tokens=9000: a response of {LONGEST}=9000 does not fit, once it is "
            "padded to a multiple of 64; set at least 9024",
        ),
    ],
    ids=["packing", "dynamic batching"],
)
def test_a_budget_holds_the_longest_response_as_it_is_padded(changes, said):
    assert problems(launch(**changes)) == [said]


def test_a_cache_is_so_many_bytes():
    key = "policy.generation.vllm_kwargs.kv_cache_memory_bytes"
    for value in ("20G", 1.5, True, 0):
        (line,) = problems(launch(**{key: value}))
        assert line == f"{key}={value}: not a number of bytes; set a whole number from 1, or null"


def test_a_hint_for_micro_batches_of_responses_is_one_that_divides_them():
    values = launch(**{"policy.train_micro_batch_size": 1, "policy.logprob_batch_size": 1, LONGEST: 2048})
    found = [re.search(r"(\S+)=1: small .* kernels; (\d+) fit", line) for line in token_hints(values)]
    proposed = {match[1]: int(match[2]) for match in found if match}
    assert proposed
    apply_qarl(launch(**{LONGEST: 2048, **proposed}))


def test_no_chunks_are_proposed_where_there_are_no_logits():
    for fused, proposed in ((False, True), (True, False)):
        changes = {LONGEST: 18432, "policy.train_micro_batch_size": 32}
        said = problems(launch(**changes, **{"policy.megatron_cfg.use_fused_linear_logprobs": fused}))
        assert any("logprob_chunk_size" in line for line in said) == proposed, said


def test_a_host_without_the_computed_memory_is_a_hint(monkeypatch):
    values = launch()
    qarl = apply_qarl(values)
    for memory, said in ((None, 0), (5000.0, 0), (100.0, 1)):
        monkeypatch.setattr(hints, "first_host_gib", lambda memory=memory: memory)
        lines = [line for line in budget_hints(values, qarl) if line.startswith("host memory")]
        assert len(lines) == said
    assert re.match(
        r"host memory: \d+ GiB are computed for each node \(engines \d+, .*\), and this machine has 100:", lines[0]
    )


def test_dense_layers_whose_ranks_do_not_share_their_sequences_are_larger(tmp_path):
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | sizes | heads))
    held = []
    for shared in (True, False):
        changes = {"policy.model_name": str(tmp_path), "policy.megatron_cfg.sequence_parallel": shared}
        changes |= {"policy.megatron_cfg.expert_model_parallel_size": 1}
        values = launch({"targets": ["mlp"]}, **changes | packed(8192, 8192))
        qarl = NemoQarlConfig.model_validate(values["qarl"])
        held.append(needed_memory(values, qarl, optimizer_stays=False).learner.parts["activations"])
    assert held == [4 * 2 * 8192 / 2 * 256, 4 * 2 * 8192 * 256]


def test_selective_recomputation_counts_as_none():
    granularity = {"policy.megatron_cfg.recompute_granularity": "selective"}
    peaks = []
    for changes in ({}, granularity, {"policy.megatron_cfg.activation_checkpointing": False}):
        values = launch({"gpu_memory_gib": 140}, **changes)
        peaks.append(needed_memory(values, apply_qarl(values), optimizer_stays=False).learner.peak_bytes)
    assert peaks[0] < peaks[1] == peaks[2]
    lines = problems(launch({"gpu_memory_gib": 60}, **granularity))
    assert any("recompute_granularity=full" in line for line in lines)


def test_a_reference_model_is_in_the_hosts_memory():
    """Each rank keeps its weights there, and meanwhile the learner's while it computes with the reference's."""
    key = "loss_fn.reference_policy_kl_penalty"
    found = {}
    for penalty in (0.0, 0.01):
        values = launch(**{key: penalty})
        qarl = NemoQarlConfig.model_validate(values["qarl"])
        needed = needed_memory(values, qarl, optimizer_stays=False)
        found[penalty] = needed.host
        weights = needed.learner.parts["weights"]
    assert found[0.01] == found[0.0] | {"reference": 8 * 2 * weights}
