import re

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from qarl_kernels import get_format
from qarl_nemo.layers.experts import AlignedExperts
from qarl_nemo.layers.install import InstallRow, install
from qarl_nemo.layers.linear import AlignedLinear
from qarl_nemo.layers.router import NO_ROUTE, AlignedRouter
from support.asserts import assert_bitwise_equal

SIZES = {
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
MOE_SIZES = SIZES | {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
W4A16 = get_format("w4a16")


def make_moe(**sizes):
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**MOE_SIZES | sizes), dtype=torch.bfloat16)


def make_dense(**sizes):
    return AutoModelForCausalLM.from_config(Qwen3Config(**SIZES | sizes), dtype=torch.bfloat16)


def logits_of(model):
    return model(torch.arange(12).view(2, 6)).logits


def test_the_table_of_a_moe_model():
    model = make_moe()
    report = install(model, ["experts"], W4A16)
    kept = {
        "model.embed_tokens": ("embedding", "[32, 128]"),
        "model.norm": ("norm", "[128]"),
        "lm_head": ("lm_head", "[32, 128]"),
    }
    for layer in (0, 1):
        prefix = f"model.layers.{layer}"
        kept |= {f"{prefix}.{name}": ("norm", "[128]") for name in ("input_layernorm", "post_attention_layernorm")}
        kept |= {f"{prefix}.self_attn.{name}": ("norm", "[64]") for name in ("q_norm", "k_norm")}
        kept[f"{prefix}.mlp.gate"] = ("router", "[4, 128]")
    rows = {
        InstallRow(name, kind, shape, "bf16", False, f"{kind}: never quantized") for name, (kind, shape) in kept.items()
    }
    shapes = dict(zip(PROJECTIONS, ("[128, 128]", "[64, 128]", "[64, 128]", "[128, 128]"), strict=True))
    for layer in (0, 1):
        prefix = f"model.layers.{layer}"
        skipped = "not targeted: add 'attention' to targets to quantize it"
        rows |= {
            InstallRow(f"{prefix}.self_attn.{name}", "attention", shape, "bf16", False, skipped)
            for name, shape in shapes.items()
        }
        rows.add(InstallRow(f"{prefix}.mlp.experts", "experts", "[4, 256, 128] [4, 128, 128]", "w4a16", True, ""))
    assert set(report.rows) == rows
    assert len(report.rows) == len(rows)
    assert report.num_routers == 2
    assert report.targets == ("experts",)


def test_the_table_of_a_dense_model():
    report = install(make_dense(), ["mlp", "attention"], W4A16)
    quantized = {row.name for row in report.rows if row.quantized}
    assert quantized == {
        *(f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in PROJECTIONS),
        *(f"model.layers.{layer}.mlp.{name}_proj" for layer in (0, 1) for name in ("gate", "up", "down")),
    }
    assert all((row.format, row.reason) == ("w4a16", "") for row in report.rows if row.quantized)
    assert all(row.format == "bf16" and row.reason for row in report.rows if not row.quantized)
    assert report.targets == ("attention", "mlp")
    assert report.num_routers == 0


def test_bf16_runs_aligned_layers_and_says_that_nothing_is_quantized():
    model = make_moe()
    report = install(model, ["experts"], get_format("bf16"))
    assert not any(row.quantized for row in report.rows)
    assert {row.reason for row in report.rows if row.kind == "experts"} == {"format bf16"}
    assert isinstance(model.model.layers[0].mlp.experts, AlignedExperts)


@pytest.mark.parametrize("make", [make_moe, make_dense])
def test_parameters_keep_their_names_and_identity(make, fmt):
    model = make()
    before = dict(model.named_parameters())
    targets = ["attention", "experts" if make is make_moe else "mlp"]
    report = install(model, targets, fmt)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    for name, weight in report.weights.items():
        assert weight.master is before[name]
        assert name in (weight.name, f"{weight.name}.weight")
        assert weight.changes is report.changes
        assert (weight.format, weight.quantized().format) == (fmt, fmt)
    targeted = {type(model.get_submodule(name.rpartition(".")[0])) for name in report.weights}
    assert targeted == ({AlignedLinear, AlignedExperts} if make is make_moe else {AlignedLinear})


def test_the_backward_mode_reaches_every_layer():
    model = make_moe()
    install(model, ["attention", "experts"], W4A16, backward="high_precision")
    layers = [module for module in model.modules() if isinstance(module, AlignedLinear | AlignedExperts)]
    # 2 layers of 4 projections and one block of experts.
    assert [layer.backward for layer in layers] == ["high_precision"] * 10
    with pytest.raises(ValueError, match="legal: dequantized, high_precision"):
        install(make_moe(), ["experts"], W4A16, backward="master")


def test_every_gradient_arrives(fmt):
    model = make_moe()
    install(model, ["attention", "experts"], fmt)
    logits_of(model).float().log_softmax(-1)[..., 0].sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_quantization_changes_the_output_and_bf16_hardly(fmt):
    model = make_moe()
    before = logits_of(model).float()
    install(model, ["attention", "experts"], fmt)
    change = (logits_of(model).float() - before).norm() / before.norm()
    # Hugging Face rounds router weights to BF16 and sums experts in BF16: that is all the bf16 format changes.
    assert change < 0.008 if not fmt.is_quantized else 0.008 < change < 1.0


