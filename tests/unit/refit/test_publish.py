import pytest
import torch
from torch import nn

from qarl_kernels import GemmOperand, QuantizedWeight, get_format, quantize_weight, stored_layout
from qarl_nemo.layers.experts import AlignedExperts
from qarl_nemo.layers.linear import AlignedLinear
from qarl_nemo.layers.weight import AlignedWeight, MasterChanges
from qarl_nemo.refit.manifest import Manifest
from qarl_nemo.refit.publish import packed, publish
from support.asserts import assert_bitwise_equal
from support.formats import FORMATS, uneven_weight

LINEAR, EXPERTS = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts"


class Block(nn.Module):
    """A linear with a bias, experts, and a norm that is never quantized, executed in one format."""

    def __init__(self, fmt, dtype):
        super().__init__()
        torch.manual_seed(3)
        linear, experts = nn.Linear(128, 192).to(dtype), nn.Module()
        linear.weight.data = uneven_weight(192, 128).to(dtype)
        experts.gate_up_proj = nn.Parameter(uneven_weight(3, 256, 128).to(dtype))
        experts.down_proj = nn.Parameter(uneven_weight(3, 128, 128).to(dtype))
        self.changes = MasterChanges()
        self.linear = AlignedLinear(linear, fmt, self.changes, name=LINEAR)
        self.experts = AlignedExperts(experts, fmt, self.changes, name=EXPERTS)
        self.norm = nn.Parameter(torch.randn(128).to(dtype))

    def weights(self):
        return {
            f"{LINEAR}.weight": self.linear.aligned["weight"],
            **{f"{EXPERTS}.{proj}": weight for proj, weight in self.experts.aligned.items()},
        }

    def parameters_by_name(self):
        masters = {name: weight.master for name, weight in self.weights().items()}
        return [*masters.items(), (f"{LINEAR}.bias", self.linear.bias), ("model.norm.weight", self.norm)]

    def publish(self, fmt):
        return publish(self.weights(), self.parameters_by_name(), fmt, version=self.changes.count)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request):
    return request.param


def stored_in(update, weight):
    """The stored weight rebuilt from an update, as a receiver does."""
    layout = stored_layout(tuple(weight.master.shape), weight.format)
    tensors = {suffix: update.tensors[f"{weight.name}.{suffix}"].clone() for suffix in layout}
    return QuantizedWeight(weight.format, tuple(weight.master.shape), tensors)


def test_names_shapes_and_dtypes_of_an_update(fmt, dtype):
    block = Block(fmt, dtype)
    update = block.publish(fmt)
    expected = {f"{LINEAR}.bias": ((192,), dtype), "model.norm.weight": ((128,), dtype)}
    shapes = {LINEAR: (192, 128), f"{EXPERTS}.gate_up_proj": (3, 256, 128), f"{EXPERTS}.down_proj": (3, 128, 128)}
    for name, shape in shapes.items():
        expected |= {f"{name}.{suffix}": layout for suffix, layout in stored_layout(shape, fmt).items()}
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in update.tensors.items()} == expected
    assert update.num_bytes == sum(tensor.nbytes for tensor in update.tensors.values())
    assert not any(tensor.requires_grad for tensor in update.tensors.values())


def test_the_published_weight_is_the_forwards_bit_for_bit(fmt, dtype):
    block = Block(fmt, dtype)
    update = block.publish(fmt)
    for weight in block.weights().values():
        received = stored_in(update, weight)
        executed = weight.operand().effective_weight()
        assert_bitwise_equal(GemmOperand.from_weight(received, dtype).effective_weight(), executed)
        # w4a8 executes fp8(code * s8), which its stored codes and scales determine; the others what they dequantize to.
        if fmt.name != "w4a8":
            assert_bitwise_equal(received.dequantize(), executed.to(torch.bfloat16))


def test_a_published_weight_with_one_code_changed_is_not_the_forwards(fmt):
    block = Block(fmt, torch.bfloat16)
    update = block.publish(fmt)
    for weight in block.weights().values():
        received = stored_in(update, weight)
        next(iter(received.tensors.values())).view(torch.uint8).view(-1)[0] ^= 1
        executed = weight.operand().effective_weight()
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(GemmOperand.from_weight(received, torch.bfloat16).effective_weight(), executed)


def test_aligned_and_rollout_only_publish_the_same_bytes(fmt, dtype):
    aligned, rollout_only = Block(fmt, dtype), Block(get_format("bf16"), dtype)
    ours, theirs = aligned.publish(fmt), rollout_only.publish(fmt)
    assert ours.manifest == theirs.manifest
    assert list(ours.tensors) == list(theirs.tensors)
    for name, tensor in ours.tensors.items():
        assert_bitwise_equal(theirs.tensors[name], tensor)
    with torch.no_grad():
        rollout_only.norm += 1
    assert rollout_only.publish(fmt).manifest != ours.manifest


