"""Norms and rotation round once, as the engine's kernels do; what transformers does instead is the wrong input."""

import copy

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
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, apply_rotary_pos_emb

from qarl_nemo.layers import engine_rounding
from qarl_nemo.layers.engine_rounding import normalize, rotate, swiglu
from qarl_nemo.train.engine_forward import EngineMLP, EngineNorm, follow_engine
from support.asserts import assert_bitwise_equal

SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def make():
    def build(dtype):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES), dtype=dtype).eval()

    return build


def rounded_once(exact):
    return exact.to(torch.bfloat16)


def test_a_norm_rounds_once():
    torch.manual_seed(0)
    theirs = Qwen3MoeRMSNorm(256, eps=1e-6).to(torch.bfloat16)
    theirs.weight.data = (1 + 0.3 * torch.randn(256)).to(torch.bfloat16)
    x = torch.randn(64, 256).to(torch.bfloat16)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * theirs.weight.double()
    assert_bitwise_equal(EngineNorm(theirs, after_add=False)(x), rounded_once(exact))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(theirs(x), rounded_once(exact))


def test_a_rotation_rounds_once(make):
    model = make(torch.bfloat16)
    cos, sin = model.model.rotary_emb(torch.empty(0, dtype=torch.bfloat16), torch.arange(40)[None])
    query = torch.randn(1, 40, 4, 16).to(torch.bfloat16)
    turned = torch.cat([-query[..., 8:], query[..., :8]], -1).double()
    exact = query.double() * cos[:, :, None].double() + turned * sin[:, :, None].double()
    assert_bitwise_equal(rotate(query, cos, sin), rounded_once(exact))
    theirs, _ = apply_rotary_pos_emb(query, query, cos, sin, unsqueeze_dim=2)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(theirs, rounded_once(exact))


def test_the_model_is_the_same_but_for_rounding(make):
    tokens = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[False] * 4 + [True] * 8, [True] * 12])
    for dtype, largest in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        plain = make(dtype)
        followed = follow_engine(copy.deepcopy(plain))
        assert [name for name, _ in followed.named_parameters()] == [name for name, _ in plain.named_parameters()]
        with torch.no_grad():
            gap = (plain(tokens, attention_mask=mask).logits - followed(tokens, attention_mask=mask).logits)[mask]
        assert 0 <= gap.abs().max() < largest


def test_gradients_reach_norms_and_projections(make):
    model = follow_engine(make(torch.bfloat16))
    model(torch.arange(8)[None]).logits.float().logsumexp(-1).sum().backward()
    attention = model.model.layers[0].self_attn
    for parameter in (attention.q_proj.weight, attention.k_norm.weight, model.model.layers[1].input_layernorm.weight):
        assert parameter.grad.abs().sum() > 0


def test_decoding_with_a_cache_says_what_reading_at_once_says(make):
    model = follow_engine(make(torch.bfloat16))
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        cache = model(tokens[:, :9], use_cache=True).past_key_values
        last = model(tokens[:, 9:], past_key_values=cache).logits[:, -1]
        whole = model(tokens).logits[:, -1]
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert (last - whole).abs().max() < 0.05
    assert (model(tokens[:, 1:]).logits[:, -1] - whole).abs().max() > 1e-3


def test_a_rotations_gradient_is_the_rotation_back_and_keeps_nothing_of_its_input():
    query = torch.randn(2, 6, 3, 8, requires_grad=True)
    # Halves that differ, unlike the engine's, tell each place in the matrix from the others.
    cos, sin = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda x: x):
        rotated = rotate(query, cos, sin)
    assert max(kept) <= cos.numel()
    first, second = query.chunk(2, dim=-1)
    plain = query * cos[..., None, :] + torch.cat([-second, first], dim=-1) * sin[..., None, :]
    grad_out = torch.randn_like(plain)
    (expected,), (found,) = (torch.autograd.grad(out, query, grad_out) for out in (plain, rotated))
    torch.testing.assert_close(found, expected)
    assert (found - torch.autograd.grad(rotate(query, cos, -sin), query, grad_out)[0]).abs().max() > 0.1


def test_a_norm_keeps_its_rows_alone_and_has_autograds_gradients(monkeypatch):
    # The kernels' path, over the reference: a CPU's is torch's own norm.
    monkeypatch.setattr(engine_rounding, "runs_kernels", lambda _: True)
    projected = torch.randn(6, 2, 64, requires_grad=True)
    weight = torch.randn(16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
        out = normalize(projected[..., 32:48], weight, 1e-6, after_add=False)
    assert max(tensor.untyped_storage().nbytes() for tensor in kept) == 6 * 2 * 16 * 4
    grad_out = torch.randn_like(out)
    found = torch.autograd.grad(out, (projected, weight), grad_out)
    plain = torch.nn.functional.rms_norm(projected[..., 32:48], (16,), weight, 1e-6)
    for mine, expected in zip(found, torch.autograd.grad(plain, (projected, weight), grad_out), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config, LlamaConfig, MistralConfig, Qwen3MoeConfig])
def test_a_dense_mlp_is_transformers_own_bit_for_bit(config: type[PreTrainedConfig]):
    dense = {"mlp_only_layers": [0]} if config is Qwen3MoeConfig else {}
    model = AutoModelForCausalLM.from_config(config(**SIZES, **dense), dtype=torch.bfloat16).eval()
    theirs = model.model.layers[0].mlp
    followed = follow_engine(copy.deepcopy(model)).model.layers[0].mlp
    assert isinstance(followed, EngineMLP)
    assert [name for name, _ in followed.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    x = torch.randn(2, 7, 64).bfloat16().requires_grad_()
    grad_out = torch.randn_like(x)
    outputs = [mlp(x) for mlp in (followed, theirs)]
    assert_bitwise_equal(*outputs)
    for mine, wanted in zip(
        *(
            torch.autograd.grad(out, (x, *mlp.parameters()), grad_out)
            for out, mlp in zip(outputs, (followed, theirs), strict=True)
        ),
        strict=True,
    ):
        assert_bitwise_equal(mine, wanted)
    theirs.gate_proj, theirs.up_proj = theirs.up_proj, theirs.gate_proj
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(theirs(x), outputs[0])


def test_another_activation_and_experts_stay_transformers_own():
    for config in (Qwen3Config(**SIZES, hidden_act="gelu"), Qwen3MoeConfig(**SIZES)):
        model = AutoModelForCausalLM.from_config(config)
        kind = type(model.model.layers[0].mlp)
        assert type(follow_engine(model).model.layers[0].mlp) is kind


def test_swiglu_keeps_its_inputs_alone_and_has_autograds_gradients(monkeypatch):
    # The kernels' path, over the reference.
    monkeypatch.setattr(engine_rounding, "runs_kernels", lambda _: True)
    gate, up = (torch.randn(2, 5, 16, requires_grad=True) for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
        out = swiglu(gate, up)
    assert len(kept) == 2
    grad_out = torch.randn_like(out)
    plain = torch.nn.functional.silu(gate) * up
    assert_bitwise_equal(out, plain)
    expected = torch.autograd.grad(plain, (gate, up), grad_out)
    for mine, wanted in zip(torch.autograd.grad(out, (gate, up), grad_out), expected, strict=True):
        torch.testing.assert_close(mine, wanted)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.autograd.grad(swiglu(up, gate), gate, grad_out)[0], expected[0])
