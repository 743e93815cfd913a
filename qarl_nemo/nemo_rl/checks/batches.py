"""Checks a run's sizes: which are no whole numbers, and which batches learner ranks cannot divide."""

from collections.abc import Mapping
from math import lcm
from typing import Any

from qarl_nemo.nemo_rl.engine_room import CACHE
from qarl_nemo.nemo_rl.layout import ENGINE, MEGATRON, SIZES, Layout, responses_per_step
from qarl_nemo.nemo_rl.lookup import ABSENT, look_up
from qarl_nemo.parallelism import divisors, either

_SHARE = f"{ENGINE}.gpu_memory_utilization"
# What there is at least one of.
_COUNTS = (
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    *(f"{MEGATRON}.{name}" for name in SIZES.values()),
    f"{ENGINE}.tensor_parallel_size",
    f"{ENGINE}.expert_parallel_size",
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "grpo.max_num_steps",
    "grpo.max_num_epochs",
    "data.max_input_seq_length",
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    "policy.logprob_batch_size",
    "policy.generation.max_new_tokens",
    "policy.max_total_sequence_length",
    "checkpointing.save_period",
)
# Those that NeMo-RL computes with as they are, so that a null ends it in a TypeError once Ray has started.
_NO_NULLS = (
    *(f"{MEGATRON}.{SIZES[short]}" for short in ("tp", "pp", "cp", "ep")),
    f"{ENGINE}.tensor_parallel_size",
    f"{ENGINE}.expert_parallel_size",
)
# How NeMo-RL fills micro-batches with responses of several lengths.
_KINDS = ("sequence_packing", "dynamic_batching")
_TOKENS = ("train_mb_tokens", "logprob_mb_tokens")
# What NeMo-RL pads a response's length to before it looks whether it fits.
_MULTIPLES = {
    "sequence_packing": "make_sequence_length_divisible_by",
    "dynamic_batching": "dynamic_batching.sequence_length_round",
}


def count_problems(config: Mapping[str, Any]) -> list[str]:
    """Say which of the sizes that everything else is computed from are no numbers, or too small ones."""
    keys, problems = list(_COUNTS), []
    for kind in _KINDS:
        if look_up(config, f"policy.{kind}.enabled", False):
            keys += [f"policy.{kind}.{name}" for name in _TOKENS]
    for key in keys:
        value = look_up(config, key)
        if value is ABSENT or (value is None and key not in _NO_NULLS):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            said = "null" if value is None else value
            problems.append(f"{key}={said}: not a whole number; set 1 or more")
        elif value < 1:
            problems.append(f"{key}={value}: set 1 or more")
    share = look_up(config, _SHARE, None)
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float)):
        problems.append(f"{_SHARE}={share}: not a number; set a GPU's share, more than 0 and less than 1")
    cache = look_up(config, CACHE, None)
    if cache is not None and (isinstance(cache, bool) or not isinstance(cache, int) or cache < 1):
        problems.append(f"{CACHE}={cache}: not a number of bytes; set a whole number from 1, or null")
    return problems


def batch_problems(config: Mapping[str, Any], layout: Layout) -> list[str]:
    """Say which batches learner ranks cannot divide, and which budgets are smaller than what they have to hold.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without `count_problems`.
        layout: its layout, which is possible.
    """
    policy = config.get("policy") or {}
    return [
        *_rank_problems(config, policy, layout.data_parallel),
        *_padding_problems(policy, layout),
        *_room_problems(config, policy),
    ]


def _rank_problems(config: Mapping[str, Any], policy: Mapping[str, Any], ranks: int) -> list[str]:
    batch, responses = policy.get("train_global_batch_size"), responses_per_step(config)
    problems, why = [], f"is not a multiple of the {ranks} data parallel learner ranks; set e.g."
    step, answers = responses, look_up(config, "grpo.num_generations_per_prompt", 1)
    if responses % ranks:
        # A step has whole prompts, which the ranks can divide only by so many.
        least = lcm(ranks, answers) // answers
        prompts = responses // answers
        prompts = max(prompts - prompts % least, least)
        step = prompts * answers
        key = "grpo.num_prompts_per_step * grpo.num_generations_per_prompt"
        problems.append(f"{key}={responses}: {why} {step}, with num_prompts_per_step={prompts}")
    # The one that does not divide a step's responses is told which ones do both.
    if batch and batch % ranks and not (responses and responses % batch):
        legal = [size for size in divisors(step) if size % ranks == 0] if step else [max(batch - batch % ranks, ranks)]
        fix = max((size for size in legal if size <= batch), default=min(legal))
        problems.insert(0, f"policy.train_global_batch_size={batch}: {why} {fix}")
    if problems or any(look_up(policy, f"{kind}.enabled", False) for kind in _KINDS):
        return problems
    return [
        f"policy.{key}={size}: does not divide the {whole // ranks} of a rank; set {either(divisors(whole // ranks))}"
        for key, whole in (("train_micro_batch_size", batch), ("logprob_batch_size", responses))
        if whole and (size := policy.get(key)) and whole // ranks % size
    ]


