"""Every public operator of the kernels, called as layers, engines and refits call it, with the sizes of real models.

The device is the described one of `device.py`: nothing is computed, so sizes cost nothing. A single token and a single
expert are among them, because Triton compiles an argument that is 1 as a constant.
"""

import json
from collections.abc import Iterator
from importlib import resources

import torch
from torch import Tensor

import qarl_kernels as kernels
from qarl_formats import SCALE_CONVENTIONS, QuantFormat, get_format
from qarl_formats.presets import DEFAULT_FORMAT, FORMAT_NAMES, NARROW_NAMES, NESTING
from qarl_kernels.gemm import GemmOperand
from qarl_kernels.low_rank import ExpertAdapters
from qarl_kernels.ops.activations import FLOATS, MAX_COLUMNS, quantize_group, quantize_token
from qarl_kernels.ops.adapted_mlp import adapted_mlp_backward, adapted_mlp_forward
from qarl_kernels.ops.checksum import weighted_word_sum
from qarl_kernels.ops.gemm_checks import WEIGHT_ROUNDINGS
from qarl_kernels.ops.grouped_gemm import (
    grouped_gemm_bf16,
    grouped_gemm_channel,
    grouped_gemm_fp8_block,
    launch_grouped_gemm,
)
from qarl_kernels.ops.int4_gemm import GROUP_SIZES, grouped_gemm_int4
from qarl_kernels.ops.launch import TileConfig
from qarl_kernels.ops.mlp import expert_mlp_backward, expert_mlp_forward
from qarl_kernels.ops.norm import MAX_NORM_COLUMNS
from qarl_kernels.ops.swiglu import swiglu_quantize_token
from qarl_kernels.ops.swiglu_backward import ACTIVATION_KINDS, swiglu_backward
from qarl_kernels.ops.token_rounding import TOKEN_DTYPES
from qarl_kernels.ops.wgrad import grouped_wgrad

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 8, 8
TOKENS = (1001, 1)
# N, K, E and rows per expert of problems without a tuned tile: few rows of many experts, and one dense layer.
OTHER_PROBLEMS = ((1024, 2048, 512, 16), (1536, 2048, 128, 1024), (2048, 768, 1, 512))


def tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return a tensor of the described GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def tuned_problems() -> dict[str, set[tuple[int, ...]]]:
    """Return, by device, N, K, E and rows per expert of every problem that its table of tuned tiles has."""
    tables = [path for path in (resources.files("qarl_kernels.ops") / "tuned").iterdir() if path.suffix == ".json"]
    return {path.stem: {_sizes(key) for key in json.loads(path.read_text())} for path in tables}


def _sizes(key: str) -> tuple[int, ...]:
    return tuple(int(size[1:]) for size in key.split("/")[1:])


def formats() -> Iterator[QuantFormat]:
    """Every format, with every group size and nested in every other; the default one with every scale convention."""
    for name in (*FORMAT_NAMES, *NARROW_NAMES):
        fmt = get_format(name)
        yield fmt
        yield from (get_format(name, group_size=size) for size in fmt.group_sizes if size != fmt.group_size)
        nests = NESTING if fmt.group_sizes and 8 % fmt.num_bits == 0 else ()
        yield from (get_format(name, nested_in=outer) for outer in nests)
    yield from (get_format(DEFAULT_FORMAT, scale_convention=convention) for convention in SCALE_CONVENTIONS)


def call_weight_operators() -> None:
    """Quantize weights of every format and prepare them for GEMMs, in the forward and in the backward."""
    for fmt in formats():
        call_quantizers(fmt, tensor(16, 2 * INNER, HIDDEN))
    for fmt in map(get_format, FORMAT_NAMES):
        call_quantizers(fmt, tensor(16, HIDDEN, INNER))
        # Rows of 32768 are the longest that stay in registers.
        call_quantizers(fmt, tensor(512, 32768))
        unaligned = tensor(2 * INNER * HIDDEN + 1)[1:].view(2 * INNER, HIDDEN)
        kernels.quantize_weight(unaligned, fmt)
        kernels.largest(list(tensor(2, 2 * INNER, HIDDEN).unbind()))


def call_quantizers(fmt: QuantFormat, weight: Tensor) -> None:
    """Quantize a weight, alone and with its operand, and turn it back."""
    kernels.quantize_with_operand(weight, fmt)
    quantized = kernels.quantize_weight(weight, fmt)
    for packed in (False, True):
        kernels.backward_weight(kernels.gemm_operand(quantized, BF16, packed=packed), BF16)


def call_layers() -> None:
    """Run the layers of every format, forward and backward."""
    for fmt in map(get_format, FORMAT_NAMES):
        for packed in (False, True):
            fc1, fc2 = (
                kernels.gemm_operand(kernels.quantize_weight(tensor(EXPERTS, *shape), fmt), BF16, packed=packed)
                for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
            )
            if packed and not fc1.is_packed:
                continue
            for tokens in TOKENS:
                call_expert_mlp(tokens, fc1, fc2)
                call_expert_rows(tokens, fc1, fc2)
                call_dense_layer(tokens, fmt)
            # The smallest rank; smaller ones are filled up to it.
            call_adapted_mlp(TOKENS[0], fc1, fc2, rank=8)


