"""Settings that NeMo-RL or Megatron would refuse once Ray has started are refused before: sizes, blocks, batches."""

import json

import pytest
from test_layout import launch, on_a_host_without_gpus  # noqa: F401 a fixture for every test
from test_nemo_rl_config import config, problems

from qarl_nemo.nemo_rl.config import apply_qarl

DENSE = {"model_type": "qwen3", "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8,
         "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 64}  # fmt: skip


def test_logits_and_logprobs_in_one_are_refused_where_nemo_rl_refuses_them_or_scales_them():
    fused = {"policy.megatron_cfg.use_fused_linear_logprobs": True}
    gather = "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather"
    lines = problems(config(**fused | {"policy.sequence_packing": {"enabled": True}}))
    assert [line.partition("=")[0] for line in lines] == ["policy.sequence_packing.enabled", gather]
    assert all("use_fused_linear_logprobs=true does not go with it; set false" in line for line in lines)
    fused |= {gather: False}
    # NeMo-RL refuses no temperature, but divides log-probabilities by it, which only logits may be.
    for key, value, legal in (("top_p", 0.9, "1.0"), ("top_k", 20, "null"), ("temperature", 0.6, "1.0")):
        validated = {f"policy.generation.val_{key}": value} if key == "temperature" else {}
        (line,) = problems(config(**fused | {f"policy.generation.{key}": value} | validated))
        assert line == (
            f"policy.generation.{key}={value}: policy.megatron_cfg.use_fused_linear_logprobs=true does not go with it; "
            f"set {legal}"
        )
    for top_p, top_k in ((1.0, None), (None, -1)):
        apply_qarl(config(**fused | {"policy.generation.top_p": top_p, "policy.generation.top_k": top_k}))


def test_graphs_are_refused_for_a_dense_learner_where_it_executes_the_format(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    megatron = {"policy.megatron_cfg.expert_model_parallel_size": 1, "policy.megatron_cfg.cuda_graph_impl": "local"}
    qarl, changes = {"format": "w4a16", "targets": ["mlp"]}, megatron | {"policy.model_name": str(tmp_path)}
    (line,) = problems(config(qarl, **changes))
    assert line.startswith("policy.megatron_cfg: cuda_graph_impl='local': a replayed graph")
    # It multiplies by its masters, which a graph goes on with.
    apply_qarl(config(qarl | {"alignment": "rollout_only"}, **changes))


PACKING, DYNAMIC = "policy.sequence_packing.enabled", "policy.dynamic_batching.enabled"
CONTEXT, STAGES = "policy.megatron_cfg.context_parallel_size", "policy.megatron_cfg.pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({PACKING: True, DYNAMIC: True}, f"{PACKING}=true: {DYNAMIC}=true does not go with it; set false"),
        ({STAGES: 2, DYNAMIC: True}, f"{STAGES}=2: {DYNAMIC}=true does not go with it; set 1"),
        ({CONTEXT: 2, PACKING: False}, f"{PACKING}=false: {CONTEXT}=2 does not go with it; set true"),
        ({"policy.generation.temperature": 0.0}, "policy.generation.temperature=0.0: the learner divides logits by it"),
        (
            {"policy.generation.temperature": 0.001},
            "policy.generation.temperature=0.001: the learner divides logits by it",
        ),
        ({"policy.generation.top_p": 0.0}, "policy.generation.top_p=0.0: a share of probability; set more than 0"),
        ({"policy.generation.top_p": 1.5}, "policy.generation.top_p=1.5: a share of probability; set more than 0"),
        ({"policy.generation.top_k": 0}, "policy.generation.top_k=0: a number of tokens; set 1 or more"),
    ],
)
def test_batches_and_sampling_that_workers_refuse_are_refused_before_them(changes, line):
    assert any(found.startswith(line) for found in problems(config(**changes))), problems(config(**changes))
    apply_qarl(config(**{"policy.generation.top_k": -1, "policy.generation.top_p": 0.9, DYNAMIC: False}))


def test_batch_sizes_that_are_named_are_ones_that_learner_ranks_divide():
    said = {"cluster": {"num_nodes": 1, "gpus_per_node": 8}, "grpo.num_prompts_per_step": 511}
    (line,) = [found for found in problems(config(**said)) if "does not divide the 4088 responses" in found]
    assert line.endswith("; set 4088 or 2044 or 584 or 292")


