"""Our kernels and the torch reference against vLLM 0.25.1's expert kernels, on the tensors that are published.

Weights, quantizers and SwiGLU must be the same bits; GEMMs and the whole MLP may differ by the order of their sums.
Set QARL_VLLM_RESULTS to a file to keep the figures as rows of docs/results.
"""

import datetime
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.asserts import assert_bitwise_equal

pytestmark = pytest.mark.gpu
vllm = pytest.importorskip("vllm", reason="needs vLLM 0.25.1", exc_type=ImportError)

import vllm._custom_ops as ops  # noqa: E402
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8  # noqa: E402
from vllm.model_executor.layers.quantization.utils.int8_utils import per_token_quant_int8  # noqa: E402
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (  # noqa: E402
    apply_fp4_marlin_linear,
    prepare_fp4_layer_for_marlin,
)

from qarl_kernels import (  # noqa: E402
    QuantizedWeight,
    fp8,
    gemm_operand,
    get_format,
    grouped_gemm,
    int8,
    one_group,
    quantize_weight,
)
from qarl_kernels.expert_mlp import swiglu  # noqa: E402
from qarl_kernels.gemm import GemmOperand  # noqa: E402
from qarl_kernels.gemm import grouped_gemm as reference_grouped_gemm  # noqa: E402
from qarl_kernels.integer import pack_int32  # noqa: E402
from qarl_kernels.ops import activations as kernels  # noqa: E402
from qarl_kernels.ops.swiglu import swiglu as swiglu_kernel  # noqa: E402
from qarl_kernels.ops.swiglu import swiglu_quantize_group, swiglu_quantize_token  # noqa: E402
from qarl_kernels.ops.weights import dequantize_operand  # noqa: E402
from qarl_nemo.metrics.results import append_results  # noqa: E402
from qarl_nemo.refit import convert_nvfp4  # noqa: E402
from qarl_nemo.refit.convert_nvfp4 import range_factor  # noqa: E402
from support.vllm.compare import ENGINES, case, equal_fraction, neighbours, sqnr_db, tokens  # noqa: E402
from support.vllm.cutlass import CompiledW4A8  # noqa: E402

MIN_MLP_DB = 45.0
MIN_FP32_SUMS_DB = 35.0
# One GEMM on the same quantized operands; vLLM's Triton kernel rounds fp8_channel's fc2 after the router weight.
MIN_GEMM_DB = 70.0
ROUNDED_ONCE_MORE = {("fp8_channel_triton", "fc2"): 45.0}


class Figures:
    """Figures by name; each is printed, those with `keep` become rows of docs/results."""

    def __init__(self):
        self.rows = []

    def note(self, name, value, *, unit="fraction", goal=None, keep=False):
        print(f"FIGURE {name:60} {value:.6g} {unit}")
        # Equal tensors have no finite ratio; the fraction of equal bits says it.
        if keep and math.isfinite(value):
            self.rows.append({"name": name, "value": value, "unit": unit, "op": ">=", "goal": goal})
        return value

    def compare(self, name, actual, expected, *, goal=None, keep=False):
        """Note how far two tensors are apart; returns the dB."""
        self.note(f"{name}_bit_equal_fraction".replace("_mlp_bit", "_bit"), equal_fraction(actual, expected), keep=keep)
        return self.note(f"{name}_sqnr_db", sqnr_db(actual, expected), unit="dB", goal=goal, keep=keep)


@pytest.fixture(scope="module")
def figures():
    figures = Figures()
    yield figures
    facts = {
        "hardware": f"1x {torch.cuda.get_device_name()}",
        "versions": {"torch": torch.__version__, "vllm": vllm.__version__},
        "command": "QARL_VLLM_RESULTS=docs/results/kernels.json python -m pytest tests/parity/test_vllm_kernels.py",
        "date": datetime.date.today().isoformat(),
    }
    if path := os.environ.get("QARL_VLLM_RESULTS"):
        append_results(Path(path), [row | facts for row in figures.rows])


@pytest.fixture(params=ENGINES)
def parts(request):
    return case(request.param)


