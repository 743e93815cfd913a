import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qarl_kernels import get_format, route_rows
from qarl_kernels.expert_mlp import combine_choices
from qarl_kernels.ops.activations import quantize_token
from qarl_kernels.ops.combine import ROUTER_WEIGHTS, combine_rows
from qarl_kernels.ops.routing import spread_rows
from qarl_kernels.ops.swiglu import swiglu
from support.asserts import assert_bitwise_equal, assert_snr
from support.triton_interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Tokens, choices per token, experts, H.
SHAPES = (
    [(12, 2, 4, 256), (5, 8, 128, 64), (3, 1, 300, 40)] if INTERPRETED else [(2048, 8, 128, 2048), (999, 6, 300, 1536)]
)
FORMATS = {"rounded_product": "w4a16", "weighted_sum": "fp8_channel", "on_accumulator": "bf16"}


@pytest.fixture(params=SHAPES, ids=str)
def routed(request):
    """(RoutedRows, top-k indices, weights, H); expert 1 gets nothing, expert 0 most."""
    tokens, top_k, experts, columns = request.param
    scores = torch.rand(tokens, experts)
    scores[:, 0] += 0.7
    scores[:, 1] = -1
    index = scores.topk(top_k).indices.to(DEVICE)
    weights = torch.rand(tokens, top_k).to(DEVICE) / top_k
    return route_rows(index, experts), index, weights, columns


def sorted_rows(routed, columns):
    rows = torch.randn(len(routed.order), columns) * torch.exp2(torch.randint(-2, 3, (len(routed.order), 1)).float())
    return rows.to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("expert", [-1, 4, 65536])
def test_choices_of_no_expert_are_refused_where_looking_costs_nothing(expert):
    with pytest.raises(ValueError, match=rf"topk_index has experts from .*{expert}.* \(legal: 0 .. 3\)"):
        route_rows(torch.tensor([[0, 3], [1, expert]]), 4)


