"""Megatron's names and layouts, translated one by one."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron", reason="needs megatron-core: pip install megatron-core==0.16.1")

from qarl_nemo.megatron.hf_parameters import layer_parameter, num_row_blocks, outer_parameter, split_qkv

CONFIG = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=3)


def translated(name, whole):
    return dict(layer_parameter(7, name, whole, CONFIG))


@pytest.mark.parametrize(
    ("spellings", "expected"),
    [
        (("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"), "input_layernorm.weight"),
        (("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"), "post_attention_layernorm.weight"),
    ],
)
def test_both_spellings_of_norms_are_read(spellings, expected):
    norm = torch.ones(4)
    for name in spellings:
        assert translated(name, norm) == {f"model.layers.7.{expected}": norm}


def test_fused_rows_are_taken_apart_head_by_head():
    # Each row says whose it is: query head, or 10 + key head, or 20 + value head.
    owner = torch.tensor([0, 1, 10, 20, 2, 3, 11, 21]).repeat_interleave(3)
    q, k, v = split_qkv(owner, CONFIG)
    assert q.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert k.tolist() == [10, 10, 10, 11, 11, 11]
    assert v.tolist() == [20, 20, 20, 21, 21, 21]


def test_one_scale_row_for_each_head_is_taken_apart_too():
    q, k, v = split_qkv(torch.tensor([0, 1, 10, 20, 2, 3, 11, 21]), CONFIG)
    assert (q.tolist(), k.tolist(), v.tolist()) == ([0, 1, 2, 3], [10, 11], [20, 21])


def test_a_fused_bias_and_a_dense_mlp_have_names_too():
    bias = translated("self_attention.linear_qkv.bias", torch.zeros(24))
    assert list(bias) == [f"model.layers.7.self_attn.{letter}_proj.bias" for letter in "qkv"]
    dense = translated("mlp.linear_fc1.weight", torch.zeros(8, 2))
    assert [tuple(part.shape) for part in dense.values()] == [(4, 2), (4, 2)]
    assert (num_row_blocks("mlp.linear_fc1.weight"), num_row_blocks("mlp.linear_fc2.weight")) == (2, 1)


def test_padding_is_cut_off_the_vocabulary_alone():
    assert outer_parameter("output_layer.weight", torch.zeros(8, 2), 6)[1].shape == (6, 2)
    assert outer_parameter("decoder.final_layernorm.weight", torch.zeros(8), 6)[1].shape == (8,)


@pytest.mark.parametrize("name", ["mlp.shared_experts.linear_fc1.weight", "self_attention.linear_qkv.lora_a"])
def test_an_unknown_parameter_is_named(name):
    with pytest.raises(ValueError, match=name):
        translated(name, torch.zeros(2, 2))
    with pytest.raises(ValueError, match=name):
        outer_parameter(name, torch.zeros(2, 2), 2)