def test_other_batches_for_logprobs_are_refused_unless_the_environment_takes_them(monkeypatch):
    monkeypatch.delenv("NRL_IGNORE_TP_ACCURACY_CHECK", raising=False)
    values = config(**{"policy.megatron_cfg.tensor_model_parallel_size": 4})
    (line,) = problems(values)
    assert line.startswith("policy.logprob_batch_size=4: NeMo-RL wants policy.train_micro_batch_size with")
    # NeMo-RL reads any text as yes.
    monkeypatch.setenv("NRL_IGNORE_TP_ACCURACY_CHECK", "0")
    apply_qarl(values)
    monkeypatch.setenv("NRL_IGNORE_TP_ACCURACY_CHECK", "")
    assert problems(values) == [line]


def test_a_kl_penalty_needs_the_references_logprobs():
    skipped, penalty = "grpo.skip_reference_policy_logprobs_calculation", "loss_fn.reference_policy_kl_penalty"
    (line,) = problems(config(**{skipped: True, penalty: 0.02}))
    assert line == f"{skipped}=true: {penalty}=0.02 needs them; set false, or {penalty}=0"
    # NeMo-RL's default is a penalty, too.
    (line,) = problems(config(**{skipped: True}))
    assert f"{penalty}=0.01 needs them" in line
    apply_qarl(config(**{skipped: True, penalty: 0.0, "loss_fn.kl_input_clamp_value": 0.0}))
    apply_qarl(config(**{skipped: False, penalty: 0.02}))


SIZES = (
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size",
    "policy.megatron_cfg.context_parallel_size",
    "policy.megatron_cfg.expert_model_parallel_size",
    "policy.generation.vllm_cfg.tensor_parallel_size",
    "policy.generation.vllm_cfg.expert_parallel_size",
)


@pytest.mark.parametrize("value", [None, "two"])
@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_is_no_number_is_one_line(key, value):
    values = config(**{key: value, "cluster": {"num_nodes": 1, "gpus_per_node": 8}})
    assert problems(values) == [f"{key}={value or 'null'}: not a whole number; set 1 or more"]


@pytest.mark.parametrize("key", ["grpo.num_prompts_per_step", "policy.train_global_batch_size"])
def test_a_batch_may_be_unsaid_and_is_else_a_number(key):
    apply_qarl(config(**{key: None}))
    assert problems(config(**{key: "many"})) == [f"{key}=many: not a whole number; set 1 or more"]


@pytest.mark.parametrize("value", ["x", 5, ["a"]])
@pytest.mark.parametrize("key", ["vllm_kwargs", "vllm_cfg", "vllm_cfg.env_vars"])
def test_a_block_of_the_engine_is_a_mapping(key, value):
    place = f"policy.generation.{key}"
    assert problems(config(**{place: value})) == [f"{place}={value}: not a mapping of settings; set one"]


def test_a_block_of_the_engine_is_null_only_where_nemo_rl_takes_it():
    apply_qarl(config(**{"policy.generation.vllm_cfg.env_vars": None}))
    for key in ("vllm_kwargs", "vllm_cfg"):
        (line,) = problems(config(**{f"policy.generation.{key}": None}))
        assert line == f"policy.generation.{key}=null: not a mapping of settings; set one"


def test_layers_are_recomputed_as_nemo_rl_knows():
    key, on = "policy.megatron_cfg.recompute_granularity", {"policy.megatron_cfg.activation_checkpointing": True}
    (line,) = problems(config(**on | {key: "fulll"}))
    assert line.startswith(f"{key}=fulll: NeMo-RL knows no other")
    apply_qarl(config(**on | {key: "selective"}))
    # It is not read without.
    apply_qarl(config(**{key: "fulll"}))


