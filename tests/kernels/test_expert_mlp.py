import pytest
import torch

from qarl_kernels import GemmOperand, expert_mlp, quantize_weight, route_rows
from qarl_kernels.expert_mlp import combine_choices, swiglu
from qarl_kernels.low_rank import low_rank
from support.asserts import assert_bitwise_equal, assert_snr
from support.formats import FORMATS, uneven_weight

pytestmark = pytest.mark.usefixtures("poisoned_empty")

E4M3 = torch.float8_e4m3fn
T, TOP_K, E, H, INNER = 12, 2, 4, 256, 128
# BF16: another accumulation order flips a last bit here and there (one in 3072 elements: 60 to 80 dB), while a router
# weight rounded elsewhere moves half of them (50 dB). FP32 rounds nothing but the activations' FP8 codes.
MIN_DB = {torch.bfloat16: 56, torch.float32: 90}


def round_to(dtype):
    return lambda values: values.to(dtype).float()


def executed_weight(stored):
    """(W, scale): what the engine multiplies, rebuilt from the stored tensors by the formats' formulas.

    Of nvfp4 the scale is the expert's 1 / G, which Marlin multiplies by the sum or by the router weight.
    """
    fmt = stored.format
    if not fmt.is_quantized:
        return stored.tensors["weight"].float(), None
    if fmt.weight_kind == "nvfp4":
        scale, packed = stored.tensors["weight_scale"].float(), stored.tensors["weight_packed"].int()
        codes = torch.stack([packed % 16, packed // 16], -1).flatten(-2)
        sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8] * torch.where(codes < 8, 1, -1)
        return sizes * scale.repeat_interleave(16, -1), 1 / stored.tensors["weight_global_scale"]
    if fmt.weight_kind == "int":
        scale, codes = stored.tensors["weight_scale"], stored.codes().float()
        if fmt.activation_kind == "none":
            return (codes * scale.float().repeat_interleave(fmt.group_size, -1)).bfloat16().float(), None
        channel = torch.maximum(scale.float().amax(-1, keepdim=True) / 448, torch.tensor(1 / (448 * 512)))
        scale8 = ((scale.float() / channel).to(E4M3).float() / 8).to(E4M3).float()
        return (codes * scale8.repeat_interleave(fmt.group_size, -1)).to(E4M3).float(), channel * 8
    return stored.tensors["weight"].float(), stored.tensors.get("weight_scale", stored.tensors.get("weight_scale_inv"))


def one_token_gemm(x, weight, scale, fmt, *, after_swiglu=False):
    """FP32 accumulator of one token and one expert's weight [N, K]; the caller rounds it."""
    if fmt.activation_kind == "none":
        sums = (weight.double() @ x.double()).float()
        return sums if scale is None or after_swiglu else sums * scale
    if fmt.activation_kind == "fp8_token":
        token_scale = torch.maximum(x.abs().max() / 448, torch.tensor(1 / (448 * 512)))
        a8 = (x / token_scale).to(E4M3)
        return scale[:, 0] * (token_scale * (weight.double() @ a8.double()).float())
    if fmt.activation_kind == "int8_token":
        amax = torch.maximum(x.abs().max(), torch.tensor(1e-10))
        factor = x * (torch.tensor(127.0) / amax)
        codes = torch.sign(factor) * torch.floor(factor.abs().double() + 0.5)
        return scale[:, 0] * (amax / torch.tensor(127.0) * (weight.double() @ codes.double()).float())
    total = torch.zeros(len(weight))
    for block in range(len(x) // 128):
        columns = slice(128 * block, 128 * (block + 1))
        amax = x[columns].abs().max()
        if after_swiglu:
            group_scale = torch.maximum(amax / 448, torch.tensor(1 / (448 * 512)))
        else:
            group_scale = torch.maximum(amax, torch.tensor(1e-10)) / 448
        a8 = (x[columns] / group_scale).to(E4M3)
        block_scale = scale[:, block].repeat_interleave(128)[: len(weight)]
        total = total + (weight[:, columns].double() @ a8.double()).float() * group_scale * block_scale
    return total


def token_by_token(x, index, router_weight, gate_up, down, mistake=""):
    """The expert MLP as the engine's kernels compute it, one choice at a time; `mistake` plants one."""
    fmt, rounded = gate_up.format, round_to(x.dtype)
    (w13, s13), (w2, s2) = executed_weight(gate_up), executed_weight(down)
    pick = lambda scale, expert: None if scale is None else scale[expert]  # noqa: E731
    out = torch.zeros(x.shape)
    for token in range(len(x)):
        for choice in range(index.shape[1]):
            expert, weight = int(index[token, choice]), router_weight[token, choice]
            row = x[token].float() * (weight if mistake == "router weight before fc1" else 1)
            c1 = rounded(one_token_gemm(row, w13[expert], pick(s13, expert), fmt))
            gate, up = c1.chunk(2) if mistake != "gate and up swapped" else c1.chunk(2)[::-1]
            silu = gate / (1 + torch.exp(-gate))
            fused = (fmt.weight_kind == "fp8_blocks") != (mistake == "swiglu rounded elsewhere")
            hidden = silu * up if fused else rounded(rounded(silu) * up)
            if mistake == "router weight before fc2":
                hidden = rounded(hidden * weight)
            accumulator = one_token_gemm(hidden, w2[expert], pick(s2, expert), fmt, after_swiglu=True)
            if "before" in mistake:
                term = rounded(accumulator * (pick(s2, expert) if fmt.weight_kind == "nvfp4" else 1))
            else:
                factor = pick(s2, expert) if fmt.weight_kind == "nvfp4" else 1
                term = weighted(accumulator, weight, factor, fmt, rounded, mistake)
            out[token] += term
    return rounded(out)


def weighted(accumulator, weight, factor, fmt, rounded, mistake):
    if mistake == "no router weight":
        return rounded(accumulator * factor)
    place = {"w4a16": "rounded product", "w3a16": "rounded product", "nvfp4": "rounded product"}
    place |= {"w4a8": "sum", "fp8_channel": "sum"}
    where = place.get(fmt.name, "accumulator")
    if mistake.startswith("router weight at the "):
        where = mistake.removeprefix("router weight at the ")
    if where == "rounded product":
        return rounded(rounded(accumulator) * rounded(weight * factor))
    if where == "product of a rounded expert":
        return rounded(rounded(accumulator * factor) * rounded(weight))
    if where == "sum":
        return weight * rounded(accumulator * factor)
    return rounded(accumulator * factor * weight)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request):
    return request.param


def make_case(fmt, dtype):
    """Expert 2 gets no token, expert 0 most."""
    x = torch.randn(T, H).to(dtype)
    index = torch.stack([torch.tensor([0, 3] if token % 3 else [1, 0]) for token in range(T)])
    router_weight = torch.rand(T, TOP_K) + 0.1
    router_weight = router_weight / router_weight.sum(-1, keepdim=True)
    stored = [quantize_weight(3 * uneven_weight(E, rows, columns), fmt) for rows, columns in ((256, H), (H, INNER))]
    return x, index, router_weight, *stored


def run(x, index, router_weight, gate_up, down):
    fc1, fc2 = (GemmOperand.from_weight(stored, x.dtype) for stored in (gate_up, down))
    return expert_mlp(x, index, router_weight, fc1, fc2)


def test_the_mlp_is_the_engines_token_by_token(fmt, dtype):
    case = make_case(fmt, dtype)
    result = run(*case)
    assert (result.shape, result.dtype) == ((T, H), dtype)
    assert_snr(result, token_by_token(*case), MIN_DB[dtype])


# What a mistake changes, if anything: in FP32 nothing is rounded, and what is linear may be exchanged; fp8_block's
# second GEMM takes its input's scale out, so a weight before it is the same as one after it.
ROUNDING_MISTAKES = [
    ("w4a16", "router weight before fc2"),
    ("w4a8", "router weight before fc2"),
    ("fp8_channel", "router weight before fc2"),
    ("bf16", "router weight before fc2"),
    ("w4a16", "router weight at the sum"),
    ("w4a16", "router weight at the accumulator"),
    ("w4a8", "router weight at the rounded product"),
    ("w4a8", "router weight at the accumulator"),
    ("fp8_channel", "router weight at the rounded product"),
    ("fp8_channel", "router weight at the accumulator"),
    ("fp8_block", "router weight at the sum"),
    ("int8", "router weight before fc2"),
    ("int8", "router weight at the sum"),
    ("int8", "router weight at the rounded product"),
    ("int8", "swiglu rounded elsewhere"),
    ("fp8_block", "router weight at the rounded product"),
    ("bf16", "router weight at the sum"),
    ("nvfp4", "router weight before fc2"),
    ("nvfp4", "router weight at the product of a rounded expert"),
    ("nvfp4", "router weight at the sum"),
    ("nvfp4", "router weight at the accumulator"),
    ("nvfp4", "swiglu rounded elsewhere"),
    ("w4a16", "swiglu rounded elsewhere"),
    ("w4a8", "swiglu rounded elsewhere"),
    ("fp8_block", "swiglu rounded elsewhere"),
]


@pytest.mark.parametrize(("key", "mistake"), ROUNDING_MISTAKES)
def test_rounding_in_another_place_is_noticed(key, mistake):
    case = make_case(FORMATS[key], torch.bfloat16)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(run(*case), token_by_token(*case, mistake), MIN_DB[torch.bfloat16])


@pytest.mark.parametrize("mistake", ["router weight before fc1", "gate and up swapped", "no router weight"])
def test_another_order_of_operations_is_noticed(fmt, dtype, mistake):
    case = make_case(fmt, dtype)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(run(*case), token_by_token(*case, mistake), 20)


def test_an_expert_without_tokens_does_not_matter(fmt):
    x, index, router_weight, gate_up, down = make_case(fmt, torch.bfloat16)
    before = run(x, index, router_weight, gate_up, down)
    for stored in (gate_up, down):
        for tensor in stored.tensors.values():
            tensor[2].zero_()
    assert_bitwise_equal(run(x, index, router_weight, gate_up, down), before)


def test_the_order_of_tokens_does_not_matter_to_a_token(fmt):
    x, index, router_weight, *stored = make_case(fmt, torch.float32)
    order = torch.randperm(T)
    moved = run(x[order], index[order], router_weight[order], *stored)
    assert_snr(moved, run(x, index, router_weight, *stored)[order], MIN_DB[torch.float32])


def test_no_tokens_and_no_choice_for_an_expert(fmt, dtype):
    x, index, router_weight, *stored = make_case(fmt, dtype)
    nothing = run(x[:0], index[:0], router_weight[:0], *stored)
    assert (nothing.shape, nothing.dtype) == ((0, H), dtype)
    one = run(x[:1], index[:1, :1], router_weight[:1, :1], *stored)
    assert_snr(one, token_by_token(x[:1], index[:1, :1], router_weight[:1, :1], *stored), MIN_DB[dtype])


def test_rows_are_sorted_by_expert_and_stable():
    # Choices in order: 2 0 | 1 2 | 0 2; expert 0 has positions 1 and 4, expert 1 has 2, expert 2 has 0, 3, 5.
    routed = route_rows(torch.tensor([[2, 0], [1, 2], [0, 2]]), num_experts=5)
    assert routed.order.tolist() == [1, 4, 2, 0, 3, 5]
    assert routed.inverse.tolist() == [3, 0, 2, 4, 1, 5]
    assert (routed.offsets.tolist(), routed.offsets.dtype) == ([0, 2, 3, 6, 6, 6], torch.int32)


@pytest.mark.parametrize("key", FORMATS)
def test_a_very_negative_gate_has_a_gradient(key):
    gates = torch.tensor([-1.0, -88.0, -89.0, -200.0, -1000.0])
    hidden = torch.cat([gates, torch.full_like(gates, 2.0)]).requires_grad_()
    swiglu(hidden[None], FORMATS[key]).sum().backward()
    sigmoid = gates.double().sigmoid()
    slope = sigmoid * (1 + gates.double() * (1 - sigmoid))
    torch.testing.assert_close(hidden.grad, torch.cat([2 * slope, gates * sigmoid]).float(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("key", [key for key, fmt in FORMATS.items() if fmt.router_weight != "weighted_sum"])
def test_what_an_adapter_of_down_adds_is_rounded_after_its_router_weight(key):
    fmt, weight = FORMATS[key], torch.rand(4, TOP_K, 1)
    choices, added = torch.randn(4, TOP_K, 64).bfloat16(), torch.randn(4, TOP_K, 64)
    combined = combine_choices(choices, weight, fmt, torch.bfloat16, added)
    # BF16 plus BF16 is rounded to BF16: once a choice, and in the sum over them.
    alone = (combine_choices(choices[:, k, None], weight[:, k, None], fmt, torch.bfloat16) for k in range(TOP_K))
    first, second = (base + (added * weight)[:, k].bfloat16() for k, base in enumerate(alone))
    assert_bitwise_equal(combined, first + second)


def test_an_adapters_product_is_not_rounded_where_fp32_is_asked_for():
    # Small integers: sums are exact, and 257 needs more bits than BF16 has.
    x, a = torch.tensor([[1.0, 16.0]]).bfloat16(), torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]).bfloat16()
    b = torch.tensor([[[1.0, 16.0]]]).bfloat16()
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    assert low_rank(x, (a, b), offsets, out_dtype=torch.float32).tolist() == [[257.0]]
    assert low_rank(x, (a, b), offsets).tolist() == [[256.0]]
