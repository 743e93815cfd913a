"""vLLM 0.25.1's expert kernels on the tensors we publish: one grouped GEMM, the weight it multiplies by, the whole MLP.

Weights are converted by vLLM's own functions. An MLP call also keeps what lies between the operators, by recording
what vLLM's code passes to them, so that each operator can be compared on the same input.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
import vllm._custom_ops as ops
from torch import Tensor
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.experts import marlin_moe, triton_moe
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.quantization.utils.marlin_utils import (
    marlin_make_workspace_new,
    marlin_moe_permute_scales,
)
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_nvfp4_moe_layer_for_marlin
from vllm.scalar_type import scalar_types
from vllm.triton_utils import tl

from qarl_kernels import QuantizedWeight
from qarl_nemo.refit.engine_mends import mend_int8_experts

FP8 = torch.float8_e4m3fn


@dataclass
class Stages:
    """What one MLP call computed; rows are the T * k choices in token order.

    x and activation: (values, scale or None) as the GEMM multiplies them; fc1 [T * k, 2 I]; fc2 [T * k, H], times the
    router weight where the kernel applies it; out [T, H].
    """

    x: tuple
    fc1: Tensor
    activation: tuple
    fc2: Tensor
    out: Tensor


@contextmanager
def recorded(owner, name, keep):
    """Let `owner.name` also append keep(arguments, result) to the list that is returned."""
    original, kept = getattr(owner, name), []

    def wrapper(*args, **kwargs):
        result = original(*args, **kwargs)
        kept.append(keep(args, result))
        return result

    with mock.patch.object(owner, name, wrapper):
        yield kept


def copies(_, result):
    return tuple(None if tensor is None else tensor.clone() for tensor in result)


def take_rows(rows, index):
    """Return rows[index], also of FP8, which torch does not index."""
    if rows is None:
        return None
    return rows.view(torch.uint8)[index].view(FP8) if rows.dtype == FP8 else rows[index]


class VllmExperts:
    """One kernel with its weights fc1 [E, 2 I, H] and fc2 [E, H, I]; layer 0 is fc1, layer 1 fc2."""

    kernel = ""
    row_dtype = FP8

    def __init__(self, fc1: QuantizedWeight, fc2: QuantizedWeight):
        self.shapes = [fc1.shape, fc2.shape]
        self.num_experts, self.hidden, self.inner = fc2.shape
        self.device = next(iter(fc1.tensors.values())).device
        self.prepare(fc1, fc2)

    def prepare(self, fc1, fc2):
        raise NotImplementedError

    def gemm(self, rows, experts, layer):
        """Multiply rows (values [M, K], scale) sorted by expert, experts [M] int32; returns BF16 [M, N]."""
        raise NotImplementedError

    def read_weight(self, layer, k_scales=1):
        """BF16 [E, N, K] that the kernel multiplies by: its product with the identity matrix, scales all 1."""
        num_experts, n, k = self.shapes[layer]
        identity = torch.eye(k, device=self.device, dtype=torch.bfloat16).repeat(num_experts, 1)
        experts = torch.arange(num_experts, device=self.device, dtype=torch.int32).repeat_interleave(k)
        scale = torch.ones(len(identity), k_scales, device=self.device)
        rows = (identity.to(self.row_dtype), scale) if k_scales else (identity, None)
        return self.gemm(rows, experts, layer).view(num_experts, k, n).mT.contiguous()

    def empty(self, *shape):
        """BF16 memory that shows where nothing was written."""
        return torch.full(shape, float("nan"), device=self.device, dtype=torch.bfloat16)


class MarlinW4A16(VllmExperts):
    """Marlin MoE: codes to BF16 in registers."""

    kernel = "marlin"
    codes = scalar_types.uint4b8

    def prepare(self, fc1, fc2):
        self.weights = [self._repack(weight) for weight in (fc1, fc2)]
        self.global_scales = None, None
        self.workspace = marlin_make_workspace_new(self.device, 4)

    def _repack(self, weight):
        packed = weight.tensors["weight_packed"].mT.contiguous()
        scale = weight.tensors["weight_scale"].mT.contiguous()
        num_experts, n, k = weight.shape
        no_order = torch.empty(num_experts, 0, dtype=torch.int32, device=self.device)
        values = ops.gptq_marlin_moe_repack(packed, no_order, k, n, weight.format.num_bits)
        return values, marlin_moe_permute_scales(scale, k, n, weight.format.group_size)

    def read_weight(self, layer):
        return super().read_weight(layer, k_scales=0)

    def gemm(self, rows, experts, layer):
        (_, n, k), (weight, scale) = self.shapes[layer], self.weights[layer]
        num_rows, block = len(experts), 64
        order = moe_align_block_size(experts[:, None], block, self.num_experts, ignore_invalid_experts=True)
        return ops.moe_wna16_marlin_gemm(
            rows[0],
            self.empty(num_rows, n),
            weight,
            None,
            scale,
            None,
            self.global_scales[layer],
            *[None] * 3,
            self.workspace,
            *order,
            torch.ones(num_rows, 1, device=self.device),
            moe_block_size=block,
            top_k=1,
            mul_topk_weights=False,
            b_q_type=self.codes,
            size_m=num_rows,
            size_n=n,
            size_k=k,
            is_k_full=True,
            use_atomic_add=False,
            use_fp32_reduce=True,
            is_zp_float=False,
        )

    def mlp(self, x, topk_index, topk_weight):
        (w1, s1), (w2, s2) = self.weights
        out, activations = self.empty(*x.shape), []

        def activate(activation, output, rows, **options):
            apply_moe_activation(activation, output, rows, **options)
            activations.append(output.clone())

        with recorded(ops, "moe_wna16_marlin_gemm", lambda _, result: result.clone()) as products:
            marlin_moe.fused_marlin_moe(
                x,
                w1,
                w2,
                None,
                None,
                s1,
                s2,
                topk_weight,
                topk_index.int(),
                quant_type_id=self.codes.id,
                global_scale1=self.global_scales[0],
                global_scale2=self.global_scales[1],
                activation_func=activate,
                moe_sum=ops.moe_sum,
                output=out,
            )
        num_rows = topk_index.numel()
        fc1, fc2 = products[0].view(num_rows, -1), products[1].view(num_rows, -1)
        return Stages((x, None), fc1, (activations[0], None), fc2, out)


class MarlinW8A16(MarlinW4A16):
    """The same of 8-bit codes."""

    codes = scalar_types.uint8b128


class MarlinNvfp4(MarlinW4A16):
    """Marlin MoE: E2M1 codes and E4M3 scales to BF16 in registers, global scales on the sum or the router weight."""

    codes = scalar_types.float4_e2m1f

    def prepare(self, fc1, fc2):
        layer = SimpleNamespace(
            num_experts=self.num_experts,
            hidden_size=self.hidden,
            intermediate_size_per_partition=self.inner,
            params_dtype=torch.bfloat16,
        )
        tensors = []
        for weight in (fc1, fc2):
            packed, scale, divisor = weight.tensors.values()
            tensors += [packed, scale, 1.0 / divisor.flatten()]
        w13, scale13, global13, w2, scale2, global2 = prepare_nvfp4_moe_layer_for_marlin(layer, *tensors, True)
        self.weights, self.global_scales = [(w13, scale13), (w2, scale2)], (global13, global2)
        self.workspace = marlin_make_workspace_new(self.device, 4)


class TritonMoe(VllmExperts):
    """Triton fused MoE: BF16, FP8 or INT8 per token x per channel, or FP8 1x128 x 128x128."""

    kernel = "triton"

    def prepare(self, fc1, fc2):
        kind = fc1.format.name
        suffix = {"fp8_block": "weight_scale_inv", "bf16": None}.get(kind, "weight_scale")
        self.weights = [weight.tensors["weight"] for weight in (fc1, fc2)]
        self.scales = [weight.tensors.get(suffix) for weight in (fc1, fc2)]
        self.k_scales = {"fp8_block": [self.hidden // 128, self.inner // 128], "bf16": [0, 0]}.get(kind, [1, 1])
        quant = moe_config.FUSED_MOE_UNQUANTIZED_CONFIG
        if kind == "fp8_channel":
            quant = moe_config.fp8_w8a8_moe_quant_config(*self.scales, per_act_token_quant=True, per_out_ch_quant=True)
        elif kind == "int8":
            mend_int8_experts()
            self.row_dtype = torch.int8
            quant = moe_config.int8_w8a8_moe_quant_config(*self.scales, None, None, per_act_token_quant=True)
        elif kind == "fp8_block":
            quant = moe_config.fp8_w8a8_moe_quant_config(*self.scales, block_shape=[128, 128])
        model = moe_config.FusedMoEConfig(
            num_experts=self.num_experts,
            experts_per_token=8,
            hidden_dim=self.hidden,
            intermediate_size=self.inner,
            num_local_experts=self.num_experts,
            num_logical_experts=self.num_experts,
            activation=MoEActivation.SILU,
            device=self.device,
            routing_method=moe_config.RoutingMethodType.Renormalize,
            moe_parallel_config=moe_config.FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
        )
        self.quant, self.experts = quant, triton_moe.TritonExperts(model, quant)

    def read_weight(self, layer):
        return super().read_weight(layer, k_scales=self.k_scales[layer])

    def gemm(self, rows, experts, layer):
        n = self.shapes[layer][1]
        values, scale = rows
        config = fused_moe.try_get_optimal_moe_config(
            self.weights[0].size(),
            self.weights[1].size(),
            1,
            self.quant.config_name(values.dtype),
            len(experts),
            block_shape=self.quant.block_shape,
        )
        order = moe_align_block_size(experts[:, None], config["BLOCK_SIZE_M"], self.num_experts)
        out = self.empty(len(experts), 1, n)
        fused_moe.invoke_fused_moe_triton_kernel(
            values,
            self.weights[layer],
            out,
            scale,
            self.scales[layer],
            None,
            *order,
            False,
            1,
            config,
            compute_type=tl.bfloat16,
            use_fp8_w8a8=values.dtype == FP8,
            use_int8_w8a8=values.dtype == torch.int8,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=self.quant.per_act_token_quant,
            block_shape=self.quant.block_shape,
        )
        return out.view(-1, n)

    def mlp(self, x, topk_index, topk_weight):
        quant = self.quant
        a8, a_scale = moe_kernel_quantize_input(
            x, None, quant.quant_dtype, quant.per_act_token_quant, quant.block_shape
        )
        num_tokens, top_k = topk_index.shape
        width = max(2 * self.inner, self.hidden)
        out = self.empty(*x.shape)
        with ExitStack() as stack:
            products = stack.enter_context(
                recorded(triton_moe, "invoke_fused_moe_triton_kernel", lambda args, _: args[2].clone())
            )
            fused = stack.enter_context(recorded(ops, "silu_and_mul_per_block_quant", copies))
            quantized = stack.enter_context(recorded(triton_moe, "moe_kernel_quantize_input", copies))
            self.experts.apply(
                out,
                a8,
                *self.weights,
                topk_weight,
                topk_index.int(),
                MoEActivation.SILU,
                self.num_experts,
                None,
                a_scale,
                None,
                self.empty(num_tokens, top_k, width),
                self.empty(num_tokens, top_k, width),
                None,
                False,
            )
        fc1, fc2 = (product.view(num_tokens * top_k, -1) for product in products)
        assert (len(fused) == 1) == (quant.block_shape is not None), "the engine's fused SwiGLU quantizer"
        return Stages((a8, a_scale), fc1, [*fused, *quantized][0], fc2, out)
