"""Training from a local checkpoint directory: Qwen3-MoE, dense Qwen, Llama and Mistral, on text and on chat data."""

import json

import datasets
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from qarl_nemo.train.tokenizer import character_tokenizer
from support.files import write_jsonl
from support.runs import read_metrics, train, without_clocks

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "qwen3_moe-mixed": Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[0]),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=8),
}
TARGETS = {
    "qwen3_moe": ["experts", "attention"],
    "qwen3_moe-mixed": ["experts", "mlp"],
    "qwen3": ["mlp", "attention"],
    "qwen3-tied": ["mlp"],
    "qwen2": ["mlp", "attention"],
    "llama": ["mlp", "attention"],
    "mistral": ["mlp", "attention"],
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


def write_checkpoint(path, config: PreTrainedConfig, **saving):
    """A random model with its tokenizer, saved as any other tool would."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config.update({"vocab_size": len(tokenizer), "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path, **saving)
    tokenizer.save_pretrained(path)
    return path


def one_step(run_dir, model_path, **blocks):
    policy = {"model_init": None, "model_path": str(model_path), "warm_start": {"steps": 10}}
    return train(run_dir, policy=policy, grpo={"max_num_steps": 1}, **blocks)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_trains_one_step_aligned(name, tmp_path):
    write_checkpoint(tmp_path / "model", CONFIGS[name])
    trainer = one_step(tmp_path / "run", tmp_path / "model", qarl={"targets": TARGETS[name]})
    (record,) = read_metrics(tmp_path / "run")
    assert record["optim/grad_norm"] > 0
    assert record["mismatch/abs_gap_mean"] < 1e-4
    assert record["weight_version"] == 2
    quantized = {
        row["kind"] for row in json.loads((tmp_path / "run" / "quantized.json").read_text()) if row["quantized"]
    }
    assert quantized == set(TARGETS[name])
    tied = trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight
    assert tied == (name == "qwen3-tied")


def test_a_mlp_of_a_dense_model_shows_its_gap_when_only_rollouts_are_quantized(tmp_path):
    write_checkpoint(tmp_path / "model", CONFIGS["qwen3"])
    one_step(tmp_path / "run", tmp_path / "model", qarl={"alignment": "rollout_only", "targets": ["mlp"]})
    (record,) = read_metrics(tmp_path / "run")
    assert record["mismatch/abs_gap_mean"] > 1e-3


def test_shards_and_bf16_files_load_in_the_configured_precision(tmp_path):
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, dtype="bfloat16")
    path = write_checkpoint(tmp_path / "model", config, max_shard_size="300KB")
    assert len(list(path.glob("model-*.safetensors"))) > 1
    trainer = one_step(tmp_path / "run", path)
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_experts_of_a_dense_model_are_refused_with_what_there_is(tmp_path):
    write_checkpoint(tmp_path / "model", CONFIGS["qwen3"])
    with pytest.raises(ValueError, match=r"targets \['experts'\] match no module .*\['attention', 'mlp'\]"):
        one_step(tmp_path / "run", tmp_path / "model")
    # the folder that the refused run began can be used with the right target
    one_step(tmp_path / "run", tmp_path / "model", qarl={"targets": ["mlp"]})


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", None, "model.safetensors"),
        ("generation_config.json", '{"eos_token_id": [2', "generation_config.json: expected"),
    ],
)
def test_what_a_folder_lacks_is_said_before_anything_starts(tmp_path, file, content, said):
    path = write_checkpoint(tmp_path / "model", CONFIGS["qwen3_moe"])
    (path / file).unlink()
    if content is not None:
        (path / file).write_text(content)
    with pytest.raises(ValueError, match=said):
        one_step(tmp_path / "run", path)
    assert not (tmp_path / "run").exists()


def write_openr1(path, num_problems: int):
    records = [
        {
            "data_source": "sums",
            "prompt": [{"role": "system", "content": "1 "}, {"role": "user", "content": f"{n}+1"}],
            "ability": "math",
            "reward_model": {"ground_truth": str(n + 1), "style": "rule"},
            "extra_info": {"index": n},
        }
        for n in range(num_problems)
    ]
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(records).to_parquet(path)
    dataset = {"dataset_name": "openr1_math", "data_path": str(path)}
    return {"_override_": True, "source": "datasets", "train": dataset, "validation": dataset | {"split": "train[:4]"}}


def test_chat_data_in_openr1_fields_train_and_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = write_openr1(tmp_path / "sums.parquet", 9)
    write_checkpoint(tmp_path / "model", CONFIGS["qwen3_moe"])
    policy = {"model_init": None, "model_path": str(tmp_path / "model"), "warm_start": {"steps": 5}}
    train(tmp_path / "whole", policy=policy, data=data)
    train(tmp_path / "parts", policy=policy, data=data, grpo={"max_num_steps": 2})
    trainer = train(tmp_path / "parts", policy=policy, data=data)
    whole, parts = (without_clocks(read_metrics(tmp_path / name)) for name in ("whole", "parts"))
    assert whole == parts
    assert any(0 < record["reward/mean"] < 1 and record["optim/grad_norm"] > 0 for record in whole)
    # the checkpoint kept the template
    assert trainer.tokenizer.chat_template == TEMPLATE
    examples = (tmp_path / "whole" / "diagnostics" / "step_000001.jsonl").read_text().splitlines()
    assert all(json.loads(line)["prompt"].startswith("1 ") for line in examples)


def test_jsonl_data_train(tmp_path):
    path = tmp_path / "sums.jsonl"
    write_jsonl(path, ({"problem": f"{n}+1", "answer": n + 1} for n in range(9)))
    dataset = {"data_path": str(path), "prompt_template": "{problem}="}
    train(tmp_path / "run", data={"_override_": True, "source": "datasets", "train": dataset})
    records = read_metrics(tmp_path / "run")
    assert len(records) == 4
    assert any(record["reward/mean"] > 0 for record in records)
