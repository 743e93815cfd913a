"""Our expert MLP beside vLLM's on the same tokens, packed weights and routing: as a whole, and operator by operator.

An operator is compared on the input that vLLM's own operator had, so that a difference shows where it arises.
"""

import dataclasses
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from qarl_kernels import expert_mlp, expert_mlp_reference, gemm_operand, get_format, int8, quantize_weight
from qarl_kernels.expert_mlp import swiglu
from qarl_kernels.fp8 import expand_block_scale, quantize_group, quantize_token
from qarl_kernels.gemm import GemmOperand
from qarl_kernels.gemm import grouped_gemm as reference_gemm
from qarl_kernels.ops.operand_gemm import QuantizedRows, multiply_rows
from qarl_kernels.ops.swiglu import swiglu as swiglu_kernel
from qarl_kernels.ops.swiglu import swiglu_quantize_group, swiglu_quantize_token
from qarl_kernels.ops.token_rounding import TOKEN_DTYPES
from qarl_kernels.routing import route_rows
from support.vllm.cutlass import CutlassFp8, CutlassW4A8
from support.vllm.experts import MarlinNvfp4, MarlinW4A16, MarlinW8A16, TritonMoe, take_rows

NUM_EXPERTS, HIDDEN, INNER, TOP_K, NUM_TOKENS = 16, 2048, 768, 8, 1024

# Format and kernel, as vLLM 0.25.1 serves the format on Hopper; the default of fp8_channel is CUTLASS.
ENGINES = {
    "w4a16_marlin": MarlinW4A16,
    "w8a16_marlin": MarlinW8A16,
    "nvfp4_marlin": MarlinNvfp4,
    "w4a8_cutlass": CutlassW4A8,
    "fp8_channel_cutlass": CutlassFp8,
    "fp8_channel_triton": TritonMoe,
    "fp8_block_triton": TritonMoe,
    "int8_triton": TritonMoe,
    "bf16_triton": TritonMoe,
}


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    """10 log10(sum expected^2 / sum (actual - expected)^2) in float64; infinite where all are equal."""
    expected = expected.double()
    return float(10 * torch.log10(expected.square().sum() / (actual.double() - expected).square().sum()))


def equal_fraction(actual: Tensor, expected: Tensor) -> float:
    """Fraction of elements with equal values."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    return float((actual.float() == expected.float()).double().mean())


def trained_weight(*shape: int) -> Tensor:
    """BF16 weight of a trained model's size, one element in ten thousand eight times larger."""
    weight = torch.randn(shape, device="cuda") * shape[-1] ** -0.5
    return torch.where(torch.rand_like(weight) < 1e-4, 8 * weight, weight).to(torch.bfloat16)


def neighbours(x: Tensor, fraction: float) -> Tensor:
    """x with a fraction of its elements moved by one unit in the last place, as other BF16 kernels differ in a norm."""
    step = torch.exp2(torch.floor(torch.log2(x.float().abs().clamp(min=2.0**-100))) - 7)
    moved = x.float() + step * torch.where(torch.rand_like(step) < 0.5, 1.0, -1.0)
    return torch.where(torch.rand_like(step) < fraction, moved, x.float()).to(x.dtype)