def test_batches_that_are_advised_divide_a_step_that_is_advised():
    """Of 24 GPUs, 12 groups of two: a step has whole prompts of 8 answers, so that 4092 is none."""
    sizes = {"cluster": {"num_nodes": 3, "gpus_per_node": 8}, "policy.train_global_batch_size": 512}
    sizes |= {"policy.megatron_cfg.sequence_parallel": True, "policy.sequence_packing.enabled": True}
    batch, step = problems(launch(**sizes | {"grpo.num_prompts_per_step": 512}))
    assert batch.endswith("=512: is not a multiple of the 12 data parallel learner ranks; set e.g. 408")
    assert step.endswith("=4096: is not a multiple of the 12 data parallel learner ranks; set e.g. 4080, with "
                         "num_prompts_per_step=510")  # fmt: skip
    apply_qarl(launch(**sizes | {"grpo.num_prompts_per_step": 510, "policy.train_global_batch_size": 408}))


def test_context_parallel_ranks_are_not_sent_from_packed_to_dynamic_batches_and_back():
    batching = {"enabled": True, "train_mb_tokens": 8192, "logprob_mb_tokens": 8192}
    apart = {"policy.megatron_cfg.context_parallel_size": 2, "policy.make_sequence_length_divisible_by": 8}
    both = apart | {"policy.sequence_packing": batching, "policy.dynamic_batching": batching}
    (line,) = problems(launch(**both))
    assert line.startswith("policy.dynamic_batching.enabled=true: policy.megatron_cfg.context_parallel_size=2 does not")
    assert line.endswith("set false")
    apply_qarl(launch(**both | {"policy.dynamic_batching": batching | {"enabled": False}}))


def test_a_packing_algorithm_is_one_of_nemo_rls():
    packing = {"enabled": True, "train_mb_tokens": 8192, "logprob_mb_tokens": 8192, "algorithm": "first_fit"}
    (line,) = problems(launch(**{"policy.sequence_packing": packing}))
    assert line.startswith("policy.sequence_packing.algorithm=first_fit: NeMo-RL has no such algorithm; set concaten")
    apply_qarl(launch(**{"policy.sequence_packing": packing | {"algorithm": "FIRST_FIT_DECREASING"}}))
    apply_qarl(launch(**{"policy.sequence_packing": packing | {"enabled": False}}))


def test_sequences_that_are_not_packed_are_cut_into_whole_pieces_too():
    key, parallel = "policy.make_sequence_length_divisible_by", {"policy.megatron_cfg.sequence_parallel": True}
    (line,) = problems(launch(**parallel | {key: 1}))
    assert line.startswith(f"{key}=1: sequence_parallel cuts a padded sequence into one piece for each of 2 tensor")
    apply_qarl(launch(**parallel | {key: 2}))
    batching = {"enabled": True, "train_mb_tokens": 8192, "logprob_mb_tokens": 8192, "sequence_length_round": 3}
    (line,) = problems(launch(**parallel | {key: 2, "policy.dynamic_batching": batching}))
    assert line.startswith("policy.dynamic_batching.sequence_length_round=3: ")


def test_no_answer_is_longer_than_the_runs_sequences():
    """NeMo-RL asserts it of every answer, which an engine of longer sequences does not hold to."""
    served, longest = "policy.generation.vllm_cfg.max_model_len", "policy.max_total_sequence_length"
    sizes = {longest: 4096, "data.max_input_seq_length": 1024, "policy.generation.max_new_tokens": 3073}
    apply_qarl(launch(**sizes | {served: 8192}))
    longer = sizes | {"policy.generation.max_new_tokens": 3074}
    for value, said in ((8192, "8192"), (None, "null")):
        (line,) = problems(launch(**longer | {served: value}))
        assert line.startswith(f"{served}={said}: with its prompt an answer may be longer than {longest}=4096")
        assert line.endswith("set at most 4096, or a larger max_total_sequence_length")
    apply_qarl(launch(**longer | {served: 4096}))


