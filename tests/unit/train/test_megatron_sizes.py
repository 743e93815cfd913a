"""Layouts by which a Megatron learner's ranks cannot share a model are refused before the ranks start."""

import pytest

from qarl_nemo.train.preflight import check
from support.runs import make_config

MODEL = {"num_attention_heads": 6, "num_key_value_heads": 2, "num_experts": 6, "moe_intermediate_size": 128}


def problems(tmp_path, num_gpus, **sizes) -> list[str]:
    policy = {"model_init": MODEL, "megatron_cfg": {"num_gpus": num_gpus, **sizes}}
    # Any number of ranks here shares these responses.
    grpo = {"num_prompts_per_step": 6, "train_global_batch_size": 24}
    return [text for text in check(make_config(tmp_path, policy=policy, grpo=grpo))[1] if "megatron_cfg" in text]


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


def test_no_rank_starts(tmp_path):
    launch = pytest.importorskip("qarl_nemo.train.megatron.launch", reason="needs megatron-core")
    policy = {"model_init": MODEL, "megatron_cfg": {"num_gpus": 4, "expert_model_parallel_size": 4}}
    with pytest.raises(ValueError, match="does not divide the model's num_experts=6"):
        launch.train_with_megatron(make_config(tmp_path / "run", policy=policy))
    assert not (tmp_path / "run").exists()
