"""The embedded engine's config: its own checks, and that reading one needs no torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from qarl_nemo.cluster.config import ClusterConfig
from qarl_nemo.config import ConfigError, load_config, read_yaml, validate
from qarl_nemo.data.config import DatasetConfig, DatasetsData
from qarl_nemo.losses.config import GRPOTISConfig, GSPOConfig, TBPOConfig
from qarl_nemo.nemo_rl.block import NemoQarlConfig
from qarl_nemo.train.config import AdamWConfig, LocalConfig, ModelInit, MuonConfig

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "examples" / "configs" / "local_demo.yaml"
MINIMAL = {"run_dir": "runs/x", "policy": {"model_init": {}}, "loss_fn": {"objective": "tbpo"}}


def make(**blocks) -> LocalConfig:
    return validate(MINIMAL | blocks, LocalConfig, source="test")


def test_a_minimal_config_is_qarl_with_int4_experts_and_tbpo():
    config = make()
    assert (config.qarl.alignment, config.qarl.format, config.qarl.targets) == ("aligned", "w4a16", ("experts",))
    assert config.loss_fn == TBPOConfig()
    assert config.policy.optimizer == AdamWConfig()


def test_a_misspelled_key_in_an_example_fails_with_the_nearest_legal_one(tmp_path):
    values = read_yaml(DEMO)
    values["grpo"]["max_num_setps"] = values["grpo"].pop("max_num_steps", 1)
    values["loss_fn"]["objektive"] = "tbpo"
    misspelled = tmp_path / "misspelled.yaml"
    OmegaConf.save(OmegaConf.create(values), misspelled)
    with pytest.raises(ConfigError) as raised:
        load_config(misspelled, [], LocalConfig)
    assert "unknown key 'grpo.max_num_setps': did you mean 'max_num_steps'?" in str(raised.value)
    assert "unknown key 'loss_fn.objektive': did you mean 'objective'?" in str(raised.value)


def test_reading_configs_leaves_torch_and_transformers_alone():
    code = (
        "import sys, qarl_nemo.config, qarl_nemo.train.config\n"
        "from pathlib import Path\n"
        f"path = Path({str(DEMO)!r})\n"
        "qarl_nemo.config.load_config(path, ['seed=3'], qarl_nemo.train.config.LocalConfig)\n"
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        # the path a user wrote, without the union tag that pydantic puts into it
        (
            {"loss_fn": {"objective": "tbpo", "positive_clip_hihg": 0.1}},
            "unknown key 'loss_fn.positive_clip_hihg': did you mean 'positive_clip_high'?",
        ),
        # a key of another objective: only the chosen one's keys are legal
        (
            {"loss_fn": {"objective": "gspo", "mismatch_cap": 2.0}},
            "unknown key 'loss_fn.mismatch_cap': legal here: clip_high, clip_low, objective",
        ),
        # a benchmark has other keys than a data set, in a list as well
        (
            {
                "data": {
                    "source": "datasets",
                    "train": {"data_path": "a"},
                    "validation": [{"benchmark": "gsm8k", "s": 1}],
                }
            },
            "unknown key 'data.validation.0.s': legal here: benchmark, data_path, prompt_template, system_prompt",
        ),
        (
            {"data": {"source": "datasets", "train": {"data_path": "a"}, "validation": {"benchmark": "gsm8"}}},
            "data.validation.benchmark: unknown benchmark 'gsm8'; legal: aime24",
        ),
        (
            {"data": {"source": "datasets", "train": {"data_path": "a"}, "validation": {"benchmark": "ood"}}},
            "data.validation.benchmark: benchmark 'ood' stands for several",
        ),
        (
            {"policy": {"model_init": {}, "optimizer": {"name": "muon", "beta": 0.9}}},
            "unknown key 'policy.optimizer.beta'",
        ),
        (
            {"policy": {"model_init": {"hiden_size": 64}}},
            "unknown key 'policy.model_init.hiden_size': did you mean 'hidden_size'?",
        ),
        (
            {"data": {"source": "datasets", "train": {"dataset_name": "math"}, "validaton": "y"}},
            "unknown key 'data.validaton': did you mean 'validation'? legal here: max_input_seq_length, ",
        ),
        # One data set, and one in a list: the path is what a user wrote, without the name of the form.
        (
            {"data": {"source": "datasets", "train": {"dataset_name": "math", "inptu_key": "q"}}},
            "unknown key 'data.train.inptu_key': did you mean 'input_key'?",
        ),
        (
            {"data": {"source": "datasets", "train": {"dataset_name": "math"}, "validation": [{"data_pth": "a"}]}},
            "unknown key 'data.validation.0.data_pth': did you mean 'data_path'?",
        ),
        ({"data": {"source": "datasets", "train": {}}}, "data.train: data_path is missing: a local file or folder"),
        ({"data": {"source": "datasets", "train": []}}, "data.train: List should have at least 1 item"),
        (
            {
                "data": {
                    "source": "datasets",
                    "train": {"dataset_name": "math"},
                    "validation": {"dataset_name": "math", "benchmark": "gsm8k"},
                }
            },
            "data.validation: it is a data set and a benchmark; write `_override_: true` beside `benchmark`",
        ),
        (
            {"policy": {"tokenizer": {"chat_template": "none"}}},
            "policy.tokenizer.chat_template: 'none' is neither default, null, a file that ends in .jinja",
        ),
        ({"qarl": {"target": ["experts"]}}, "unknown key 'qarl.target': did you mean 'targets'?"),
        (
            {"qarl": {"targets": ["expert"]}},
            "1 problem(s)\n  qarl.targets.0: Input should be 'experts', 'attention' or 'mlp' (given 'expert')",
        ),
        ({"qarl": "w4a16"}, "qarl: expected a block with these keys, not 'w4a16': alignment, backward, format, "),
        (
            {"policy": {"model_init": {}, "lora": True}},
            "policy.lora: expected a block with these keys, not 'True'",
        ),
        (
            {"policy": {"model_init": {}, "warm_start": None}},
            "policy.warm_start: expected a block with these keys, not null: batch_size, check_period, lr, steps, "
            "target_reward; steps=0 switches it off",
        ),
        (
            {"checkpointing": None},
            "checkpointing: expected a block with these keys, not null: checkpoint_must_save_by, enabled, keep_last, "
            "save_period; enabled=false",
        ),
        (
            {"data": {"source": "datasets"}},
            "data.train: Field required, for example {dataset_name: gsm8k} or {data_path: problems.jsonl}",
        ),
        ({"loss_fn": "tbpo"}, "loss_fn: expected a block with these keys, not 'tbpo': "),
        ({"run_dir": 3}, "run_dir: expected text, not a number; put it in quotes, as you wrote it"),
        ({"run_dir": None, "run": {"name": True}}, "run.name: expected text, not true or false; put it in quotes"),
        ({"run_dir": {"a": 1}}, "run_dir: expected text, not a block"),
        ({"run_dir": None}, "run_dir: expected text, not null"),
        ({"qarl": {"schedule": {"bits": 2}}}, "qarl.schedule: expected a list, not a block"),
        (
            {
                "qarl": {"alignment": "none", "format": "bf16"},
                "policy": {"model_init": {}, "optimizer": {"name": "adamw", "update_aware_scale": 1.5}},
            },
            "policy.optimizer.update_aware_scale speeds up quantized weights, and with qarl.alignment=none",
        ),
        ({"qarl": {"targets": []}}, "qarl.targets: Tuple should have at least 1 item"),
        ({"loss_fn": {"objective": "tpbo"}}, "unknown loss_fn.objective 'tpbo': did you mean 'tbpo'?"),
        ({"data": {"digits": 3}}, "data.source is missing and says which keys data has; legal: arithmetic, datasets"),
        (
            {"data": {"source": "datasets", "train": {"dataset_name": "math", "prompt_template": "Solve."}}},
            "data.train.prompt_template: there is no {problem} in it",
        ),
        (
            {"grpo": {"num_generations_per_prompt": 1}},
            "grpo.num_generations_per_prompt: Input should be greater than or equal to 2 (given 1)",
        ),
        ({"grpo": {"val_temperature": 0.005}}, "grpo.val_temperature: vLLM samples at 0.01 where less is set"),
        ({"grpo": {"val_period": 0, "val_at_end": True}}, "grpo: val_at_end=true: val_period=0 turns validation off"),
        ({"grpo": {"max_num_steps": None}}, "grpo.max_num_steps: Input should be a valid integer (given null)"),
        ({"grpo": {"num_prompts_per_step": 60000, "num_generations_per_prompt": 4096}}, "a step has at most 1048576"),
        (
            {"policy": {"model_init": {"hidden_size": 65536, "num_experts": 4096}}},
            "policy.model_init: these sizes make 206 billion parameters; legal: up to 100 billion",
        ),
        ({"compare": {"arms": {}, "seeds": [1]}}, "compare.arms: Dictionary should have at least 1 item"),
    ],
)
def test_errors_name_the_key_the_legal_values_and_the_nearest(blocks, expected):
    with pytest.raises(ConfigError) as raised:
        make(**blocks)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        # The same name in other blocks, those of the block that was named first.
        ("lr=1", "unknown key 'lr': did you mean 'policy.warm_start.lr' or 'policy.optimizer.lr'? legal here: check"),
        ("policy.lr=1", "unknown key 'policy.lr': did you mean 'policy.warm_start.lr' or 'policy.optimizer.lr'?"),
        ("qarl.temperature=1", "unknown key 'qarl.temperature': did you mean 'rollout.temperature'?"),
        # Initials, and slips of the pen.
        (
            "learning_rate=1",
            "unknown key 'learning_rate': did you mean 'policy.warm_start.lr' or 'policy.optimizer.lr'?",
        ),
        ("max_num_step=1", "unknown key 'max_num_step': did you mean 'grpo.max_num_steps'?"),
        ("grpo.num_generation_per_prompt=4", "did you mean 'num_generations_per_prompt'?"),
        # Nothing is near.
        ("banana=1", "unknown key 'banana': legal here: checkpointing"),
        ("policy.banana=1", "unknown key 'policy.banana': legal here: activation_checkpointing"),
    ],
)
def test_unknown_keys_are_looked_for_in_other_blocks_too(override, expected):
    with pytest.raises(ConfigError) as raised:
        load_config(DEMO, [override], LocalConfig)
    assert expected in str(raised.value)


def test_the_command_line_changes_the_kind_of_a_block():
    assert load_config(DEMO, ["loss_fn.objective=gspo"], LocalConfig).loss_fn == GSPOConfig()
    assert (
        load_config(DEMO, ["loss_fn.objective=grpo_tis", "loss_fn.clip_low=0.1"], LocalConfig).loss_fn.clip_low == 0.1
    )
    # What both kinds have stays: lr and warmup_steps of the file.
    assert load_config(DEMO, ["policy.optimizer.name=adamw"], LocalConfig).policy.optimizer == AdamWConfig(
        warmup_steps=10
    )
    data = load_config(DEMO, ["data.source=datasets", "data.train.data_path=a.jsonl"], LocalConfig).data
    assert data == DatasetsData(source="datasets", train=DatasetConfig(data_path="a.jsonl"))
    assert load_config(DEMO, ["rollout.engine=vllm", "device=auto"], LocalConfig).rollout.engine == "vllm"
    with pytest.raises(ConfigError, match=r"unknown key 'loss_fn.mismatch_cap'"):
        load_config(DEMO, ["loss_fn.objective=gspo", "loss_fn.mismatch_cap=3"], LocalConfig)


def test_a_file_changes_the_kind_of_a_block_of_its_defaults(tmp_path):
    def load(text):
        path = tmp_path / "own.yaml"
        path.write_text(f"defaults: {DEMO}\n{text}")
        return load_config(path, [], LocalConfig)

    assert load("loss_fn: {objective: gspo}").loss_fn == GSPOConfig()
    assert load("data: {source: datasets, train: {dataset_name: gsm8k}}").data.train.dataset_name == "gsm8k"
    assert load("qarl: {format: fp8_block}").qarl.group_size is None
    # What every engine takes stays: the default's own value.
    assert load("device: auto\nrollout: {engine: vllm, max_model_len: 99}").rollout.max_new_tokens == 4
    # Two defaults meet as a file and its default do.
    (tmp_path / "gspo.yaml").write_text("loss_fn: {objective: gspo}")
    (tmp_path / "both.yaml").write_text(f"defaults: [{DEMO}, gspo.yaml]")
    assert load_config(tmp_path / "both.yaml", [], LocalConfig).loss_fn == GSPOConfig()
    with pytest.raises(ConfigError, match=r"1 problem\(s\)\n  unknown key 'loss_fn.mismatch_cap'"):
        load("loss_fn: {objective: gspo, mismatch_cap: 3.0}")


def test_a_file_that_changes_the_kind_of_a_block_takes_no_value_that_means_something_else_there(tmp_path):
    def load(text, overrides=()):
        (tmp_path / "own.yaml").write_text(f"defaults: base.yaml\n{text}")
        return load_config(tmp_path / "own.yaml", overrides, LocalConfig)

    tokens = "loss_fn: {objective: grpo_tis, clip_low: 0.1, clip_high: 0.2, mismatch_cap: 3}"
    optimizer = "{name: muon, lr: 0.02, update_aware_scale: 1.5}"
    (tmp_path / "base.yaml").write_text(f"defaults: demo\n{tokens}\npolicy: {{optimizer: {optimizer}}}")
    assert load("loss_fn: {objective: gspo}").loss_fn == GSPOConfig()
    assert load("loss_fn: {objective: gspo, clip_low: 0.05}").loss_fn == GSPOConfig(clip_low=0.05)
    assert load("loss_fn: {objective: grpo_tis, clip_low: 0.15}").loss_fn == GRPOTISConfig(
        clip_low=0.15, clip_high=0.2, mismatch_cap=3
    )
    assert load("policy: {optimizer: {name: adamw}}").policy.optimizer == AdamWConfig()
    # On the command line, what both kinds have stays.
    assert load("", ["loss_fn.objective=gspo"]).loss_fn == GSPOConfig(clip_low=0.1, clip_high=0.2)
    # A misspelt key of the old kind is not dropped without a word.
    (tmp_path / "base.yaml").write_text("defaults: demo\nloss_fn: {mismatch_kap: 3}")
    with pytest.raises(ConfigError, match=r"unknown key 'loss_fn.mismatch_kap'"):
        load("loss_fn: {objective: gspo}")


def test_a_file_cannot_hold_another_kinds_keys_whatever_the_command_line_says(tmp_path):
    values = read_yaml(DEMO)
    values["loss_fn"]["positive_clip_hihg"] = 0.1
    wrong = tmp_path / "wrong.yaml"
    OmegaConf.save(OmegaConf.create(values), wrong)
    with pytest.raises(ConfigError, match=r"unknown key 'loss_fn.positive_clip_hihg'"):
        load_config(wrong, ["loss_fn.objective=gspo"], LocalConfig)


@pytest.mark.parametrize("template", ["Question: {problem}", "{problem}", "[{problem}]", "Q: {problem} # A:"])
def test_a_prompt_template_is_text(template):
    overrides = ["data.source=datasets", "data.train.data_path=a.jsonl", f"data.train.prompt_template={template}"]
    config = load_config(DEMO, overrides, LocalConfig)
    assert config.data.train.prompt_template == template


def test_true_and_false_are_no_numbers_and_a_folder_has_a_name():
    for blocks, said in (
        ({"seed": True}, "seed=true is no number"),
        ({"grpo": {"max_num_steps": False, "val_period": True}}, "max_num_steps=false is no number; val_period=true"),
        ({"num_threads": True}, "num_threads=true is no number"),
        ({"policy": {"optimizer": {"name": "adamw", "betas": [False, 0.9]}}}, "betas holds false"),
        # As a number it would be the scale that changes nothing.
        (
            {"policy": {"optimizer": {"name": "adamw", "update_aware_scale": True}}},
            "update_aware_scale=true is no number",
        ),
        ({"run_dir": ""}, "a run's folder needs a name"),
    ):
        with pytest.raises(ConfigError, match=said):
            make(**blocks)
    assert make(run_dir=".").run_dir == Path()
    # What may be either is what it is.
    assert not make(checkpointing={"enabled": False}).checkpointing.enabled


def test_minibatches_must_divide_the_batch():
    grpo = {"num_prompts_per_step": 6, "num_generations_per_prompt": 4}
    assert make(grpo=grpo | {"train_global_batch_size": 12}).grpo.train_global_batch_size == 12
    # 24 responses: 24/1, 24/2, 24/3, 24/4, 24/6, 24/8, 24/12 (at most 16 minibatches are proposed)
    with pytest.raises(ConfigError, match=r"does not divide the 24 responses .* legal: 24, 12, 8, 6, 4, 3, 2$"):
        make(grpo=grpo | {"train_global_batch_size": 9})


def test_on_policy_grpo_takes_one_step_a_rollout_batch():
    grpo = {"num_prompts_per_step": 6, "num_generations_per_prompt": 4}
    loss_fn = {"objective": "on_policy_grpo"}
    assert make(loss_fn=loss_fn, grpo=grpo | {"train_global_batch_size": 24}).loss_fn.objective == "on_policy_grpo"
    with pytest.raises(ConfigError, match=r"set grpo\.train_global_batch_size=24"):
        make(loss_fn=loss_fn, grpo=grpo | {"train_global_batch_size": 12})


@pytest.mark.parametrize("sources", [{}, {"model_path": "m", "model_init": {}}])
def test_exactly_one_model_source(sources):
    with pytest.raises(
        ConfigError, match=r"policy: set exactly one of model_path .* and model_init .*, the other null"
    ):
        make(policy=sources)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"megatron_cfg": {"num_gpus": 2, "tensor_model_parallel_size": 4}}, "must both divide num_gpus=2"),
        ({"megatron_cfg": {"num_gpus": 4, "expert_model_parallel_size": 3}}, "must both divide num_gpus=4"),
        ({"megatron_cfg": {"num_gpus": 3}}, "not a multiple of the 3 data parallel ranks"),
        ({"megatron_cfg": {}, "attention": "engine"}, "Megatron attends with its own kernels"),
        ({"megatron_cfg": {}, "sequence_packing": {"enabled": True}}, "are the transformers learner's"),
        ({"megatron_cfg": {}, "activation_checkpointing": True}, "are the transformers learner's"),
        ({"megatron_cfg": {}, "optimizer": {"name": "muon"}}, "set megatron_cfg.use_distributed_optimizer=false"),
        ({"megatron_cfg": {"use_fsdp": True}}, "unknown key 'policy.megatron_cfg.use_fsdp'"),
    ],
)
def test_a_megatron_learner_that_cannot_be_is_refused(policy, said):
    with pytest.raises(ConfigError, match=said):
        make(policy={"model_init": {}} | policy)


def test_tensor_parallel_ranks_work_on_the_same_rows():
    config = make(policy={"model_init": {}, "megatron_cfg": {"num_gpus": 4, "tensor_model_parallel_size": 2}})
    assert config.policy.megatron_cfg.data_parallel_size == 2


def test_unions_pick_the_named_block():
    config = make(
        policy={"model_path": "m", "optimizer": {"name": "muon", "lr": 1e-3}},
        data={"source": "datasets", "train": [{"dataset_name": "gsm8k"}, {"data_path": "org/data"}]},
    )
    assert config.policy.optimizer == MuonConfig(lr=1e-3)
    assert config.data.train == [DatasetConfig(dataset_name="gsm8k"), DatasetConfig(data_path="org/data")]


def test_the_resolved_config_reads_back_as_itself(tmp_path):
    config = make(qarl={"targets": ["experts", "attention"], "format": "w4a8"}, logger={"wandb": {"project": "p"}})
    path = tmp_path / "config.yaml"
    OmegaConf.save(OmegaConf.create(config.model_dump(mode="json")), path)
    assert load_config(path, [], LocalConfig) == config


@pytest.mark.parametrize("model", [LocalConfig, ClusterConfig, NemoQarlConfig])
def test_every_number_has_bounds(model):
    def numbers(schema, place):
        if isinstance(schema, list):
            for item in schema:
                yield from numbers(item, place)
        elif isinstance(schema, dict):
            if schema.get("type") in ("integer", "number"):
                yield place, schema
            for key, item in schema.items():
                yield from numbers(item, f"{place}.{key}")

    low, high = {"minimum", "exclusiveMinimum", "const"}, {"maximum", "exclusiveMaximum", "const"}
    found = list(numbers(model.model_json_schema(), model.__name__))
    assert [place for place, schema in found if not (low & schema.keys() and high & schema.keys())] == []
    assert found


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_experts": 1}, "num_experts_per_tok=2 is above num_experts=1"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 is not a multiple of num_key_value_heads=2"),
        ({"head_dim": 33}, "head_dim=33 is odd"),
    ],
)
def test_sizes_of_a_random_model_that_contradict_each_other_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        ModelInit(**sizes)
