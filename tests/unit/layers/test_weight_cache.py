import weakref

import pytest
import torch
from torch import nn

import qarl_nemo.layers.weight as weight_module
from qarl_kernels import get_format, quantize_weight
from qarl_nemo.layers.experts import AlignedExperts
from qarl_nemo.layers.linear import AlignedLinear
from qarl_nemo.layers.weight import AlignedWeight, MasterChanges
from qarl_nemo.refit.publish import publish
from support.asserts import assert_bitwise_equal
from support.layers import H, StackedExperts, T, routing


@pytest.fixture
def quantizer_calls(monkeypatch):
    """Names of the weights the real quantizer was called for, in order."""
    calls, quantize = [], weight_module.quantize_with_operand

    def counted(*args, name, **options):
        calls.append(name)
        return quantize(*args, name=name, **options)

    monkeypatch.setattr(weight_module, "quantize_with_operand", counted)
    return calls


def make_weight(fmt, changes=None):
    master = nn.Parameter(torch.randn(128, 128).bfloat16())
    return AlignedWeight("q_proj", master, fmt, changes or MasterChanges())


def test_a_version_has_one_quantized_weight_and_one_operand(fmt, quantizer_calls):
    weight = make_weight(fmt)
    first, operand = weight.quantized(), weight.operand()
    assert weight.quantized() is first
    assert weight.operand() is operand
    assert quantizer_calls == ["q_proj"]
    with torch.no_grad():
        weight.master.mul_(1.5)
    assert weight.quantized() is first
    weight.changes.bump()
    second = weight.quantized()
    assert second is not first
    assert weight.operand() is not operand
    assert weight.quantized() is second
    assert quantizer_calls == ["q_proj"] * 2
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(second.dequantize(), first.dequantize())


def test_the_operand_alone_also_follows_the_version(fmt):
    weight = make_weight(fmt)
    before = weight.operand().effective_weight().clone()
    with torch.no_grad():
        weight.master.zero_()
    weight.changes.bump()
    assert not weight.operand().effective_weight().any()
    assert before.any()


def test_all_weights_of_a_model_share_one_count(fmt):
    changes = MasterChanges()
    weights = [make_weight(fmt, changes) for _ in range(3)]
    before = [weight.quantized() for weight in weights]
    changes.bump()
    assert changes.count == 1
    assert all(weight.quantized() is not old for weight, old in zip(weights, before, strict=True))


def test_the_forward_and_the_publisher_share_the_tensors(fmt, quantizer_calls):
    changes = MasterChanges()
    linear = AlignedLinear(nn.Linear(H, 128), fmt, changes, name="model.layers.0.self_attn.q_proj")
    experts = AlignedExperts(StackedExperts(torch.float32), fmt, changes, name="model.layers.0.mlp.experts")
    weights = {weight.name: weight for layer in (linear, experts) for weight in layer.aligned.values()}
    for _ in range(2):
        linear(torch.randn(2, H))
        experts(torch.randn(T, H), *routing()).sum().backward()
        update = publish(weights, [], fmt, version=changes.count)
    assert sorted(quantizer_calls) == sorted(weights)
    for name, weight in weights.items():
        for suffix, tensor in weight.quantized().tensors.items():
            assert update.tensors[f"{name}.{suffix}"] is tensor
            assert weight.operand().format is fmt


def test_a_backward_after_an_update_is_refused(fmt):
    changes = MasterChanges()
    layer = AlignedLinear(nn.Linear(H, 128), fmt, changes, name="model.layers.1.self_attn.o_proj")
    loss = layer(torch.randn(2, H)).sum()
    changes.bump()
    with pytest.raises(
        AssertionError, match=r"model\.layers\.1\.self_attn\.o_proj changed between forward and backward"
    ):
        loss.backward()
    layer(torch.randn(2, H)).sum().backward()
    assert layer.weight.grad.any()


def test_released_weights_come_back_as_the_same_bits(fmt, quantizer_calls):
    weight = make_weight(fmt)
    before = weight.quantized()
    kept = before.dequantize().clone()
    weight.release()
    after = weight.quantized()
    assert after is not before
    assert quantizer_calls == ["q_proj"] * 2
    assert_bitwise_equal(after.dequantize(), kept)
    assert weight.operand() is weight.operand()


def test_released_weights_hold_neither_the_packed_tensors_nor_the_operand(fmt):
    weight = make_weight(fmt)
    # A deleted object leaves a reference to it empty.
    held = [weakref.ref(tensor) for tensor in (*weight.quantized().tensors.values(), weight.operand().values)]
    weight.release()
    assert [reference() for reference in held] == [None] * len(held)


def test_another_format_is_executed_from_the_call_on(fmt, quantizer_calls):
    weight = make_weight(fmt)
    weight.operand()
    other = get_format("fp8_channel" if fmt.name != "fp8_channel" else "w4a16")
    weight.execute(other)
    assert weight.quantized().format == weight.operand().format == other
    assert_bitwise_equal(weight.quantized().dequantize(), quantize_weight(weight.master, other).dequantize())


def test_only_the_packed_tensors_stay_when_the_operand_is_not_kept(fmt):
    kept = make_weight(fmt)
    lean = AlignedWeight("q_proj", kept.master, fmt, kept.changes, keep_operand=False)
    first = lean.operand()
    assert lean.operand() is not first
    assert lean.quantized() is lean.quantized()
    assert_bitwise_equal(first.effective_weight(), kept.operand().effective_weight())
    assert lean._operand is None