def test_a_saved_model_is_a_plain_checkpoint(tmp_path, fmt):
    model = make_moe()
    install(model, ["experts"], fmt)
    expected = logits_of(model).detach()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert not any(isinstance(module, AlignedExperts | AlignedRouter) for module in loaded.modules())
    saved, read = model.state_dict(), loaded.state_dict()
    assert set(saved) == set(read)
    for name in saved:
        assert_bitwise_equal(read[name], saved[name])
    install(loaded, ["experts"], fmt)
    assert_bitwise_equal(logits_of(loaded).detach(), expected)


def test_training_mode_does_not_change_the_forward(fmt):
    model = make_moe()
    install(model, ["attention", "experts"], fmt)
    training = logits_of(model.train()).detach()
    with torch.no_grad():
        assert_bitwise_equal(logits_of(model.eval()), training)


def test_replaying_routes_through_a_model():
    model = make_moe()
    report = install(model, ["experts"], W4A16)
    with torch.no_grad():
        with report.routes.record() as recorded:
            own = logits_of(model)
        routes = torch.stack(recorded, dim=1)
        assert routes.shape == (12, report.num_routers, 2)
        for same in (routes, torch.full_like(routes, NO_ROUTE), None):
            with report.routes.replay(same):
                assert_bitwise_equal(logits_of(model), own)
        with report.routes.replay((routes + 1) % 4):
            assert not torch.equal(logits_of(model), own)


@pytest.mark.parametrize(
    ("make", "targets", "absent", "present"),
    [
        (make_dense, ["experts"], "['experts']", "['attention', 'mlp']"),
        (make_dense, ["experts", "attention"], "['experts']", "['attention', 'mlp']"),
        (make_moe, ["mlp", "experts"], "['mlp']", "['attention', 'experts']"),
    ],
)
def test_a_target_that_matches_nothing_is_an_error(make, targets, absent, present):
    model = make()
    with pytest.raises(ValueError, match="match no module of this model") as error:
        install(model, targets, W4A16)
    assert f"targets {absent} match no module of this model, which has {present}" in str(error.value)
    assert not any(isinstance(module, AlignedLinear | AlignedExperts | AlignedRouter) for module in model.modules())


@pytest.mark.parametrize("targets", [["experts", "lm_head", "router"], [], "experts"])
def test_an_illegal_target_names_the_legal_ones(targets):
    with pytest.raises(ValueError, match="experts, attention, mlp" if targets != "experts" else r"write \[experts\]"):
        install(make_moe(), targets, W4A16)


# K = 96 fits no group of 128 or 64; the experts' K are 96 and 64; o_proj's K is 2 heads x 64 = 128 and fits.
ILLEGAL = [f"self_attn.{name}.weight" for name in PROJECTIONS[:3]] + [
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
]


@pytest.mark.parametrize("name", ["w4a16", "fp8_block"])
def test_every_illegal_shape_is_listed_at_once(name):
    model = make_moe(hidden_size=96, moe_intermediate_size=64)
    with pytest.raises(ValueError, match=f"10 weights cannot be stored as {name}") as error:
        install(model, ["experts", "attention"], get_format(name))
    for layer in (0, 1):
        for weight in ILLEGAL:
            assert f"model.layers.{layer}.{weight} [" in str(error.value)
    assert "o_proj" not in str(error.value)
    assert not any(isinstance(module, AlignedLinear | AlignedExperts | AlignedRouter) for module in model.modules())
    install(model, ["experts", "attention"], get_format("w4a16", group_size=32))


def test_plain_layers_execute_bf16_in_shapes_that_the_format_does_not_take():
    # o_proj's K is 2 heads x 48 = 96, which no group of 128 divides.
    model = make_moe(head_dim=48)
    report = install(model, ["experts"], W4A16, plain=["attention", "experts"])
    executed = {name: weight.format.name for name, weight in report.weights.items()}
    prefix = "model.layers.1"
    assert executed[f"{prefix}.self_attn.o_proj.weight"] == "bf16"
    assert executed[f"{prefix}.mlp.experts.down_proj"] == "w4a16", "what is targeted is quantized all the same"


def test_a_block_that_would_hold_gate_and_up_is_refused():
    model = make_moe(moe_intermediate_size=192)
    with pytest.raises(ValueError, match="a block would hold gate and up") as error:
        install(model, ["experts"], get_format("fp8_block"))
    gate_up = re.findall(r"(model\.layers\.\d)\.mlp\.experts\.gate_up_proj \[4, 384, 128\]: I=192", str(error.value))
    assert gate_up == ["model.layers.0", "model.layers.1"]


def test_a_linear_bias_is_kept_and_never_quantized():
    model = make_dense(attention_bias=True)
    biases = {name: parameter for name, parameter in model.named_parameters() if name.endswith("bias")}
    assert biases
    nn.init.normal_(biases["model.layers.0.self_attn.q_proj.bias"])
    report = install(model, ["attention"], W4A16)
    assert not set(biases) & set(report.weights)
    layer, x = model.model.layers[0].self_attn.q_proj, torch.randn(3, 128).bfloat16()
    with torch.no_grad():
        with_bias = layer(x)
        layer.bias.zero_()
        assert not torch.equal(layer(x), with_bias)
