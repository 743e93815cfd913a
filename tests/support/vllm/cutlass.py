"""vLLM 0.25.1's CUTLASS expert kernels for Hopper: FP8 per token x per channel, and int4 x FP8 (W4A8)."""

from contextlib import ExitStack

import torch
import vllm._custom_ops as ops
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import cutlass_moe
from vllm.model_executor.layers.fused_moe.oracle.w4a8 import convert_to_w4a8_moe_kernel_format

from support.vllm.experts import Stages, VllmExperts, copies, recorded, take_rows


class CutlassFp8(VllmExperts):
    """CUTLASS grouped GEMM, FP8 per token x per channel."""

    kernel = "cutlass"
    gemm_name, swaps_operands = "cutlass_moe_mm", False

    def prepare(self, fc1, fc2):
        self.weights = [(weight.tensors["weight"], weight.tensors["weight_scale"]) for weight in (fc1, fc2)]
        self._set_strides()

    def _set_strides(self):
        wide, hidden, inner = (
            torch.full((self.num_experts,), size, device=self.device, dtype=torch.int64)
            for size in (2 * self.inner, self.hidden, self.inner)
        )
        self.a_strides, self.c_strides = [hidden, inner], [wide, hidden]

    def _multiply(self, out, rows, layer, first_rows, problems):
        weight, scale = self.weights[layer]
        strides = self.a_strides[layer], self.a_strides[layer], self.c_strides[layer]
        ops.cutlass_moe_mm(out, rows[0], weight, rows[1], scale, first_rows, problems, *strides, True, True)

    def gemm(self, rows, experts, layer):
        bounds = torch.arange(self.num_experts + 1, device=self.device, dtype=torch.int32)
        offsets = torch.searchsorted(experts, bounds)
        problems = [torch.empty(self.num_experts, 3, device=self.device, dtype=torch.int32) for _ in range(2)]
        ops.get_cutlass_moe_mm_problem_sizes_from_expert_offsets(
            offsets, *problems, self.inner, self.hidden, self.swaps_operands
        )
        out = self.empty(len(experts), self.shapes[layer][1])
        self._multiply(out, rows, layer, offsets[:-1], problems[layer])
        return out

    def _run(self, arguments):
        (w1, s1), (w2, s2) = self.weights
        cutlass_moe.run_cutlass_moe_fp8(
            w1=w1,
            w2=w2,
            w1_scale=s1,
            w2_scale=s2,
            ab_strides1=self.a_strides[0],
            ab_strides2=self.a_strides[1],
            c_strides1=self.c_strides[0],
            c_strides2=self.c_strides[1],
            **arguments,
        )

    def mlp(self, x, topk_index, topk_weight):
        a8, a_scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        num_rows = topk_index.numel()
        out, width = self.empty(*x.shape), max(2 * self.inner, self.hidden)
        arguments = {
            "output": out,
            "hidden_states": a8,
            "topk_ids": topk_index.int(),
            "activation": MoEActivation.SILU,
            "global_num_experts": self.num_experts,
            "expert_map": None,
            "a1q_scale": a_scale,
            "a2_scale": None,
            "workspace13": self.empty(num_rows, width),
            "workspace2": self.empty(num_rows, width),
            "expert_num_tokens": None,
            "out_dtype": torch.bfloat16,
            "per_act_token": True,
            "per_out_ch": True,
            "use_batched_format": False,
            "topk_weights": topk_weight,
            "permute_scratch": None,
        }
        with ExitStack() as stack:
            products = stack.enter_context(recorded(ops, self.gemm_name, lambda args, _: args[0].clone()))
            quantized = stack.enter_context(recorded(ops, "scaled_fp8_quant", copies))
            orders = stack.enter_context(recorded(cutlass_moe, "moe_permute", lambda _, result: result[4].clone()))
            self._run(arguments)
        by_choice = orders[0].argsort()
        activation = tuple(take_rows(tensor, by_choice) for tensor in quantized[0])
        return Stages((a8, a_scale), products[0][by_choice], activation, products[1][by_choice], out)


class CutlassW4A8(CutlassFp8):
    """CUTLASS grouped GEMM, int4 to FP8 through a table; FP8 per token."""

    kernel = "cutlass"
    gemm_name, swaps_operands = "cutlass_w4a8_moe_mm", True

    # "all" is what an engine without torch.compile takes: a CUDA operator quantizes the group scales.
    custom_ops = "all"

    def prepare(self, fc1, fc2):
        packed = [weight.tensors["weight_packed"].clone() for weight in (fc1, fc2)]
        scales = [weight.tensors["weight_scale"] for weight in (fc1, fc2)]
        with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=[self.custom_ops]))):
            converted = convert_to_w4a8_moe_kernel_format(*packed, *scales)
        weights, tables, self.channel_scales = (list(pair) for pair in (converted[:2], converted[2:4], converted[4:6]))
        self.b_strides = list(converted[6:])
        self.weights = list(zip(weights, tables, strict=True))
        self._set_strides()
        self.s_strides = []
        for rows in (2 * self.inner, self.hidden):
            strides = torch.zeros(self.num_experts, 2, device=self.device, dtype=torch.int64)
            strides[:, 0] = rows
            self.s_strides.append(strides)

    def read_values(self, layer):
        """BF16 [E, N, K] of the FP8 values the kernel makes of int4 codes: its channel scales taken as 1."""
        scales = self.channel_scales
        self.channel_scales = [torch.ones_like(scale) for scale in scales]
        try:
            return self.read_weight(layer)
        finally:
            self.channel_scales = scales

    def _multiply(self, out, rows, layer, first_rows, problems):
        (weight, table), scale = self.weights[layer], self.channel_scales[layer]
        strides = self.a_strides[layer], self.b_strides[layer], self.c_strides[layer], self.s_strides[layer]
        ops.cutlass_w4a8_moe_mm(out, rows[0], weight, rows[1], scale, table, 128, first_rows, problems, *strides)

    def _run(self, arguments):
        (w1, s1), (w2, s2) = self.weights
        cutlass_moe.run_cutlass_moe_w4a8_fp8(
            w1=w1,
            w2=w2,
            w1_scale=s1,
            w2_scale=s2,
            w1_chan_scale=self.channel_scales[0],
            w2_chan_scale=self.channel_scales[1],
            a_strides1=self.a_strides[0],
            a_strides2=self.a_strides[1],
            b_strides1=self.b_strides[0],
            b_strides2=self.b_strides[1],
            c_strides1=self.c_strides[0],
            c_strides2=self.c_strides[1],
            s_strides1=self.s_strides[0],
            s_strides2=self.s_strides[1],
            group_size=128,
            **arguments,
        )


class CompiledW4A8(CutlassW4A8):
    """The same, its weights converted as an engine with torch.compile does: Inductor quantizes the group scales."""

    custom_ops = "none"