def _padding_problems(policy: Mapping[str, Any], layout: Layout) -> list[str]:
    # NeMo-RL asserts it when the first batch is packed, after its rollouts.
    name = "make_sequence_length_divisible_by"
    multiple, tp, cp = policy.get(name), layout.sizes["tp"], layout.sizes["cp"]
    parts = tp if look_up(policy, "megatron_cfg.sequence_parallel", False) else 1
    pieces = (2 * cp if cp > 1 else 1) * parts
    if not look_up(policy, "sequence_packing.enabled", False):
        # Of context parallel ranks it is required that sequences are packed.
        return _unpacked_problems(policy, parts)
    if not isinstance(multiple, int) or multiple % pieces == 0:
        return []
    return [
        f"policy.{name}={multiple}: packed sequences are cut into {pieces} pieces (2 for each of {cp} context parallel "
        f"ranks, and one for each of {tp} tensor parallel ranks under sequence_parallel); set a multiple of {pieces}"
    ]


def _unpacked_problems(policy: Mapping[str, Any], tp: int) -> list[str]:
    # Megatron asserts it in the first forward, after the first rollouts.
    names = ["make_sequence_length_divisible_by"]
    names += [_MULTIPLES["dynamic_batching"]] if look_up(policy, "dynamic_batching.enabled", False) else []
    return [
        f"policy.{name}={multiple}: sequence_parallel cuts a padded sequence into one piece for each of {tp} tensor "
        f"parallel ranks; set a multiple of {tp}"
        for name in names
        if isinstance(multiple := look_up(policy, name, None), int) and multiple % tp
    ]


def _length_problems(config: Mapping[str, Any], policy: Mapping[str, Any]) -> list[str]:
    """Say where answers could be longer than the run's sequences, at which NeMo-RL ends after their rollouts."""
    longest, key = policy.get("max_total_sequence_length"), f"{ENGINE}.max_model_len"
    prompt, new = (
        look_up(config, one, None) for one in ("data.max_input_seq_length", "policy.generation.max_new_tokens")
    )
    served, turns = look_up(config, key), look_up(config, "grpo.max_rollout_turns", 1)
    if not isinstance(served, int | None) or longest is None:
        return []
    # NeMo-RL cuts a prompt of as many tokens; later turns add to it.
    reached = prompt - 1 + new if isinstance(prompt, int) and isinstance(new, int) and turns == 1 else longest + 1
    if min(reached, served or reached) <= longest:
        return []
    said = "null" if served is None else served
    return [
        f"{key}={said}: with its prompt an answer may be longer than policy.max_total_sequence_length={longest}, and "
        f"NeMo-RL ends with the first that is; set at most {longest}, or a larger max_total_sequence_length"
    ]


def _room_problems(config: Mapping[str, Any], policy: Mapping[str, Any]) -> list[str]:
    problems, chunk = [], policy.get("logprob_chunk_size") or 0
    if chunk < 0:
        problems.append(f"policy.logprob_chunk_size={chunk}: set 1 or more, or null")
    elif chunk and not look_up(policy, "megatron_cfg.defer_fp32_logits", False):
        problems.append(
            f"{MEGATRON}.defer_fp32_logits=false: policy.logprob_chunk_size={chunk} needs it; set true, or no chunks"
        )
    prompt, served = (look_up(config, key, None) for key in ("data.max_input_seq_length", f"{ENGINE}.max_model_len"))
    if isinstance(prompt, int) and isinstance(served, int) and served < prompt:
        problems.append(
            f"{ENGINE}.max_model_len={served}: a prompt of data.max_input_seq_length={prompt} tokens does not "
            "fit; set room for it and its response"
        )
    problems += _length_problems(config, policy)
    return problems + [problem for kind in _KINDS for problem in _budget_problems(policy, kind)]


def _budget_problems(policy: Mapping[str, Any], kind: str) -> list[str]:
    longest = policy.get("max_total_sequence_length")
    if not longest or not look_up(policy, f"{kind}.enabled", False):
        return []
    multiple = look_up(policy, _MULTIPLES[kind], 1)
    padded = -(-longest // multiple) * multiple if isinstance(multiple, int) and multiple > 0 else longest
    fits = "does not fit" if padded == longest else f"does not fit, once it is padded to a multiple of {multiple}"
    return [
        f"policy.{kind}.{key}={room}: a response of policy.max_total_sequence_length={longest} {fits}; "
        f"set at least {padded}"
        for key in _TOKENS
        if (room := look_up(policy, f"{kind}.{key}", None)) and room < padded
    ]
