"""Which calls of vLLM's Marlin operators the decode kernels take, on a CPU, by the operators' own signatures."""

import inspect

import pytest
import torch

pytest.importorskip("vllm")

# isort: split
import qarl_nemo.train  # noqa: F401 hides what CPU vLLM brings broken

# isort: split
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from qarl_kernels.decode_experts import BLOCK_ROWS, decode_experts
from qarl_kernels.decode_linear import decode_linear
from qarl_kernels.integer import quantize_integer
from qarl_nemo.refit import engine_decode, engine_decode_linear
from support.asserts import assert_bitwise_equal
from support.marlin import pack_marlin, sort_rows

K, N, GROUP, TOP_K = 256, 128, 64, 2
# Places of bias, the activation's scale and the whole tensor's, zeros, groups and their order.
BESIDE = (3, 5, 6, 7, 8, 9)
NAMES = ("a", "c", "b_q_weight", "b_bias", "b_scales", "a_scales", "global_scale", "b_zeros", "g_idx", "perm",
         "workspace", "b_q_type")  # fmt: skip


class Dense:
    """A dense layer's call, with operands as vLLM's int4 layers give them."""

    operator, kernel, switch = "marlin_gemm", "decode_linear.linear_kernel", engine_decode_linear.SWITCH
    layers = "int4 layers"
    install, known = map(staticmethod, (engine_decode_linear.decode_int4_linear, engine_decode_linear._has_kernels))

    def __init__(self, rows=5):
        codes, scale = quantize_integer(torch.randn(1, N, K) / 16, 4, GROUP, "clipped_range")
        words, scale = (part[0] for part in pack_marlin(codes, scale))
        empty = torch.empty(0, dtype=torch.int32)
        x = torch.randn(rows, K).bfloat16()
        self.operands = [x, None, words, None, scale, None, None, empty, empty, empty, empty, scalar_types.uint4b8]
        self.named = {"size_m": rows, "size_n": N, "size_k": K, "is_k_full": True}

    def expected(self):
        return decode_linear(self.operands[0], self.operands[2], self.operands[4])

    def as_other_type(self):
        self.operands[11] = scalar_types.uint8b128

    def with_many_rows(self):
        self.operands[0] = torch.randn(33, K).bfloat16()


class Experts:
    """A call of experts."""

    operator, kernel, switch = "moe_wna16_marlin_gemm", "decode_experts.decode_kernel", engine_decode.SWITCH
    layers = "int4 experts"
    install, known = map(staticmethod, (engine_decode.decode_int4_experts, engine_decode._has_kernel))

    def __init__(self):
        codes, scale = quantize_integer(torch.randn(4, N, K) / 16, 4, GROUP, "clipped_range")
        words, scale = pack_marlin(codes, scale)
        self.rows = sort_rows(torch.tensor([[0, 3], [1, 3], [2, 0]]), 4)
        self.weight, self.out = torch.rand(3, TOP_K), torch.zeros(3 * TOP_K, N).bfloat16()
        x = torch.randn(3, K).bfloat16()
        self.operands = [x, self.out, words, None, scale, *[None] * 5, torch.empty(0), *self.rows, self.weight]
        self.named = {"moe_block_size": BLOCK_ROWS, "top_k": TOP_K, "mul_topk_weights": True}
        self.named |= {"b_q_type": scalar_types.uint4b8, "size_m": 3, "size_n": N, "size_k": K, "is_k_full": True}
        self.named |= {"use_atomic_add": False, "use_fp32_reduce": True, "is_zp_float": False}

    def expected(self):
        return decode_experts(self.operands[0], self.operands[2], self.operands[4], self.rows, TOP_K, self.weight)

    def as_other_type(self):
        self.named["b_q_type"] = scalar_types.uint8b128

    def with_many_rows(self):
        self.named["moe_block_size"] = 2 * BLOCK_ROWS