def test_empty_batches():
    routed = route_rows(torch.zeros(0, 2, dtype=torch.int64, device=DEVICE), 3)
    x = torch.zeros(0, 64, dtype=torch.bfloat16, device=DEVICE)
    assert spread_rows(x, routed.inverse, 2).shape == (0, 64)
    assert combine_rows(x, routed.inverse, None, None, top_k=2).shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_every_token_is_copied_to_its_experts(routed, dtype):
    routed, index, _, columns = routed
    top_k = index.shape[1]
    x = torch.randn(len(index), columns).to(DEVICE, dtype)
    expected = x[routed.order // top_k]
    assert_bitwise_equal(spread_rows(x, routed.inverse, top_k), expected)
    if top_k > 1:
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(spread_rows(x, routed.order, top_k), expected)


@pytest.mark.parametrize("width", [1, 16])
def test_scales_are_copied_like_rows(routed, width):
    routed, index, _, _ = routed
    scale = torch.rand(len(index), width, device=DEVICE)
    expected = scale[routed.order // index.shape[1]]
    assert_bitwise_equal(spread_rows(scale, routed.inverse, index.shape[1]), expected)


def expected_sum(rows, routed, weights, mode):
    """The reference's sum; it multiplies FP32 accumulators itself, so `on_accumulator` is asked for weights of one."""
    choices = rows[routed.inverse].view(*weights.shape, -1)
    if mode == "on_accumulator":
        choices, weights = choices.float(), torch.ones_like(weights)
    return combine_choices(choices, weights.unsqueeze(-1), get_format(FORMATS[mode]), torch.bfloat16)


@pytest.mark.parametrize("mode", ROUTER_WEIGHTS)
def test_combine_is_bit_equal_to_the_reference(routed, mode):
    routed, _, weights, columns = routed
    rows = sorted_rows(routed, columns)
    rows[0] = -0.0
    given = None if mode == "on_accumulator" else weights
    actual = combine_rows(rows, routed.inverse, given, mode, top_k=weights.shape[1])
    assert_bitwise_equal(actual, expected_sum(rows, routed, weights, mode))
    others = [other for other in ROUTER_WEIGHTS if other != mode]
    for wrong in [expected_sum(rows, routed, weights, other) for other in others]:
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(actual, wrong)
    if mode == "on_accumulator":
        assert_bitwise_equal(combine_rows(rows, routed.inverse, None, None, top_k=weights.shape[1]), actual)


def test_the_plain_sum_is_the_gradient_of_the_copy(routed):
    routed, index, _, columns = routed
    grad_rows = sorted_rows(routed, columns)
    x = torch.zeros(len(index), columns, dtype=torch.float64, device=DEVICE, requires_grad=True)
    (expected,) = torch.autograd.grad(x[routed.order // index.shape[1]], x, grad_rows.double())
    actual = combine_rows(grad_rows, routed.inverse, None, None, top_k=index.shape[1])
    assert_snr(actual, expected, 45)
    if index.shape[1] > 1:
        with pytest.raises(AssertionError, match="SNR"):
            assert_snr(combine_rows(grad_rows, routed.order, None, None, top_k=index.shape[1]), expected, 45)


def test_errors_name_everything_wrong(routed):
    routed, index, weights, columns = routed
    rows = sorted_rows(routed, columns)
    with pytest.raises(ValueError, match=r"inverse is torch.int32 \(legal: torch.int64\)"):
        spread_rows(rows[: len(index)], routed.inverse.int(), index.shape[1])
    with pytest.raises(ValueError, match=r"x has 3 columns of torch.bfloat16 \(legal: rows of a multiple of 4 bytes\)"):
        spread_rows(rows[: len(index), :3].contiguous(), routed.inverse, index.shape[1])
    with pytest.raises(ValueError, match=r"weights are given for router_weight='on_accumulator'"):
        combine_rows(rows, routed.inverse, weights, "on_accumulator")
    with pytest.raises(ValueError, match=r"router_weight='sum' .*weights are missing .*top_k is None"):
        combine_rows(rows, routed.inverse, None, "sum")


def test_operators_are_registered_for_tracing():
    routed = route_rows(torch.tensor([[0, 1], [1, 2]], device=DEVICE), 3)
    weights = torch.rand(2, 2, device=DEVICE)
    rows = sorted_rows(routed, 64)
    x = rows[:2].contiguous()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    ops = torch.ops.qarl
    for operator, arguments in [
        (ops.spread_rows, (x, routed.inverse, 2)),
        (ops.combine_rows, (rows, routed.inverse, weights, "weighted_sum", 2)),
    ]:
        torch.library.opcheck(operator, arguments, test_utils=checks)
    with FakeTensorMode():
        inverse = torch.empty(14, dtype=torch.int64, device=DEVICE)
        x = torch.empty(7, 64, dtype=torch.bfloat16, device=DEVICE)
        rows = spread_rows(x, inverse, 2)
        assert rows.shape == (14, 64)
        assert combine_rows(rows, inverse, None, None, top_k=2).shape == x.shape


def test_the_operators_compile_into_one_graph_for_any_number_of_tokens():
    def quantized_copy_and_back(x, index, weights):
        routed = route_rows(index, 4)
        a8, scale = quantize_token(x)
        rows = spread_rows(a8, routed.inverse, 2).float() * spread_rows(scale, routed.inverse, 2)
        return combine_rows(swiglu(rows.bfloat16()), routed.inverse, weights, "weighted_sum")

    compiled = torch.compile(quantized_copy_and_back, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        x = torch.randn(tokens, 256, dtype=torch.bfloat16, device=DEVICE)
        index, weights = torch.randint(4, (tokens, 2), device=DEVICE), torch.rand(tokens, 2, device=DEVICE)
        assert_bitwise_equal(compiled(x, index, weights), quantized_copy_and_back(x, index, weights))