@pytest.mark.parametrize("other", ["fp8_channel", "bf16"])
def test_another_rollout_format_is_quantized_from_the_masters(other):
    block, fmt = Block(FORMATS["w4a16"], torch.bfloat16), get_format(other)
    update = block.publish(fmt)
    assert update.manifest.format == other
    for weight in block.weights().values():
        for suffix, tensor in quantize_weight(weight.master, fmt).tensors.items():
            assert_bitwise_equal(update.tensors[f"{weight.name}.{suffix}"], tensor)


def test_the_same_name_with_other_options_is_another_format():
    block, fmt = Block(FORMATS["w4a16"], torch.bfloat16), get_format("w4a16", group_size=32)
    assert block.publish(fmt).tensors[f"{LINEAR}.weight_scale"].shape == (192, 4)


@pytest.mark.parametrize("executed", ["nvfp4", "bf16"])
def test_fused_weights_are_served_with_one_global_scale(executed):
    fmt, changes = get_format("nvfp4"), MasterChanges()
    small, large = (nn.Parameter(scale * uneven_weight(32, 64)) for scale in (1.0, 4.0))
    pairs = {"q_proj": (small, large), "k_proj": (large, small)}
    weights = [
        AlignedWeight(name, own, get_format(executed), changes, fused=[other]) for name, (own, other) in pairs.items()
    ]
    ours, theirs = (packed(weight, fmt).tensors["weight_global_scale"] for weight in weights)
    assert_bitwise_equal(ours, theirs)
    # On its own the smaller one has another.
    assert not torch.equal(quantize_weight(small, fmt).tensors["weight_global_scale"], ours)


def test_the_manifest_describes_the_update(fmt):
    block = Block(fmt, torch.bfloat16)
    block.changes.bump()
    update = block.publish(fmt)
    assert update.manifest == Manifest.of([update.tensors], version=1, fmt=fmt.name)
    assert update.contradictions() == []


def test_a_new_version_publishes_new_masters(fmt):
    block = Block(fmt, torch.bfloat16)
    before = block.publish(fmt)
    with torch.no_grad():
        for _, parameter in block.parameters_by_name():
            parameter.mul_(1.25)
    block.changes.bump()
    after = block.publish(fmt)
    assert (before.manifest.version, after.manifest.version) == (0, 1)
    for weight in block.weights().values():
        assert_bitwise_equal(stored_in(after, weight).dequantize(), quantize_weight(weight.master, fmt).dequantize())
    changed = {name for name in before.tensors if before.manifest.records[name] != after.manifest.records[name]}
    # Codes may stay what they were; every scale, or BF16 weight, is a quarter larger.
    scales = {name for name in before.tensors if "scale" in name}
    assert changed >= (scales or {f"{LINEAR}.weight", f"{EXPERTS}.gate_up_proj.weight"})


def test_unquantized_parameters_are_published_as_they_are(fmt, dtype):
    block = Block(fmt, dtype)
    update = block.publish(fmt)
    assert_bitwise_equal(update.tensors["model.norm.weight"], block.norm.detach())
    assert update.tensors[f"{LINEAR}.bias"].data_ptr() == block.linear.bias.data_ptr()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_weight_that_is_served_as_it_is_is_named(fmt, value):
    block = Block(fmt, torch.bfloat16)
    block.publish(fmt)
    # As Transformer-Engine holds no bias.
    publish({}, [("model.bias", torch.zeros(0))], fmt, version=1)
    with torch.no_grad():
        block.norm[7] = value
    with pytest.raises(ValueError, match=r"1 weight\(s\) that are served as they are: model\.norm\.weight$"):
        block.publish(fmt)


def test_a_large_weight_that_is_served_as_it_is_is_not_broken():
    # The sum of its squares is infinite in FP32.
    large = torch.full((64,), 1e30)
    update = publish({}, [("model.norm.weight", large)], get_format("bf16"), version=1)
    assert_bitwise_equal(update.tensors["model.norm.weight"], large)


@pytest.mark.parametrize("executed", ["same", "bf16"])
def test_a_broken_master_is_named(fmt, executed):
    block = Block(fmt if executed == "same" else get_format("bf16"), torch.bfloat16)
    with torch.no_grad():
        block.experts.down_proj[2, 7, 5] = torch.nan
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts\.down_proj .* first at index \[2, 7, 5\]"):
        block.publish(fmt)
