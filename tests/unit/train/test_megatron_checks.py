"""A machine without a GPU, and layouts whose ranks cannot share a model, are refused before Megatron starts."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from qarl_nemo.train.megatron import checks
from qarl_nemo.train.megatron.checks import require_machine
from qarl_nemo.train.preflight import check
from support.runs import make_config

MODEL = {"num_attention_heads": 6, "num_key_value_heads": 2, "num_experts": 6, "moe_intermediate_size": 128}


def problems(tmp_path, num_gpus, **sizes) -> list[str]:
    policy = {"model_init": MODEL, "megatron_cfg": {"num_gpus": num_gpus, **sizes}}
    # Any number of ranks here shares these responses.
    grpo = {"num_prompts_per_step": 6, "train_global_batch_size": 24}
    return [text for text in check(make_config(tmp_path, policy=policy, grpo=grpo))[1] if "does not divide" in text]


def test_every_size_that_divides_nothing_is_named_with_legal_ones(tmp_path):
    (line,) = problems(tmp_path, 4, tensor_model_parallel_size=4, expert_model_parallel_size=4)
    assert line == (
        "policy.megatron_cfg: tensor_model_parallel_size=4 does not divide the model's num_attention_heads=6 and "
        "num_key_value_heads=2; it may be 1 or 2; expert_model_parallel_size=4 does not divide the model's "
        "num_experts=6; it may be 1 or 2"
    )
    (line,) = problems(tmp_path, 3, expert_tensor_parallel_size=3)
    assert line.endswith(
        "expert_tensor_parallel_size=3 does not divide the model's moe_intermediate_size=128; it may be 1"
    )


def test_what_ranks_can_share_is_taken(tmp_path):
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    assert problems(tmp_path, 4, **sizes) == []
    assert problems(tmp_path, 6, expert_model_parallel_size=6) == []


def test_models_that_megatron_does_not_hold_are_told_at_the_start(tmp_path):
    folder = tmp_path / "dense"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen3Config(vocab_size=60, num_key_value_heads=2, head_dim=32, **sizes).save_pretrained(folder)
    dense = {"model_init": None, "model_path": str(folder), "warm_start": {"steps": 0}, "megatron_cfg": {}}
    one = {"model_init": MODEL | {"num_experts_per_tok": 1}, "megatron_cfg": {}}
    for policy, said in ((dense, "no Megatron model for model_type='qwen3'"), (one, "num_experts_per_tok=1: Megatron")):
        assert any(said in text for text in check(make_config(tmp_path / "run", policy=policy))[1])
        alone = policy | {"megatron_cfg": None}
        assert not any(said in text for text in check(make_config(tmp_path / "run", policy=alone))[1])


def test_megatron_needs_its_package_and_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    config = make_config(tmp_path, policy={"model_init": MODEL, "megatron_cfg": {}})
    said = "; Megatron computes on GPUs, and this run's device is the CPU; null is the transformers learner"
    (line,) = (text for text in check(config)[1] if text.endswith(said))
    assert line.startswith("policy.megatron_cfg: megatron-core is missing: pip install")
    assert check(make_config(tmp_path, policy={"model_init": MODEL}))[1] == []


def test_megatron_runs_where_something_stands_in_for_cuda(monkeypatch):
    policy = make_config(Path("run"), policy={"model_init": MODEL, "megatron_cfg": {}}).policy
    monkeypatch.setattr(checks, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    require_machine(policy, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_machine(policy, torch.device("cuda"))
    with pytest.raises(ValueError, match="this run's device is the CPU"):
        require_machine(policy, torch.device("cpu"))


def test_no_rank_starts(tmp_path, monkeypatch):
    launch = pytest.importorskip("qarl_nemo.train.megatron.launch", reason="needs megatron-core")
    policy = {"model_init": MODEL, "megatron_cfg": {"num_gpus": 4, "expert_model_parallel_size": 4}}
    monkeypatch.setattr(launch, "require_machine", lambda *_: None)
    with pytest.raises(ValueError, match="does not divide the model's num_experts=6"):
        launch.train_with_megatron(make_config(tmp_path / "run", policy=policy))
    assert not (tmp_path / "run").exists()