def wrong_weight(parts, layer):
    """The zero point off by one; where there is none, the neighbouring row's or block's scales; in BF16 up for gate."""
    operand, stored = parts.reference_operands[layer], parts.stored[layer]
    if stored.format.weight_kind == "int":
        shifted = stored.codes().to(torch.bfloat16).unflatten(-1, (-1, 128)) + 1
        return (shifted * stored.tensors["weight_scale"].unsqueeze(-1)).flatten(-2)
    if operand.tensor_scale is not None:
        return replace(operand, values=operand.values.roll(1, 1)).effective_weight().to(torch.bfloat16)
    if operand.scale is None:
        return operand.values.roll(operand.values.shape[1] // 2, 1)
    return GemmOperand(operand.format, operand.values, operand.scale.roll(1, 1)).effective_weight().to(torch.bfloat16)


def test_weights_are_the_same_bits(parts, figures):
    """What vLLM's kernel multiplies by, read through the identity matrix, is what we dequantize."""
    fractions = []
    for layer in range(2):
        # A product with zeros turns -0 into 0.
        read = parts.engine.read_weight(layer) + 0.0
        ours = dequantize_operand(parts.operands[layer]) + 0.0
        fractions.append(equal_fraction(ours, read))
        assert_bitwise_equal(ours, read)
        assert_bitwise_equal(parts.reference_operands[layer].effective_weight().to(torch.bfloat16) + 0.0, read)
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(wrong_weight(parts, layer) + 0.0, read)
    figures.note(f"{parts.name}_weight_bit_equal_fraction", min(fractions), goal=1.0, keep=True)


def test_w4a8_values_and_channel_scales_are_the_same_bits():
    parts = case("w4a8_cutlass")
    for layer, operand in enumerate(parts.operands):
        read, scale = parts.engine.read_values(layer), parts.engine.channel_scales[layer]
        assert_bitwise_equal(operand.values.to(torch.bfloat16) + 0.0, read + 0.0)
        assert_bitwise_equal(operand.scale, scale)


def test_w4a8_weights_of_an_engine_with_torch_compile(figures):
    """There Inductor quantizes the group scales, multiplying by a reciprocal: not every bit is the same."""
    parts = case("w4a8_cutlass")
    compiled = CompiledW4A8(*parts.stored)
    equal = equal_fraction(compiled.read_values(0), parts.engine.read_values(0))
    scales = equal_fraction(compiled.channel_scales[0], parts.engine.channel_scales[0])
    figures.note("w4a8_vllm_cutlass_compiled_values_equal_fraction", equal, keep=True)
    figures.note("w4a8_vllm_cutlass_compiled_channel_scale_equal_fraction", scales, keep=True)
    out = compiled.mlp(parts.x, parts.index, parts.weight).out
    figures.compare("w4a8_vllm_cutlass_compiled_mlp", out, parts.stages.out)
    assert equal > 0.99


def assert_same_quantization(figures, name, ours, expected):
    scale = ours[1].view_as(expected[1])
    figures.note(f"{name}_values_equal_fraction", equal_fraction(ours[0], expected[0]))
    figures.note(f"{name}_scale_equal_fraction", equal_fraction(scale, expected[1]))
    assert_bitwise_equal(ours[0], expected[0])
    assert_bitwise_equal(scale, expected[1])


@pytest.mark.parametrize("origin", ["reference", "kernels"])
def test_activations_quantize_to_the_same_bits(origin, figures):
    x = tokens()
    quantize = {"reference": fp8, "kernels": kernels}[origin]
    by_token = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    by_group = per_token_group_quant_fp8(x, 128, use_ue8m0=False)
    assert_same_quantization(figures, f"quantize_token_{origin}", quantize.quantize_token(x), by_token)
    assert_same_quantization(figures, f"quantize_group_{origin}", quantize.quantize_group(x), by_group)
    by_reciprocal = (x.float() * (1 / by_token[1])).to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(by_reciprocal, by_token[0])


def test_int8_activations_quantize_to_the_same_bits(figures):
    """Dense layers: CUDA's kernel. Experts: Triton's, whose divisions our kernel repeats and the reference rounds."""
    x = tokens()
    by_dense, by_experts = ops.scaled_int8_quant(x)[:2], per_token_quant_int8(x)
    for origin, ours in (
        ("reference", int8.quantize_token(x, dense=True)),
        ("kernels", kernels.quantize_token(x, "int8_token", dense=True)),
    ):
        assert_same_quantization(figures, f"quantize_token_int8_dense_{origin}", ours, by_dense)
    ours = kernels.quantize_token(x, "int8_token", dense=False)
    assert_same_quantization(figures, "quantize_token_int8_experts_kernels", ours, by_experts)
    reference = int8.quantize_token(x, dense=False)
    torch.testing.assert_close(reference[1], by_experts[1], rtol=2**-22, atol=0)
    assert (reference[0].int() - by_experts[0].int()).abs().max() <= 1
    # Each has its own ties.
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(by_dense[0], by_experts[0])


def test_int8_gemms_are_the_same_bits(figures):
    """CUTLASS in dense layers, Triton in experts: sums of integers leave nothing to the order of a sum."""
    parts = case("int8_triton")
    assert_bitwise_equal(parts.kernels_fc1(), parts.stages.fc1)
    assert_bitwise_equal(parts.kernels_fc2(), parts.stages.fc2)
    x, fmt = tokens(), get_format("int8")
    stored = quantize_weight(parts.masters[0][0], fmt)
    rows, token_scale = ops.scaled_int8_quant(x)[:2]
    weight, scale = stored.tensors["weight"], stored.tensors["weight_scale"]
    theirs = ops.cutlass_scaled_mm(rows, weight.t(), scale_a=token_scale, scale_b=scale, out_dtype=torch.bfloat16)
    for operand in (gemm_operand(stored, torch.bfloat16), GemmOperand.from_weight(stored, torch.bfloat16)):
        on_kernels = operand.values.dtype == torch.int8
        multiply = grouped_gemm if on_kernels else reference_grouped_gemm
        ours = multiply(x, operand.stacked(), one_group(x))
        origin = "kernels" if on_kernels else "reference"
        equal = equal_fraction(ours, theirs)
        figures.note(f"int8_vllm_cutlass_dense_{origin}_bit_equal_fraction", equal, goal=1.0, keep=True)
        assert_bitwise_equal(ours, theirs)
        as_expert = GemmOperand(fmt, operand.values[None], operand.scale[None])
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(multiply(x, as_expert, one_group(x)), theirs)


@pytest.mark.parametrize("origin", ["reference", "kernels"])
def test_swiglu_is_the_same_bits(origin, figures):
    hidden = tokens()
    expected = torch.empty_like(hidden[:, :1024])
    torch.ops._C.silu_and_mul(expected, hidden)
    rounded = swiglu(hidden, get_format("bf16"))
    assert_bitwise_equal(swiglu_kernel(hidden) if origin == "kernels" else rounded, expected)
    by_token = ops.scaled_fp8_quant(expected, use_per_token_if_dynamic=True)
    ours = swiglu_quantize_token(hidden) if origin == "kernels" else fp8.quantize_token(rounded)
    assert_same_quantization(figures, f"swiglu_quantize_token_{origin}", ours, by_token)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(swiglu_kernel(hidden.roll(1024, 1)), expected)


@pytest.mark.parametrize("origin", ["reference", "kernels"])
def test_swiglu_before_groups_is_the_same_bits(origin, figures):
    hidden = tokens()
    expected = ops.silu_and_mul_per_block_quant(hidden, 128, torch.float8_e4m3fn)
    unrounded = swiglu(hidden, get_format("fp8_block"))
    ours = swiglu_quantize_group(hidden) if origin == "kernels" else fp8.quantize_group(unrounded, after_swiglu=True)
    assert_same_quantization(figures, f"swiglu_quantize_group_{origin}", ours, expected)
    rounded = fp8.quantize_group(unrounded.to(torch.bfloat16), after_swiglu=True)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(rounded[0], expected[0])


def test_dense_nvfp4_layers_multiply_the_sum_by_the_global_scale(figures):
    x, stored = tokens(), quantize_weight(case("nvfp4_marlin").masters[0][0], get_format("nvfp4"))
    packed, scale, divisor = stored.tensors.values()
    layer = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = stored.shape
    layer.params_dtype = torch.bfloat16
    for name, tensor in (("weight", packed), ("weight_scale", scale), ("weight_global_scale", 1.0 / divisor.max())):
        layer.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    prepare_fp4_layer_for_marlin(layer)
    held = layer.weight, layer.weight_scale, layer.weight_global_scale, layer.workspace
    theirs = apply_fp4_marlin_linear(x, *held, *stored.shape)
    for origin, multiply in (("kernels", grouped_gemm), ("reference", reference_grouped_gemm)):
        ours = multiply(x, gemm_operand(stored, torch.bfloat16).stacked(), one_group(x))
        assert figures.compare(f"nvfp4_vllm_marlin_dense_{origin}", ours, theirs, keep=True) >= MIN_GEMM_DB
    early = x @ stored.dequantize().mT
    assert figures.compare("nvfp4_vllm_marlin_dense_decompressed", early, theirs, keep=True) < MIN_GEMM_DB


@pytest.mark.parametrize("smaller", [1.0, 0.25])
def test_all_experts_are_converted_at_once_as_vllm_converts_each(smaller):
    """Also where no scale is the largest, as on a tensor parallel rank: then all are moved up by a power of two."""
    parts = case("nvfp4_marlin")
    layer, stored = torch.nn.Module(), []
    layer.params_dtype = torch.bfloat16
    for part, weight in zip(("w13", "w2"), parts.stored, strict=True):
        scale = (weight.tensors["weight_scale"].float() * smaller).clamp(min=2.0**-6).to(torch.float8_e4m3fn)
        stored.append(QuantizedWeight(weight.format, weight.shape, weight.tensors | {"weight_scale": scale}))
        for suffix, tensor in stored[-1].tensors.items():
            # vLLM holds the global scales of gate and up.
            tensor = tensor.expand(-1, 2 if part == "w13" else 1) if suffix == "weight_global_scale" else tensor
            layer.register_buffer(f"{part}_{suffix}", tensor)
    converted, engine = convert_nvfp4._marlin(layer), type(parts.engine)(*stored)
    assert (range_factor(stored[0].tensors["weight_scale"]) > 1) == (smaller < 1)
    for part, (weight, scale), global_scale in zip(("w13", "w2"), engine.weights, engine.global_scales, strict=True):
        assert_bitwise_equal(converted[f"{part}_weight"], weight)
        assert_bitwise_equal(converted[f"{part}_weight_scale"], scale)
        assert_bitwise_equal(converted[f"{part}_weight_scale_2"], global_scale)
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise_equal(
                converted[f"{part}_weight_scale"].view(torch.uint8).roll(1, 0), scale.view(torch.uint8)
            )


def note_operators(figures, name, parts, origin):
    """Compare each operator on the input that vLLM's had; returns fc1 and fc2 with their dB."""
    stages, products = parts.stages, {}
    for layer, expected in (("fc1", stages.fc1), ("fc2", stages.fc2)):
        actual = getattr(parts, f"{origin}_{layer}")()
        keep = origin == "kernels"
        products[layer] = actual, figures.compare(f"{name}_{layer}", actual, expected, keep=keep)
    values, scale = getattr(parts, f"{origin}_activation")()
    figures.note(f"{name}_activation_equal_fraction", equal_fraction(values, stages.activation[0]))
    if scale is not None:
        equal = equal_fraction(scale, stages.activation[1].view_as(scale))
        figures.note(f"{name}_activation_scale_equal_fraction", equal)
    return products


def test_operators_of_the_reference(parts, figures):
    products = note_operators(figures, f"{parts.name}_reference", parts, "reference")
    for layer, (actual, db) in products.items():
        assert db > MIN_MLP_DB
        assert sqnr_db(actual.roll(1, 0), getattr(parts.stages, layer)) < MIN_MLP_DB
    exact = parts.exact_fc1()
    figures.note(f"{parts.name}_fc1_float64_sqnr_db", sqnr_db(parts.stages.fc1, exact), unit="dB")
    figures.note(f"{parts.name}_rounded_fc1_float64_sqnr_db", sqnr_db(exact.to(torch.bfloat16), exact), unit="dB")


def test_choices_are_summed_with_fused_products(parts, figures):
    figures.note(
        f"{parts.name}_unfused_sum_equal_fraction", equal_fraction(parts.summed(fused=False), parts.stages.out)
    )
    figures.note(f"{parts.name}_fused_sum_equal_fraction", equal_fraction(parts.summed(fused=True), parts.stages.out))
    assert_bitwise_equal(parts.summed(fused=True), parts.stages.out)
    if parts.router_weight == "weighted_sum":
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(parts.summed(fused=False), parts.stages.out)


def test_operators_of_the_kernels(parts, figures):
    products = note_operators(figures, parts.name, parts, "kernels")
    for layer, (actual, db) in products.items():
        least = ROUNDED_ONCE_MORE.get((parts.engine_name, layer), MIN_GEMM_DB)
        assert db >= least
        assert sqnr_db(actual.roll(1, 0), getattr(parts.stages, layer)) < least


def swapped(parts):
    """Fc1 with gate and up swapped, quantized."""
    master = parts.masters[0]
    return quantize_weight(master.roll(master.shape[1] // 2, 1), parts.format)


def test_the_whole_mlp_of_the_reference(parts, figures):
    """The reference sums FP8 products in FP32, Hopper's tensor cores in fewer bits; the next quantizer amplifies it."""
    least = MIN_MLP_DB if parts.format.activation_kind == "none" else MIN_FP32_SUMS_DB
    db = figures.compare(f"{parts.name}_reference_mlp", parts.reference_mlp(), parts.stages.out, keep=True)
    assert db >= least
    wrong = GemmOperand.from_weight(swapped(parts), torch.bfloat16)
    assert sqnr_db(parts.reference_mlp(wrong), parts.stages.out) < least


def test_the_whole_mlp_of_the_kernels(parts, figures):
    name = f"{parts.name}_mlp"
    db = figures.compare(name, parts.kernels_mlp(), parts.stages.out, goal=MIN_MLP_DB, keep=True)
    assert db >= MIN_MLP_DB


def wrong_operands(parts):
    """Gate and up swapped; the zero point off by one where there is one, else the scales of the neighbouring row."""
    stored, operand = parts.stored[0], parts.operands[0]
    wrong = {"swapped": gemm_operand(swapped(parts), torch.bfloat16)}
    if stored.format.weight_kind == "int":
        bits = stored.format.num_bits
        packed = pack_int32((stored.codes().short() + 1).clamp(max=2 ** (bits - 1) - 1), bits)
        shifted = QuantizedWeight(stored.format, stored.shape, stored.tensors | {"weight_packed": packed})
        wrong["zero_point"] = gemm_operand(shifted, torch.bfloat16)
    elif operand.tensor_scale is not None:
        wrong["scale"] = replace(operand, tensor_scale=operand.tensor_scale.roll(1, 0) * 2)
    elif operand.scale is not None:
        wrong["scale"] = GemmOperand(operand.format, operand.values, operand.scale.roll(1, 1).contiguous())
    return wrong


def test_the_mlp_of_a_wrong_weight_fails(parts, figures):
    for name, fc1 in wrong_operands(parts).items():
        db = sqnr_db(parts.kernels_mlp(fc1), parts.stages.out)
        figures.note(f"{parts.name}_wrong_{name}_mlp_sqnr_db", db, unit="dB")
        assert db < MIN_MLP_DB


def test_how_far_neighbouring_tokens_move_vllm(parts, figures):
    """A tenth of the input moved by one unit in the last place, as another attention kernel may: vLLM and itself."""
    x = neighbours(parts.x, 0.1)
    figures.note(f"{parts.name}_moved_input_sqnr_db", sqnr_db(x, parts.x), unit="dB")
    moved = sqnr_db(parts.engine.mlp(x, parts.index, parts.weight).out, parts.stages.out)
    figures.note(f"{parts.name}_moved_mlp_sqnr_db", moved, unit="dB", keep=True)
    assert moved < sqnr_db(parts.kernels_mlp(), parts.stages.out)


def test_the_two_kernels_of_fp8_channel(figures):
    """vLLM's CUTLASS and Triton kernels differ in where they multiply by the router weight."""
    cutlass, triton = case("fp8_channel_cutlass"), case("fp8_channel_triton")
    fc1 = figures.compare("fp8_channel_vllm_cutlass_triton_fc1", cutlass.stages.fc1, triton.stages.fc1)
    mlp = figures.compare("fp8_channel_vllm_cutlass_triton_mlp", cutlass.stages.out, triton.stages.out, keep=True)
    assert fc1 > MIN_GEMM_DB > mlp > MIN_MLP_DB


def test_the_order_of_two_scales_is_the_only_difference_of_the_block_gemm():
    """Token scales that are powers of two multiply in any order without rounding: then every bit is the same."""
    theirs, ours = case("fp8_block_triton").rounded_token_scale_fc1()
    assert_bitwise_equal(ours, theirs)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(ours.roll(1, 0), theirs)