def call_expert_mlp(tokens: int, fc1: GemmOperand, fc2: GemmOperand) -> None:
    """Run the expert MLP; with frozen weights its backward is another."""
    x, weight = tensor(tokens, HIDDEN), tensor(tokens, TOP_K, dtype=FP32)
    routed = kernels.route_rows(tensor(tokens, TOP_K, dtype=torch.int64), len(fc1.values))
    _, hidden = expert_mlp_forward(x, routed, weight, fc1, fc2)
    ran = [kernels.backward_weight(operand, BF16) for operand in (fc1, fc2)]
    expert_mlp_backward(x, x, hidden, routed, weight, *ran, fc1.format)
    adapted_mlp_backward(x, x, hidden, routed, weight, *ran, fc1.format, None)


def call_adapted_mlp(tokens: int, fc1: GemmOperand, fc2: GemmOperand, *, rank: int) -> None:
    """Run the expert MLP with adapters beside its weights."""
    x, weight = tensor(tokens, HIDDEN), tensor(tokens, TOP_K, dtype=FP32)
    routed = kernels.route_rows(tensor(tokens, TOP_K, dtype=torch.int64), len(fc1.values))
    sizes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    factors = [tensor(EXPERTS, *shape) for rows, columns in sizes for shape in ((rank, columns), (rows, rank))]
    adapters = ExpertAdapters.of(*factors)
    _, hidden = adapted_mlp_forward(x, routed, weight, fc1, fc2, adapters)
    ran = [kernels.backward_weight(operand, BF16) for operand in (fc1, fc2)]
    adapted_mlp_backward(x, x, hidden, routed, weight, *ran, fc1.format, adapters)


def call_expert_rows(tokens: int, fc1: GemmOperand, fc2: GemmOperand) -> None:
    """Run the halves of the expert MLP that run on different ranks; gradients go where Megatron keeps them, too."""
    routed = kernels.route_rows(tensor(tokens, TOP_K, dtype=torch.int64), len(fc1.values))
    rows = kernels.spread_rows(tensor(tokens, HIDDEN), routed.inverse, TOP_K)
    row_weight = tensor(len(rows), dtype=FP32)
    out, hidden = kernels.expert_rows(rows, routed.offsets, row_weight, fc1, fc2)
    kernels.combine_rows(out, routed.inverse, tensor(tokens, TOP_K, dtype=FP32), fc1.format)
    ran = [kernels.backward_weight(operand, BF16) for operand in (fc1, fc2)]
    common = (out, rows, hidden, routed.offsets, row_weight, *ran, fc1.format)
    kernels.expert_rows_backward(*common)
    for dtype in (BF16, FP32):
        into = tuple(list(tensor(*weight.shape, dtype=dtype).unbind()) for weight in ran)
        kernels.expert_rows_backward(*common, into)


def call_dense_layer(tokens: int, fmt: QuantFormat) -> None:
    """Run a dense layer, a stack of one expert, forward and backward."""
    operand = kernels.gemm_operand(kernels.quantize_weight(tensor(HIDDEN, HIDDEN), fmt), BF16).stacked()
    x = tensor(tokens, HIDDEN)
    for after_swiglu in (False, True):
        kernels.grouped_gemm(x, operand, kernels.one_group(x), after_swiglu=after_swiglu)
    kernels.grouped_gemm(x, operand, kernels.one_group(x), bias=tensor(HIDDEN))
    kernels.grouped_input_grad(x, kernels.backward_weight(operand, BF16), kernels.one_group(x))
    kernels.grouped_weight_grad(x, x, kernels.one_group(x))


def call_packed_nvfp4() -> None:
    """Quantize experts to NVFP4 and multiply by their packed codes."""
    quantized = kernels.quantize_weight(tensor(EXPERTS, 2 * INNER, HIDDEN), get_format("nvfp4"))
    operand = kernels.gemm_operand(quantized, BF16, packed=True)
    kernels.grouped_gemm(tensor(TOKENS[0], HIDDEN), operand, tensor(EXPERTS + 1, dtype=torch.int32))


