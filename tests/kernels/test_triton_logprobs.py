"""Log-probabilities, entropy and gradient of one pass over the logits, against float64 and against the reference."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qarl_kernels import token_logprobs_backward, token_logprobs_reference
from qarl_kernels.ops.logprobs import logprobs_backward_kernel, logprobs_kernel
from support.asserts import assert_bitwise_equal, assert_snr
from support.triton_interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Less than one step; whole steps; steps and a rest, odd and even; a real vocabulary.
SHAPES = [(5, 50), (2, 8192), (3, 9001), (4, 4112)] + ([] if INTERPRETED else [(1024, 151_936), (3, 151_937)])
TEMPERATURES = [1.0, 0.7]
INF, NAN = math.inf, math.nan


def make_case(rows, columns):
    """Rows that are flat, peaked, almost certain, and far from 0; tokens likely and unlikely ones."""
    scale = torch.tensor([1.0, 0.1, 4.0, 8.0, 2.0]).repeat(rows // 5 + 1)[:rows, None]
    logits = torch.randn(rows, columns) * scale + torch.tensor([0.0, -60.0, 30.0]).repeat(rows // 3 + 1)[:rows, None]
    tokens = torch.randint(columns, (rows,))
    tokens[::2] = logits[::2].argmax(-1)
    return logits.to(DEVICE, torch.bfloat16), tokens.to(DEVICE)


def exact(logits, tokens, temperature):
    """Of all rows at once in float64."""
    logprobs = (logits.double() / temperature).log_softmax(-1)
    log_z = (logits.double() / temperature).logsumexp(-1)
    return logprobs.gather(-1, tokens[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1), log_z


def assert_fp32(found, expected, largest):
    """Equal but for roundings of FP32: a few of numbers as large as the logits, 2^-22 of the largest of a row."""
    for name, mine, wanted in zip(("logprobs", "entropy", "log_z"), found, expected, strict=False):
        gap = (mine.double() - wanted.double()).abs() / largest.double()
        assert mine.dtype == torch.float32
        assert gap.max() <= 2.0**-22, f"{name}: {gap.max():.2e} of the largest logit at row {int(gap.argmax())}"


def largest_of(logits, temperature):
    # A row's logarithms are at least as large as these numbers: its width's is one of the sums.
    return (logits.float().abs().amax(-1) / temperature).clamp_min(math.log(logits.shape[1]))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_those_of_float64_and_of_the_reference(shape, temperature):
    logits, tokens = make_case(*shape)
    largest = largest_of(logits, temperature)
    found = logprobs_kernel(logits, tokens, temperature)
    assert_fp32(found, exact(logits, tokens, temperature), largest)
    # The reference's entropy is a sum of rounded products: on a CPU it is further from float64 than the kernel's.
    assert_fp32(found, token_logprobs_reference(logits, tokens, temperature), 8 * largest)
    wrong = {
        "another temperature": exact(logits, tokens, temperature * 1.0001),
        "a neighbour": exact(logits, (tokens + 1) % shape[1], temperature),
        "without one column in a hundred": exact(logits[:, shape[1] // 100 + 1 :], tokens * 0, temperature),
    }
    for values in wrong.values():
        with pytest.raises(AssertionError, match="of the largest logit"):
            assert_fp32(found, values, 8 * largest)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_each_value_alone_notices_a_wrong_one(temperature):
    logits, tokens = make_case(3, 9001)
    largest = largest_of(logits, temperature)
    found, right = logprobs_kernel(logits, tokens, temperature), exact(logits, tokens, temperature)
    wrong = exact(logits[:, :-1], tokens % 9000, temperature * 1.0001)
    for index in range(3):
        with pytest.raises(AssertionError, match="of the largest logit"):
            assert_fp32(found, [wrong[place] if place == index else right[place] for place in range(3)], largest)


def test_the_maximum_may_come_first_or_last():
    ramp = torch.linspace(-200, 200, 9001)
    logits = torch.stack([ramp, -ramp, ramp.roll(4500), 0 * ramp]).to(DEVICE, torch.bfloat16)
    tokens = torch.tensor([9000, 1, 4499, 8999], device=DEVICE)
    found = logprobs_kernel(logits, tokens, 1.0)
    assert_fp32(found, exact(logits, tokens, 1.0), largest_of(logits, 1.0))
    torch.testing.assert_close(found[1][3].item(), math.log(9001), rtol=1e-6, atol=0)


def almost_certain():
    """One row whose token has all but 1e-5, among logits whose roundings are three times as large."""
    logits = torch.full((1, 5000), 380.0)
    logits[0, 4500] = 400
    return logits.to(DEVICE, torch.bfloat16), torch.tensor([4500], device=DEVICE)


def test_the_entropy_of_an_almost_certain_row_keeps_its_digits():
    logits, tokens = almost_certain()
    found, wanted = (score(logits, tokens, 1.0)[1].item() for score in (logprobs_kernel, exact))
    assert abs(found / wanted - 1) < 0.01
    assert abs(exact(logits, tokens, 1.01)[1].item() / wanted - 1) > 0.1


# First and last column, and what stands there.
SPECIAL = {
    "masked": [(100, 100, -INF), (8000, 8000, -INF)],
    "masked first step": [(0, 4200, -INF), (7, 7, 1.0)],
    "masked token": [(7, 7, -INF)],
    "masked first step and token": [(0, 4200, -INF)],
    "all masked": [(0, 9000, -INF)],
    "infinite": [(100, 100, INF)],
    "infinite late": [(8900, 8900, INF)],
    "infinite token": [(7, 7, INF)],
    "nan": [(100, 100, NAN)],
    "nan late": [(8900, 8900, NAN)],
    "nan token": [(7, 7, NAN)],
    "largest finite": [(100, 100, 3.3e38), (8000, 8000, -3.3e38)],
    "all low": [(0, 9000, -1e4)],
}


@pytest.mark.parametrize("values", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_infinities_and_nan_are_the_references(values, temperature):
    logits, tokens = make_case(3, 9001)[0], torch.full((3,), 7, device=DEVICE)
    for first, last, value in values:
        logits[1, first : last + 1] = value
    logprobs, entropy, log_z = logprobs_kernel(logits, tokens, temperature)
    expected = token_logprobs_reference(logits, tokens, temperature)
    for mine, wanted in zip((logprobs, entropy), expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=2e-6, atol=2e-5, equal_nan=True)
    grad = torch.randn(3, device=DEVICE)
    # FP32 is the reference's on any device.
    wanted = token_logprobs_backward(logits.float(), tokens, logprobs, log_z, grad, temperature)
    logprobs_backward_kernel(logits, tokens, logprobs, log_z, grad, temperature)
    torch.testing.assert_close(logits.float(), wanted, rtol=2**-7, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_autograds_in_float64_rounded_once(shape, temperature):
    logits, tokens = make_case(*shape)
    wide, grad = logits.double().requires_grad_(), torch.randn(shape[0], device=DEVICE)
    (expected,) = torch.autograd.grad(exact(wide, tokens, temperature)[0], wide, grad.double())
    guarded = torch.full((shape[0] + 2, shape[1]), 7.0, dtype=torch.bfloat16, device=DEVICE)
    guarded[1:-1] = logits
    logprobs, _, log_z = logprobs_kernel(logits, tokens, temperature)
    logprobs_backward_kernel(guarded[1:-1], tokens, logprobs, log_z, grad, temperature)
    assert (guarded[[0, -1]] == 7).all()
    found = guarded[1:-1].double()
    # Half a unit of BF16, a rounding of FP32 numbers as large as log Z, and for the token one of 1.
    bound = (2.0**-8 + 2.0**-16) * expected.abs() + 2.0**-23 * grad.abs()[:, None] / temperature
    assert ((found - expected).abs() <= bound).all()
    assert_snr(found, expected, 48)
    for wrong in (expected * 1.02, expected.roll(1, 1), expected.roll(1, 0)):
        with pytest.raises(AssertionError, match="SNR"):
            assert_snr(found, wrong, 48)


def test_the_gradient_of_an_almost_certain_token_is_not_lost():
    logits, tokens = almost_certain()
    wanted = -math.expm1(exact(logits, tokens, 1.0)[0].item())
    logprobs, _, log_z = logprobs_kernel(logits, tokens, 1.0)
    # From log Z alone, which is rounded as 400 is, nothing would be left.
    assert 1 - (logits[0, 4500].float() - log_z).exp().item() < 0.1 * wanted
    logprobs_backward_kernel(logits, tokens, logprobs, log_z, torch.ones(1, device=DEVICE), 1.0)
    assert abs(logits[0, 4500].item() / wanted - 1) < 0.1


@pytest.mark.gpu
def test_rows_beyond_what_32_bits_can_address():
    if INTERPRETED:
        pytest.skip("needs 5 GB on a GPU")
    rows, columns = (1 << 31) // 151_936 + 3, 151_936
    logits = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    last, tokens = torch.randn(2, columns).to(logits), torch.randint(columns, (rows,), device=DEVICE)
    logits[-2:] = last
    found = logprobs_kernel(logits, tokens, 1.0)
    alone = logprobs_kernel(last, tokens[-2:], 1.0)
    for mine, wanted in zip(found, alone, strict=True):
        assert_bitwise_equal(mine[-2:], wanted)
        assert not torch.equal(mine[:2], wanted)
    grad = torch.ones(rows, device=DEVICE)
    logprobs_backward_kernel(logits, tokens, found[0], found[2], grad, 1.0)
    logprobs_backward_kernel(last, tokens[-2:], alone[0], alone[2], grad[-2:], 1.0)
    assert_bitwise_equal(logits[-2:], last)


def test_what_it_cannot_take_is_listed():
    logits = torch.zeros(2, 5, device=DEVICE)
    rows = torch.zeros(3, device=DEVICE)
    with pytest.raises(ValueError, match=r"logits is torch\.float32") as error:
        logprobs_backward_kernel(logits, rows, rows, rows, rows.double(), 0.0)
    for problem in (
        "tokens is torch.float32 (legal: torch.int64)",
        "log_z has shape [3] (legal: [2])",
        "grad is torch.float64 (legal: torch.float32)",
        "temperature=0.0 (legal: above 0)",
    ):
        assert problem in str(error.value)
    with pytest.raises(ValueError, match="logits has 0 columns"):
        logprobs_kernel(logits[:, :0].bfloat16(), rows[:2].long(), 1.0)


def test_no_rows_and_tracing():
    logits, tokens = make_case(3, 70)
    nothing = logprobs_kernel(logits[:0], tokens[:0], 0.7)
    assert [list(part.shape) for part in nothing] == [[0]] * 3
    logprobs_backward_kernel(logits[:0], tokens[:0], nothing[0], nothing[2], nothing[0], 0.7)
    checks = ("test_schema", "test_faketensor")
    logprobs, _, log_z = logprobs_kernel(logits, tokens, 0.7)
    torch.library.opcheck(torch.ops.qarl.logprobs, (logits, tokens, 0.7), test_utils=checks)
    arguments = (logits, tokens, logprobs, log_z, logprobs, 0.7)
    torch.library.opcheck(torch.ops.qarl.logprobs_backward, arguments, test_utils=checks)
    with FakeTensorMode():
        logits = torch.empty(7, 512, dtype=torch.bfloat16, device=DEVICE)
        assert [list(part.shape) for part in torch.ops.qarl.logprobs(logits, logits[:, 0].long(), 1.0)] == [[7]] * 3