class Case:
    """One format's weights in vLLM's kernel and in ours, and one batch of routed tokens."""

    def __init__(self, name: str):
        torch.manual_seed(0)
        self.engine_name = name
        format_name, self.kernel = name.rsplit("_", 1)
        # First part of the names of figures.
        self.name = f"{format_name}_vllm_{self.kernel}"
        self.format = get_format(format_name)
        self.masters = trained_weight(NUM_EXPERTS, 2 * INNER, HIDDEN), trained_weight(NUM_EXPERTS, HIDDEN, INNER)
        self.stored = [quantize_weight(master, self.format) for master in self.masters]
        self.engine = ENGINES[name](*self.stored)
        self.operands = [gemm_operand(weight, torch.bfloat16) for weight in self.stored]
        self.reference_operands = [GemmOperand.from_weight(weight, torch.bfloat16) for weight in self.stored]
        channels = torch.where(torch.rand(HIDDEN, device="cuda") < 4e-3, 16.0, 1.0)
        self.x = (torch.randn(NUM_TOKENS, HIDDEN, device="cuda") * channels).to(torch.bfloat16)
        probability = (2 * torch.randn(NUM_TOKENS, NUM_EXPERTS, device="cuda")).softmax(-1)
        weight, self.index = probability.topk(TOP_K)
        self.weight = weight / weight.sum(-1, keepdim=True)
        self.routed = route_rows(self.index, NUM_EXPERTS)
        # vLLM's Triton kernel weights the accumulator in every format.
        self.router_weight = "on_accumulator" if self.kernel == "triton" else self.format.router_weight
        self.stages = self.engine.mlp(self.x, self.index, self.weight)

    def kernels_mlp(self, fc1: GemmOperand | None = None) -> Tensor:
        fc1 = self.operands[0] if fc1 is None else fc1
        return expert_mlp(self.x, self.index, self.weight, fc1, self.operands[1])

    def reference_mlp(self, fc1: GemmOperand | None = None) -> Tensor:
        fc1, fc2 = self.reference_operands[0] if fc1 is None else fc1, self.reference_operands[1]
        return expert_mlp_reference(
            self.x,
            self.index,
            self.weight,
            lambda rows, offsets, dtype: reference_gemm(rows, fc1, offsets, out_dtype=dtype),
            lambda rows, offsets, dtype: reference_gemm(
                rows, fc2.unscaled(), offsets, out_dtype=dtype, after_swiglu=True
            ),
            dataclasses.replace(self.format, router_weight=self.router_weight),
            NUM_EXPERTS,
            fc2_scale=fc2.tensor_scale,
        )

    def to_rows(self, choices: Tensor | None) -> Tensor | None:
        return take_rows(choices, self.routed.order)

    def to_choices(self, rows: Tensor) -> Tensor:
        return rows[self.routed.inverse]

    def repeated(self, tokens: Tensor | None) -> Tensor | None:
        """Rows by expert of what is given by token."""
        return take_rows(tokens, self.routed.order // TOP_K)

    def weighted(self, product: Tensor) -> Tensor:
        """Fc2's choices times the router weight where vLLM's kernel rounds it; product BF16, or FP32 to round later."""
        weight = self.weight.reshape(-1, 1)
        if self.router_weight == "weighted_sum":
            return product
        scale = self.reference_operands[1].tensor_scale
        if scale is not None:
            weight = weight * scale.flatten()[self.index].reshape(-1, 1)
        if self.router_weight in ("rounded_product", "scaled_product"):
            return product * weight.to(torch.bfloat16)
        return (product.float() * weight).to(torch.bfloat16)

    def reference_fc1(self) -> Tensor:
        rows = self.repeated(self.x)
        return self.to_choices(reference_gemm(rows, self.reference_operands[0], self.routed.offsets))

    def kernels_fc1(self) -> Tensor:
        rows = QuantizedRows(*(self.repeated(tensor) for tensor in self.stages.x))
        return self.to_choices(multiply_rows(rows, self.operands[0], self.routed.offsets))

    def exact_fc1(self) -> Tensor:
        """Fc1's product of vLLM's quantized tokens in float64."""
        values, scale = (self.repeated(tensor) for tensor in self.stages.x)
        values = values.double()
        if scale is not None:
            values = values * scale.double().repeat_interleave(values.shape[1] // scale.shape[1], -1)
        operand = self.reference_operands[0]
        out, bounds = [], self.routed.offsets.tolist()
        for expert, (start, stop) in enumerate(pairwise(bounds)):
            weight = operand.expert(expert).values.double()
            if operand.scale is not None:
                scale = operand.scale[expert].double()
                blocked = operand.format.weight_kind == "fp8_blocks"
                weight = weight * (expand_block_scale(scale, *weight.shape) if blocked else scale)
            elif operand.tensor_scale is not None:
                weight = weight * operand.tensor_scale[expert].double()
            out.append(values[start:stop] @ weight.mT)
        return self.to_choices(torch.cat(out))

    def reference_activation(self) -> tuple:
        activated = swiglu(self.stages.fc1, self.format)
        if self.format.activation_kind == "none":
            return activated, None
        if self.format.activation_kind == "fp8_token":
            return quantize_token(activated)
        if self.format.activation_kind == "int8_token":
            return int8.quantize_token(activated, dense=False)
        return quantize_group(activated, after_swiglu=True)

    def kernels_activation(self) -> tuple:
        if self.format.activation_kind == "none":
            return swiglu_kernel(self.stages.fc1), None
        if self.format.activation_kind in TOKEN_DTYPES:
            return swiglu_quantize_token(self.stages.fc1, self.format.activation_kind)
        return swiglu_quantize_group(self.stages.fc1)

    def reference_fc2(self) -> Tensor:
        rows = self.to_rows(swiglu(self.stages.fc1, self.format))
        dtype = torch.float32 if self.router_weight == "on_accumulator" else torch.bfloat16
        operand = self.reference_operands[1].unscaled()
        product = reference_gemm(rows, operand, self.routed.offsets, out_dtype=dtype, after_swiglu=True)
        return self.weighted(self.to_choices(product))

    def kernels_fc2(self) -> Tensor:
        rows = QuantizedRows(*(self.to_rows(tensor) for tensor in self.stages.activation))
        in_gemm = self.format.router_weight != "weighted_sum"
        row_weight = self.weight.reshape(-1)[self.routed.order] if in_gemm else None
        product = multiply_rows(rows, self.operands[1], self.routed.offsets, row_weight=row_weight)
        return self.to_choices(product) if in_gemm else self.weighted(self.to_choices(product))

    def summed(self, *, fused: bool) -> Tensor:
        """The sum of vLLM's weighted choices in FP32, in order; fused: a product is added before it is rounded."""
        choices = self.stages.fc2.view(NUM_TOKENS, TOP_K, HIDDEN).double()
        if self.router_weight == "weighted_sum":
            choices = choices * self.weight[..., None].double()
        if not fused:
            choices = choices.float().double()
        total = choices[:, 0].float()
        for choice in range(1, TOP_K):
            total = (total.double() + choices[:, choice]).float()
        return total.to(torch.bfloat16)

    def rounded_token_scale_fc1(self) -> tuple[Tensor, Tensor]:
        """Fc1 of vLLM and of our kernels with token scales cut to powers of two: scales then multiply in any order."""
        values, scale = (self.repeated(tensor) for tensor in self.stages.x)
        rows = values, torch.exp2(torch.floor(torch.log2(scale)))
        experts = self.index.reshape(-1)[self.routed.order].int()
        ours = multiply_rows(QuantizedRows(*rows), self.operands[0], self.routed.offsets)
        return self.engine.gemm(rows, experts, 0), ours


@cache
def case(name: str) -> Case:
    """The case of one engine, made once."""
    return Case(name)


def tokens() -> Tensor:
    """Rows of many sizes, one of zeros and one below every floor: [2048, 2048] BF16."""
    x = torch.randn(2048, 2048, device="cuda") * torch.exp2(torch.randint(-8, 8, (2048, 1), device="cuda").float())
    x[4] = 0.0
    x[5] *= 2.0**-40
    return x.to(torch.bfloat16)
