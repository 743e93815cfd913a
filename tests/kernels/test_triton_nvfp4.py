"""The NVFP4 kernels against the reference in torch."""

import pytest
import torch

from qarl_kernels import get_format, nvfp4
from qarl_kernels.ops.nvfp4 import largest_magnitudes, nvfp4_quantize, nvfp4_unscaled
from qarl_kernels.weights import largest_reference, quantize_weight_reference
from support.asserts import assert_bitwise_equal
from support.formats import uneven_weight
from support.triton_interpreter import DEVICE, INTERPRETED
from support.weights import LAYOUTS, WEIGHTS, significand_pairs

pytestmark = pytest.mark.usefixtures("poisoned_empty")

NVFP4 = get_format("nvfp4")
SHAPES = [(3, 20, 96), (1, 5, 32)] if INTERPRETED else [(7, 1536, 2048), (7, 2048, 768), (1, 7, 14336), (3, 20, 32)]


def reference(weight):
    return quantize_weight_reference(weight.cpu(), NVFP4, name="w").tensors


def quantized(weights, **options):
    return nvfp4_quantize(weights, nvfp4.global_divisor(largest_magnitudes(weights)), **options)


def assert_same(actual, expected):
    assert_bitwise_equal(actual.packed.cpu(), expected["weight_packed"])
    assert_bitwise_equal(actual.scale.cpu(), expected["weight_scale"])


@pytest.mark.parametrize("draw", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stored_weights_are_the_references(shape, draw):
    # Rows of the largest numbers are refused by the format; at 2^-110 times their size they are as awkward.
    weight = (WEIGHTS[draw](*shape).float() * 2.0**-110).bfloat16() if draw == "extreme" else WEIGHTS[draw](*shape)
    weight = weight.to(DEVICE)
    assert_bitwise_equal(largest_magnitudes(weight).cpu(), largest_reference(weight.cpu()))
    actual, expected = quantized(weight, emit_unscaled=True), reference(weight)
    assert_same(actual, expected)
    assert actual.nonfinite.item() == 0
    values = nvfp4.unscaled(expected["weight_packed"], expected["weight_scale"])
    assert_bitwise_equal(actual.unscaled.cpu(), values)
    assert_bitwise_equal(nvfp4_unscaled(actual.packed, actual.scale).cpu(), values)
    if len(weight) > 1:
        with pytest.raises(AssertionError, match="differ"):
            assert_same(quantized(weight.roll(1, 0)), expected)


def test_every_pair_of_significands_is_divided_as_the_reference_divides_it():
    weight = significand_pairs(16, 3)
    weight = weight[::2].contiguous() if INTERPRETED else weight
    assert_same(quantized(weight.to(DEVICE)), reference(weight))


def roundings():
    """Bounds of codes, BF16 weights, and the steps whose FP32 quotients are nearest to rounding across the bounds."""
    above, at = (torch.tensor(bounds) for bounds in (nvfp4._RISE_ABOVE, nvfp4._RISE_AT))
    bound = torch.cat([above, at])
    next_to = torch.cat([above.nextafter(above * 2), at.nextafter(at * 0)])
    flips = ((bound.double() + next_to.double()) / 2)[:, None]
    weight = torch.arange(128, 256).float()
    exact = weight / flips
    step = exact.float()
    larger = torch.where(step < exact, step.nextafter(step * 2), step)
    # The kernel's quotients are too large by less than 2^-34.
    assert (larger / exact - 1)[larger > exact].min() > 2.0**-33
    order = (step / exact - 1).abs().flatten().argsort()[: 96 if INTERPRETED else None]
    return tuple(part.expand(step.shape).flatten()[order] for part in (bound[:, None], weight, step))


def test_quotients_nearest_to_a_rounding_get_the_references_codes():
    bound, weight, step = roundings()
    assert not torch.equal(weight * (1 / step) > bound, weight / step > bound)
    scale = torch.arange(8, 16)[:, None] / 8
    divisor = scale / step
    divisor = torch.stack([divisor, divisor.nextafter(divisor * 2), divisor.nextafter(divisor * 0)])
    found = (scale / divisor == step).flatten(0, 1)
    weight, divisor = weight[found.any(0)], divisor.flatten(0, 1)[found.int().argmax(0), torch.arange(len(step))]
    divisor, step = divisor[found.any(0), None], step[found.any(0)]
    assert len(step) > 90
    groups = torch.zeros(len(step), 1, 16)
    groups[:, 0, :3] = torch.stack([weight, -weight, 6 * step], -1)
    groups = groups.bfloat16()
    codes, expected = nvfp4.quantize(groups, divisor)
    assert torch.equal(expected.float().flatten() / divisor.flatten(), step)
    actual = nvfp4_quantize(groups.to(DEVICE), divisor.to(DEVICE))
    assert_same(actual, {"weight_packed": nvfp4.pack(codes), "weight_scale": expected})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_read_where_they_lie(layout):
    stack = uneven_weight(3, 10, 64).to(DEVICE)
    expected, actual = reference(stack), quantized(LAYOUTS[layout](stack))
    assert_same(actual, expected)
    single = quantized(stack[1])
    assert_bitwise_equal(single.packed.cpu(), expected["weight_packed"][1])
    assert_bitwise_equal(single.scale.cpu(), expected["weight_scale"][1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2.0**20])
def test_groups_that_cannot_be_held_are_counted(bad):
    weight = uneven_weight(2, 6, 64)
    weight[0, 1, [3, 9, 40]] = bad
    weight[1, 5, 63] = -bad
    weight[0, 0, 0] = 2.0**20 * (1 - 2.0**-8)
    # Columns 3 and 9 are of one group.
    assert quantized(weight.to(DEVICE)).nonfinite.item() == 3


def test_everything_wrong_is_named():
    weight = torch.randn(4, 24).bfloat16().to(DEVICE)
    with pytest.raises(ValueError, match=r"nvfp4_quantize: weights has K=24 \(legal: multiples of 16\)"):
        nvfp4_quantize(weight, torch.ones(1, device=DEVICE))
    with pytest.raises(ValueError, match=r"divisor is torch.float64 .*divisor has shape \[2\] \(legal: \[1, 1\]"):
        nvfp4_quantize(uneven_weight(4, 32).to(DEVICE), torch.ones(2, device=DEVICE).double())
    packed, scale = torch.zeros(4, 16, device=DEVICE).int(), torch.ones(4, 3, device=DEVICE)
    with pytest.raises(
        ValueError, match=r"torch.int32 and scale torch.float32 .*scale is \[4, 3\] for packed \[4, 16\]"
    ):
        nvfp4_unscaled(packed, scale)


def test_registered_operators_have_faithful_fakes():
    weight = [uneven_weight(2, 4, 32).to(DEVICE)]
    done = quantized(weight[0])
    for operator, arguments in (
        (torch.ops.qarl.largest_magnitudes.default, (weight,)),
        (torch.ops.qarl.nvfp4_quantize.default, (weight, torch.ones(2, 1, device=DEVICE), True)),
        (torch.ops.qarl.nvfp4_unscaled.default, (done.packed, done.scale)),
    ):
        # The test of the schema multiplies arguments, which a CPU cannot do with FP8.
        torch.library.opcheck(operator, arguments, test_utils=("test_faketensor",))