def test_packed_sequences_are_cut_into_whole_pieces():
    packing = {"policy.sequence_packing": {"enabled": True, "train_mb_tokens": 8192, "logprob_mb_tokens": 8192}}
    key, cp = "policy.make_sequence_length_divisible_by", {"policy.megatron_cfg.context_parallel_size": 2}
    # NeMo-RL's recipes say as many as tensor parallel ranks.
    (line,) = problems(launch(**packing | cp | {key: 2}))
    assert line.startswith(f"{key}=2: packed sequences are cut into 8 pieces")
    (line,) = problems(launch(**packing | {key: 1}))
    assert line.endswith("set a multiple of 2")
    for changes in (cp | {key: 8}, {key: 2}):
        apply_qarl(launch(**packing | changes))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"loss_fn.reference_policy_kl_type": "k4"}, "loss_fn.reference_policy_kl_type=k4: NeMo-RL has no such"),
        ({"loss_fn.reference_policy_kl_penalty": -0.1},
         "loss_fn.reference_policy_kl_penalty=-0.1: it would reward distance from the reference; set 0 or more"),
        ({"loss_fn.kl_input_clamp_value": 0.0}, "loss_fn.kl_input_clamp_value=0.0: every token would be"),
        ({"loss_fn.kl_output_clamp_value": -1}, "loss_fn.kl_output_clamp_value=-1: every token would be"),
        ({"grpo.adv_estimator": {"name": "grppo"}}, "grpo.adv_estimator.name=grppo: NeMo-RL has no such estimator"),
        ({"grpo.batch_multiplier": 2}, "grpo.batch_multiplier=2: it is for grpo.use_dynamic_sampling=true; set 1"),
        ({"grpo.stop_at_validation_metric": "accuracy"}, "grpo.stop_at_validation_threshold=null: "),
        ({"grpo.stop_at_validation_metric": "val:accuracy", "grpo.stop_at_validation_threshold": 0.9},
         "grpo.stop_at_validation_metric=val:accuracy: NeMo-RL ends at its first validation, which has no such metric; "
         "set accuracy or avg_length, or pass_k with grpo.val_num_generations_per_prompt of 2 or more, or null"),
        ({"grpo.val_num_generations_per_prompt": 0}, "grpo.val_num_generations_per_prompt=0: set a whole number"),
        ({"grpo.num_generations_per_prompt": 1, "grpo.num_prompts_per_step": 512},
         "grpo.num_generations_per_prompt=1: grpo.adv_estimator.name=grpo compares a prompt's answers"),
        ({"grpo.use_dynamic_sampling": True, "grpo.dynamic_sampling_max_gen_batches": 0},
         "grpo.dynamic_sampling_max_gen_batches=0: grpo.use_dynamic_sampling=true generates at least one; set 1 or"),
        ({"grpo.async_grpo": None}, "grpo.async_grpo=null: NeMo-RL reads its keys; set enabled: false in it"),
        ({"data.use_multiple_dataloader": True, "data.num_prompts_per_dataloader": 24},
         "data.num_prompts_per_dataloader=24: data.use_multiple_dataloader=true takes so many prompts"),
        ({"policy.megatron_cfg.moe_router_load_balancing_type": "aux_loss"},
         "policy.megatron_cfg: moe_router_load_balancing_type='aux_loss', moe_aux_loss_coeff=0.001: the aligned"),
        ({"policy.megatron_cfg.model_overrides": {"rotary_base": 10000, "hidden_dropout": 0.0}},
         "policy.megatron_cfg.model_overrides.rotary_base=10000: the learner alone would compute with it, and engines"),
        ({"policy.megatron_cfg.model_overrides": {"attention_dropout": 0.1}},
         "policy.megatron_cfg.model_overrides.attention_dropout=0.1: the learner alone would compute with it"),
        ({"policy.megatron_cfg.model_overrides": {"moe_router_pre_softmax": True, "moe_permute_fusion": True}},
         "policy.megatron_cfg.model_overrides.moe_router_pre_softmax=true: the learner alone would compute with it"),
        ({"policy.megatron_cfg.model_overrides": {"no_rope_freq": 4}},
         "policy.megatron_cfg.model_overrides.no_rope_freq=4: the learner alone would compute with it"),
        ({"policy.megatron_cfg.optimizer.bf16": False}, "policy.megatron_cfg.optimizer.bf16=false: the optim"),
        ({"grpo.adv_estimator": {"name": "opd"}},
         "grpo.adv_estimator.name=opd: only NeMo-Gym's environments have teachers, and a launcher of their own, which "
         "this is not; set grpo or gdpo or reinforce_plus_plus"),
        ({"on_policy_distillation": {"enabled": True}}, "on_policy_distillation.enabled=true: only NeMo-Gym's"),
        ({"policy.refit_buffer_size_gb": 4}, "policy.refit_buffer_size_gb=4: qarl.layerwise_refit bounds"),
        ({"env": {"should_use_nemo_gym": True}}, "env.should_use_nemo_gym=true: NeMo-Gym's environments"),
        ({"loss_fn.use_kl_in_reward": True, "loss_fn.force_on_policy_ratio": True,
          "policy.train_global_batch_size": 512}, "loss_fn.force_on_policy_ratio=true: NeMo-RL has no log-prob"),
    ],
)  # fmt: skip
def test_what_nemo_rl_or_a_worker_would_refuse_later_is_refused_now(changes, line):
    (found,) = problems(config(**changes))
    assert found.startswith(line)


