"""The model, the formats and the settings of runs with the real vLLM on one GPU, and what marks their tests."""

import pytest

from qarl_nemo.train.vllm.host import vllm_problem

_PROBLEM = vllm_problem("cuda")
MARKS = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(_PROBLEM is not None, reason=_PROBLEM or "")]

ROLLOUT = {"engine": "vllm", "batch_size": 128, "max_model_len": 32, "kv_cache_gib": 0.0625}
MODEL = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
FORMATS = {
    "w4a16": {"format": "w4a16", "group_size": 128},
    "w3a16": {"format": "w3a16", "group_size": 128},
    "w2a16": {"format": "w2a16", "group_size": 32},
    "nested_w4a16": {"format": "w4a16", "group_size": 128, "nested_in": "w8a16"},
    "nested_w2a16": {"format": "w2a16", "group_size": 32, "nested_in": "w8a16"},
    "w8a16": {"format": "w8a16", "group_size": 128},
    "w4a8": {"format": "w4a8"},
    "fp8_block": {"format": "fp8_block"},
    "fp8_channel": {"format": "fp8_channel"},
    "int8": {"format": "int8"},
    "nvfp4": {"format": "nvfp4"},
    "bf16": {"format": "bf16", "alignment": "none"},
}
# Mean |gap|, nats, of a model whose logits are wide. An H200 showed 3e-4 at most, and 0.17 to 0.53 unaligned.
BOUND = 0.005