def call_gemms(n: int, k: int, num_experts: int, rows: int) -> None:
    """Run every grouped GEMM on one problem, with the tile that the device's table or the operator has for it."""
    num_rows = num_experts * rows
    offsets = tensor(num_experts + 1, dtype=torch.int32)
    weightings = [{}, *({"row_weight": tensor(num_rows, dtype=FP32), "weight_rounding": at} for at in WEIGHT_ROUNDINGS)]
    x, grad, weight = tensor(num_rows, k), tensor(num_rows, n), tensor(num_experts, n, k)
    words = tensor(num_experts, n, k // 8, dtype=torch.int32)
    for weighting in weightings:
        grouped_gemm_bf16(x, weight, offsets, **weighting)
        for dtype, sizes in GROUP_SIZES.items():
            for size in sizes:
                scale = tensor(num_experts, n, k // size, dtype=dtype)
                grouped_gemm_int4(x, words, scale, offsets, **weighting)
    grouped_gemm_bf16(grad, weight, offsets, transposed=True)
    call_gemms_of_8_bits(n, k, offsets, num_rows)
    grouped_wgrad(grad, x, offsets)
    for dtype in (BF16, FP32):
        grouped_wgrad(grad, x, offsets, out=tensor(num_experts, n, k, dtype=dtype))
        grouped_wgrad(grad, x, offsets, out=list(tensor(num_experts, n, k, dtype=dtype).unbind()), accumulate=True)


def call_gemm_of_tile(config: TileConfig) -> None:
    """Run the BF16 GEMM with a given tile, as the tuner does."""
    offsets = tensor(EXPERTS + 1, dtype=torch.int32)
    weight = tensor(EXPERTS, INNER, HIDDEN)
    launch_grouped_gemm(tensor(TOKENS[0], HIDDEN), weight, offsets, tensor(TOKENS[0], INNER), config)


def call_gemms_of_8_bits(n: int, k: int, offsets: Tensor, num_rows: int) -> None:
    """Run the plain FP8 and INT8 GEMMs; for whole blocks the layers take those of `hopper_fp8.py`."""
    num_experts = len(offsets) - 1
    row_scale, column_scale = tensor(num_rows, 1, dtype=FP32), tensor(num_experts, n, 1, dtype=FP32)
    for dtype in (FP8, torch.int8):
        operands = tensor(num_rows, k, dtype=dtype), row_scale, tensor(num_experts, n, k, dtype=dtype), column_scale
        for channel_first in (False, True):
            grouped_gemm_channel(*operands, offsets, channel_first=channel_first)
        grouped_gemm_channel(*operands, offsets, channel_first=True, bias=tensor(n))
    grouped_gemm_channel(*operands, offsets, row_weight=tensor(num_rows, dtype=FP32))
    a8, w8 = tensor(num_rows, k, dtype=FP8), tensor(num_experts, n, k, dtype=FP8)
    scales = tensor(num_rows, k // 128, dtype=FP32), tensor(num_experts, -(-n // 128), k // 128, dtype=FP32)
    for row_weight in (None, tensor(num_rows, dtype=FP32)):
        grouped_gemm_fp8_block(a8, scales[0], w8, scales[1], offsets, row_weight=row_weight)


def call_row_operators() -> None:
    """Run what works on rows alone, up to the widest that it takes, and the checksum."""
    for tokens in TOKENS:
        for columns in (64, 128, HIDDEN, MAX_NORM_COLUMNS):
            call_norms(tensor(tokens, columns), tensor(columns))
        for heads in (32, 1):
            call_rotations(tensor(1, tokens, heads, 128), tensor(1, tokens, 128))
        for inner in (INNER, 77):
            gate = tensor(1, tokens, inner)
            kernels.swiglu_pair_backward(kernels.swiglu_pair(gate, gate), gate, gate)
        for dtype in FLOATS:
            call_activation_quantizers(tensor(tokens, MAX_COLUMNS, dtype=dtype))
        for kind in TOKEN_DTYPES:
            swiglu_quantize_token(tensor(tokens, 2 * MAX_COLUMNS), kind)
        for kind in ACTIVATION_KINDS:
            wide = tensor(tokens, MAX_COLUMNS), tensor(tokens, MAX_COLUMNS // 2), tensor(tokens, dtype=FP32)
            swiglu_backward(*wide, kind)
        for columns in (151_936, 32_003):
            call_logprobs(tensor(tokens, columns), tensor(tokens, dtype=torch.int64))
    for num_words in (1, 1 << 28):
        weighted_word_sum(tensor(num_words, dtype=torch.int32))


def call_norms(x: Tensor, weight: Tensor) -> None:
    """Normalize rows in both of the engine's orders, and differentiate."""
    for after_add in (False, True):
        kernels.rms_norm(x, weight, 1e-6, after_add=after_add)
    kernels.rms_norm_backward(x, x, weight, 1e-6)


def call_rotations(x: Tensor, table: Tensor) -> None:
    """Rotate heads [1, B, heads, D] there and back, and transposed, with tables [1, B, D]."""
    for back in (False, True):
        kernels.rotate_pairs(x, table, table, back=back)
        kernels.rotate_pairs(x.transpose(0, 1), table.transpose(0, 1), table.transpose(0, 1), back=back)


def call_logprobs(logits: Tensor, tokens: Tensor) -> None:
    """Score tokens and differentiate, without a temperature and with one."""
    for temperature in (1.0, 0.7):
        logprobs, _, log_z = kernels.token_logprobs(logits, tokens, temperature)
        kernels.token_logprobs_backward(logits, tokens, logprobs, log_z, logprobs, temperature)


def call_activation_quantizers(x: Tensor) -> None:
    """Quantize rows per token and per group, in every way that layers ask for."""
    for dense in (False, True):
        for kind in TOKEN_DTYPES:
            quantize_token(x, kind, dense=dense)
    for after_swiglu in (False, True):
        quantize_group(x, after_swiglu=after_swiglu)
