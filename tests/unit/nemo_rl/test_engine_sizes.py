"""How many GPUs may share an engine."""

import json

import pytest
from test_layout import launch, on_a_host_without_gpus  # noqa: F401 for every test
from test_nemo_rl_config import problems

SHAPES = {
    "model_type": "qwen3", "hidden_size": 768, "intermediate_size": 768, "num_attention_heads": 12, "head_dim": 64,
    "num_hidden_layers": 2, "vocab_size": 768,
}  # fmt: skip
DENSE = {"policy.megatron_cfg.expert_model_parallel_size": 1, "policy.generation.vllm_kwargs": {}}
TP = "policy.generation.vllm_cfg.tensor_parallel_size"


@pytest.mark.parametrize(("kv_heads", "tp", "legal"), [(2, 3, "1, 2 or 6"), (6, 4, "1, 2, 3 or 6")])
def test_key_value_heads_are_shared_as_vllm_shares_them(tmp_path, kv_heads, tp, legal):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES | {"num_key_value_heads": kv_heads}))
    values = {"policy.model_name": str(tmp_path), "cluster": {"num_nodes": 1, "gpus_per_node": 12}} | DENSE
    said = [line for line in problems(launch({"targets": ["mlp"]}, **values, **{TP: tp})) if line.startswith(TP)]
    assert said == [
        f"{TP}={tp}: neither divides the {kv_heads} key-value heads nor is a multiple of them, as vLLM needs it; set "
        f"{legal}"
    ]
    fits = problems(launch({"targets": ["mlp"]}, **values, **{TP: 2}))
    assert not any(line.startswith(TP) for line in fits)