def test_data_sets_take_turns_by_batches_of_dynamic_sampling():
    """With a factor of 1.5 a step asks 6 for its 4 prompts; 2 of a set become 3, which divide them, and 3 become 4."""
    several = {"data.use_multiple_dataloader": True, "grpo.use_dynamic_sampling": True, "grpo.batch_multiplier": 1.5}
    several |= {"grpo.num_prompts_per_step": 4, "policy.train_global_batch_size": 32}
    apply_qarl(config(**several | {"data.num_prompts_per_dataloader": 2}))
    (line,) = problems(config(**several | {"data.num_prompts_per_dataloader": 3}))
    assert line.startswith("data.num_prompts_per_dataloader=3: data.use_multiple_dataloader=true takes so many prompts")
    assert line.endswith("of a set at once, and 4 a step, times grpo.batch_multiplier=1.5; set 1, 2 or 4")
    # Of 10 each 1 and 2 divide; of their 25 the 5 that 2 become do, and the 2 that 1 becomes do not.
    ten = several | {"grpo.num_prompts_per_step": 10, "grpo.batch_multiplier": 2.5}
    ten |= {"policy.train_global_batch_size": 80}
    apply_qarl(config(**ten | {"data.num_prompts_per_dataloader": 2}))
    assert len(problems(config(**ten | {"data.num_prompts_per_dataloader": 1}))) == 1


def test_advantages_of_tokens_are_for_objectives_of_tokens():
    by_token = {
        "grpo.adv_estimator": {"name": "reinforce_plus_plus"},
        "loss_fn.use_kl_in_reward": True,
        "loss_fn.reference_policy_kl_penalty": 0.01,
    }
    (line,) = problems(config(**by_token))
    assert line.startswith("grpo.adv_estimator.name=reinforce_plus_plus: its advantages with loss_fn.use_kl_in_reward")
    assert "differ within a response, of which qarl.objective tbpo has one; set grpo" in line
    apply_qarl(config({"format": "w4a16", "objective": {"objective": "grpo_tis"}}, **by_token))
    # Without a penalty in them they are one for a response.
    apply_qarl(config(**by_token | {"loss_fn.reference_policy_kl_penalty": 0.0}))


def test_several_rewards_need_an_environment_that_gives_them():
    several = {"grpo.adv_estimator": {"name": "gdpo"}, "grpo.val_period": 0}
    ours = {"dataset_name": "qarl_nemo.nemo_rl.problems.GSM8K"}
    rewarded = ours | {"reward_function": "qarl_nemo.verify:reward"}
    env = {"math": {"num_workers": 8}, "math_multi_reward": {"num_workers": 8}}

    def checked(train, **default):
        return config(**several | {"data": {"train": train, "default": default}, "env": env})

    (line,) = problems(checked([ours | {"env_name": "math"}, rewarded]))
    assert line.startswith("grpo.adv_estimator.name=gdpo: it needs two or more rewards of a response, and math and ")
    assert line.endswith("gives data.train one; set grpo, or an env_name of several rewards, such as math_multi_reward")
    (line,) = problems(checked(ours, env_name="math"))
    assert "and math gives data.train one" in line
    # Validation measures one reward in any case, and without training data others have more to say.
    apply_qarl(checked([ours | {"env_name": "math_multi_reward"}], env_name="math"))
    apply_qarl(config(**several))
