import re

import pytest

from qarl_nemo.names import (
    check_targets,
    compressed_tensors_ignore,
    expert_names,
    fp8_modules_to_not_convert,
    layer_of,
    natural_key,
    parameter_name,
    published_name,
    split_targets,
    summarize_names,
    target_of,
    tensor_kind,
)

# Layer 0 is a Qwen3-MoE block, layer 1 a dense one, layer 2 has a Qwen2-MoE shared expert.
PARAMETERS = [
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(3) for part in "qkvo"),
    *(f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 2)),
    *(
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in (0, 2)
        for expert in range(2)
        for part in ("gate", "up", "down")
    ),
    *(f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    *(f"model.layers.2.mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")),
    "model.layers.2.mlp.shared_expert_gate.weight",
    "model.norm.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize(
    ("name", "kind", "target"),
    [
        ("model.layers.3.mlp.experts.7.gate_proj.weight", "experts", "experts"),
        ("model.layers.3.mlp.experts.gate_up_proj.weight", "experts", "experts"),
        ("model.layers.3.mlp.experts.gate_up_proj", "experts", None),
        ("model.layers.3.self_attn.q_proj.weight", "attention", "attention"),
        ("model.layers.3.self_attn.q_proj.bias", "attention", None),
        ("model.layers.3.self_attn.q_norm.weight", "norm", None),
        ("model.layers.3.mlp.gate_proj.weight", "mlp", "mlp"),
        ("model.layers.3.mlp.gate.weight", "router", None),
        ("model.layers.3.mlp.shared_expert.gate_proj.weight", "shared_experts", None),
        ("model.layers.3.mlp.shared_experts.down_proj.weight", "shared_experts", None),
        ("model.layers.3.mlp.shared_expert_gate.weight", "shared_experts", None),
        ("model.layers.3.post_attention_layernorm.weight", "norm", None),
        ("model.norm.weight", "norm", None),
        ("model.embed_tokens.weight", "embedding", None),
        ("lm_head.weight", "lm_head", None),
        ("model.layers.3.block_sparse_moe.experts.0.w1.weight", "other", None),
        # An unescaped dot in the patterns would let this one through.
        ("model.layers.3.mlpXgate_proj.weight", "other", None),
    ],
)
def test_classification(name, kind, target):
    assert tensor_kind(name) == kind
    assert target_of(name) == target


@pytest.mark.parametrize(
    ("text", "expected"), [("mlp,,attention", ["mlp", "attention"]), (" experts , ", ["experts"]), ("", []), (" ,", [])]
)
def test_no_target_stands_between_two_commas(text, expected):
    assert split_targets(text) == expected


def test_targets_are_canonical_and_unknown_ones_are_all_named():
    assert check_targets(["attention", "experts", "attention"]) == ("experts", "attention")
    with pytest.raises(ValueError, match="unknown targets: expert, router; legal: experts, attention, mlp"):
        check_targets(["expert", "mlp", "router"])
    with pytest.raises(ValueError, match="no target given; legal: experts, attention, mlp"):
        check_targets([])
    with pytest.raises(ValueError, match="unknown targets: '', ' ', x; legal: experts, attention, mlp"):
        check_targets(["", "mlp", " ", "x"])
    with pytest.raises(ValueError, match=re.escape("write [experts]")):
        check_targets("experts")


def test_a_stacked_name_holds_each_experts_gate_before_its_up():
    block = "model.layers.12.mlp.experts"
    assert expert_names(f"{block}.gate_up_proj.weight_scale_inv", num_experts=2) == [
        [f"{block}.0.gate_proj.weight_scale_inv", f"{block}.0.up_proj.weight_scale_inv"],
        [f"{block}.1.gate_proj.weight_scale_inv", f"{block}.1.up_proj.weight_scale_inv"],
    ]
    assert expert_names(f"{block}.down_proj.weight_packed", num_experts=1) == [[f"{block}.0.down_proj.weight_packed"]]


def test_other_names_are_not_stacked():
    with pytest.raises(ValueError, match="not a stacked expert name; legal"):
        expert_names("model.layers.0.self_attn.q_proj.weight", 2)


def test_compressed_tensors_ignore():
    assert compressed_tensors_ignore(PARAMETERS, ["experts"]) == [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.2.mlp.gate",
        r"re:.*\.self_attn\..*",
        r"re:.*\.mlp\.(gate|up|gate_up|down)_proj$",
        r"re:.*\.mlp\.shared_experts?(_gate|\..*)?$",
    ]


def test_fp8_modules_are_exact_and_include_fused_names():
    assert fp8_modules_to_not_convert(PARAMETERS, ["experts", "mlp"]) == [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.2.mlp.gate",
        *(f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(3) for part in ("k", "qkv", "o", "q", "v")),
        "model.layers.2.mlp.shared_expert.down_proj",
        "model.layers.2.mlp.shared_expert.gate_proj",
        "model.layers.2.mlp.shared_expert.gate_up_proj",
        "model.layers.2.mlp.shared_expert.up_proj",
        "model.layers.2.mlp.shared_expert_gate",
    ]
    blocks = fp8_modules_to_not_convert(PARAMETERS, ["attention"])
    assert "model.layers.0.mlp.experts" in blocks
    assert not any(".experts." in name for name in blocks)


def test_natural_order_counts_layers():
    names = [f"model.layers.{layer}.mlp.gate.weight" for layer in (10, 9, 2)]
    assert sorted(names, key=natural_key) == names[::-1]


def test_summary_compresses_full_grids_only():
    full = [f"layers.{layer}.experts.{expert}.w" for layer in range(3) for expert in range(12)]
    assert summarize_names(full) == "layers.{0..2}.experts.{0..11}.w"
    # One cell missing: the braces would claim a name that is not in the list.
    assert summarize_names(full[:2] + full[12:13]) == "layers.0.experts.0.w, layers.0.experts.1.w, layers.1.experts.0.w"
    assert summarize_names(["layers.0.w", "layers.2.w", "norm"]) == "layers.0.w, layers.2.w, norm"


def test_stacked_experts_alone_are_published_under_another_name():
    assert published_name("model.layers.3.mlp.experts.gate_up_proj") == "model.layers.3.mlp.experts.gate_up_proj.weight"
    for name in ("model.layers.3.mlp.gate.weight", "model.layers.3.self_attn.q_proj.bias", "model.norm.weight"):
        assert published_name(name) == name
    for name in [*PARAMETERS, "model.layers.3.mlp.experts.down_proj"]:
        assert parameter_name(published_name(name)) == name


def test_the_layer_of_a_name_is_its_decoder_layer():
    assert layer_of("model.layers.13.mlp.experts.down_proj.weight_packed") == "model.layers.13"
    assert layer_of("layers.0.input_layernorm.weight") == "layers.0"
    assert layer_of("model.embed_tokens.weight") == layer_of("lm_head.weight") == ""