@pytest.fixture(params=[Dense, Experts], ids=lambda kind: kind.__name__.lower())
def call(request, monkeypatch):
    """A call. In place of vLLM's operator, one with its signature keeps in `marlins` what it is given."""
    torch.manual_seed(0)
    case = request.param()
    case.marlins = []
    signature = inspect.signature(getattr(ops, case.operator))

    def marlin(*operands, **named):
        signature.bind(*operands, **named)
        case.marlins.append((operands, named))
        return "marlin's"

    monkeypatch.setattr(ops, case.operator, marlin)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    monkeypatch.setattr(f"qarl_kernels.ops.{case.kernel}", lambda *_: "a kernel")
    monkeypatch.delenv(case.switch, raising=False)
    case.run = lambda: getattr(ops, case.operator)(*case.operands, **case.named)
    for cached in (case.install, case.known):
        cached.cache_clear()
    yield case
    for cached in (case.install, case.known):
        cached.cache_clear()


def is_marlins(call):
    """Whether Marlin alone gets the call, as it was given."""
    call.marlins.clear()
    result = call.run()
    return result == "marlin's" and call.marlins == [(tuple(call.operands), call.named)]


def test_a_few_rows_of_int4_are_the_kernels(call):
    expected = call.expected()
    call.install()
    call.install()
    assert_bitwise_equal(call.run(), expected)
    assert not call.marlins


@pytest.mark.parametrize("change", ["as_other_type", "with_many_rows"])
def test_another_type_and_larger_batches_are_marlins(call, change):
    call.install()
    getattr(call, change)()
    assert is_marlins(call)


def test_rows_and_scales_of_another_precision_are_marlins(call):
    call.install()
    for place in (0, 4):
        kept = call.operands[place]
        call.operands[place] = kept.half()
        assert is_marlins(call)
        call.operands[place] = kept


@pytest.mark.parametrize("place", BESIDE)
def test_whatever_else_a_layer_has_is_marlins(call, place):
    call.install()
    call.operands[place] = torch.ones(N)
    assert is_marlins(call)


def test_experts_without_an_output_are_marlins(call):
    call.install()
    call.operands[1] = None
    assert is_marlins(call) == isinstance(call, Experts)


def test_rows_that_a_kernel_cannot_read_are_marlins(call):
    call.install()
    rows = len(call.operands[0])
    apart, odd = torch.ones(rows, 2 * K).bfloat16()[:, :K], torch.ones(rows * K + 1).bfloat16()[1:].view(rows, K)
    for call.operands[0] in (apart, odd):
        assert is_marlins(call)


@pytest.mark.parametrize("call", [Dense], indirect=True)
def test_operands_that_a_layer_names_are_marlins(call):
    """vLLM's dense FP4 and FP8 layers name theirs."""
    call.install()
    call.named |= dict(zip(NAMES, call.operands, strict=True))
    call.operands = []
    assert is_marlins(call)


@pytest.mark.parametrize("cuda", [True, False])
def test_all_is_marlins_off_cuda_and_where_someone_says_so(call, monkeypatch, cuda):
    monkeypatch.setenv(call.switch, "0" if cuda else "1")
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: cuda)
    before = getattr(ops, call.operator)
    call.install()
    assert getattr(ops, call.operator) is before


def test_a_kernel_that_cannot_be_compiled_leaves_all_to_marlin_and_says_so_once(call, monkeypatch):
    def fail(*_):
        raise RuntimeError("no NVRTC")

    monkeypatch.setattr(f"qarl_kernels.ops.{call.kernel}", fail)
    call.install()
    with pytest.warns(UserWarning, match=rf"{call.layers} decode by Marlin, since .* could not be compiled: no NVRTC"):
        assert is_marlins(call)
    assert is_marlins(call)


def test_a_gpu_without_the_kernel_leaves_all_to_marlin(call, monkeypatch):
    monkeypatch.setattr(f"qarl_kernels.ops.{call.kernel}", lambda *_: None)
    call.install()
    assert is_marlins(call)
