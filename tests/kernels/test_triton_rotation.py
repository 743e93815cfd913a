"""The rotation kernel against the torch reference, bit for bit, whatever the strides."""

import pytest
import torch

from qarl_kernels.dispatch_norms import rotate_pairs_reference
from qarl_kernels.ops.rotation import rotate_pairs_kernel
from support.asserts import assert_bitwise_equal
from support.triton_interpreter import DEVICE

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# [A, B, heads, D]: a whole program of heads; more than one; halves and heads that are no power of two.
SHAPES = [(3, 2, 4, 128), (2, 3, 40, 128), (5, 1, 3, 48), (1, 4, 1, 8)]


def tables(shape):
    return [torch.randn(shape).to(DEVICE, torch.bfloat16) for _ in range(2)]


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_rotates_as_the_reference_does(shape, back):
    x = (4 * torch.randn(shape)).to(DEVICE, torch.bfloat16)
    for tokens in (shape[:2], (shape[0], 1), (1, shape[1])):
        cos, sin = tables((*tokens, shape[3]))
        out = rotate_pairs_kernel(x, cos, sin, back=back)
        assert_bitwise_equal(out, rotate_pairs_reference(x, cos, sin, back=back))
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(out, rotate_pairs_reference(x, cos, sin, back=not back))


def test_rows_may_lie_in_wider_ones():
    wide = torch.randn(3, 2, 5, 96).to(DEVICE, torch.bfloat16)
    cos, sin = tables((3, 2, 64))
    for x in (
        wide[..., 16:80],
        wide.transpose(0, 1)[:, :, 1:, :64].transpose(0, 1),
        wide[..., ::2].repeat(1, 1, 1, 2)[..., :64],
    ):
        out = rotate_pairs_kernel(x, cos, sin, back=False)
        assert out.is_contiguous()
        assert_bitwise_equal(out, rotate_pairs_reference(x, cos, sin, back=False))


def test_there_and_back_is_the_identity_where_halves_are_equal():
    x = torch.randn(2, 2, 3, 64).to(DEVICE, torch.bfloat16)
    angle = torch.rand(2, 2, 32)
    cos, sin = (torch.cat([half, half], -1).to(DEVICE, torch.bfloat16) for half in (angle.cos(), angle.sin()))
    again = rotate_pairs_kernel(rotate_pairs_kernel(x, cos, sin, back=False), cos, sin, back=True)
    assert (again.float() - x.float()).abs().max() < 0.05
    twice = rotate_pairs_kernel(rotate_pairs_kernel(x, cos, sin, back=False), cos, sin, back=False)
    assert (twice.float() - x.float()).abs().max() > 0.5


def test_what_it_cannot_rotate_is_listed():
    x = torch.ones(2, 2, 3, 7, device=DEVICE)
    with pytest.raises(ValueError, match=r"x is torch\.float32") as error:
        rotate_pairs_kernel(x, *tables((2, 2, 7)), back=False)
    assert "x has shape [2, 2, 3, 7] (legal: [A, B, heads, D], D even)" in str(error.value)
    with pytest.raises(ValueError, match=r"sin has shape \[3, 2, 8\] \(legal: \[2, 2, 8\], or 1\)"):
        rotate_pairs_kernel(x.new_ones(2, 2, 3, 8).bfloat16(), tables((2, 1, 8))[0], tables((3, 2, 8))[0], back=False)


def test_no_tokens():
    empty = torch.empty(0, 1, 2, 8, dtype=torch.bfloat16, device=DEVICE)
    assert rotate_pairs_kernel(empty, *tables((0, 1, 8)), back=False).shape == (0, 1, 2, 8)


def test_the_registered_operator_has_a_faithful_fake():
    x = torch.randn(3, 2, 5, 16).to(DEVICE, torch.bfloat16)
    tests = ("test_schema", "test_faketensor")
    found = torch.library.opcheck(torch.ops.qarl.rotate_pairs.default, (x, *tables((3, 1, 16)), True), test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}
