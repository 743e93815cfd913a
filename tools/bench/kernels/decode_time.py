"""int4 experts of Qwen3-30B-A3B while an engine decodes: `decode_experts` beside vLLM's Marlin, on the same tensors.

`even` routers spread a batch's tokens over all experts; `few` send them to 41, as random weights do in deep layers. The
floor is the time in which the GPU copies the bytes of the weights that the batch reaches.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from device_time import copy_gb_s, interleaved_ms
from moe_shapes import HIDDEN, INTERMEDIATE, TOP_K
from record import record
from torch import Tensor

from qarl_kernels.decode_experts import SortedRows, decode_experts
from qarl_nemo.measure.compare.vllm_responses import import_vllm
from qarl_nemo.metrics.results import Figure

E, GROUP = 128, 128
# in-features, out-features, rows of the output for each of the input
GEMMS = {"w13": (HIDDEN, 2 * INTERMEDIATE, TOP_K), "w2": (INTERMEDIATE, HIDDEN, 1)}
ROUTERS = {"even": E, "few": 41}


class Batch:
    """Rows of a batch, sorted for both kernels as vLLM does.

    Args:
        tokens: sequences that decode.
        reached: experts that they choose from.
    """

    def __init__(self, tokens: int, reached: int) -> None:
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

        scores = torch.rand(tokens, E, device="cuda")
        scores[:, reached:] = -1
        weight, index = scores.topk(TOP_K, dim=-1)
        self.tokens, self.weight, self.index = tokens, weight / weight.sum(-1, keepdim=True), index.int()
        # Marlin's own choice of a block, as in vLLM's fused_marlin_moe.
        self.marlin_block = next(size for size in (8, 16, 32, 48, 64) if tokens * TOP_K / E / size < 0.9)
        self.sorted = {
            size: SortedRows(*moe_align_block_size(self.index, size, E, None, ignore_invalid_experts=True))
            for size in {8, self.marlin_block}
        }
        self.num_reached = int(index.unique().numel())


class Gemm:
    """One of the two GEMMs with a batch's rows."""

    def __init__(self, name: str, batch: Batch) -> None:
        from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new

        self.k, self.n, self.top_k = GEMMS[name]
        self.batch = batch
        self.words = torch.randint(-(2**31), 2**31, (E, self.k // 16, 2 * self.n), device="cuda", dtype=torch.int32)
        self.scale = (0.02 * torch.rand(E, self.k // GROUP, self.n, device="cuda")).bfloat16()
        rows = batch.tokens * TOP_K
        self.x = torch.randn(rows // self.top_k, self.k, device="cuda").bfloat16()
        self.out = torch.zeros(rows, self.n, device="cuda", dtype=torch.bfloat16)
        self.weight = batch.weight if self.top_k == 1 else None
        self.workspace = marlin_make_workspace_new(self.words.device, 4)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that the batch reaches."""
        return self.batch.num_reached * (self.k * self.n // 2 + self.k // GROUP * self.n * 2)

    def kernel(self) -> Tensor:
        """Multiply by this package's kernel."""
        return decode_experts(self.x, self.words, self.scale, self.batch.sorted[8], self.top_k, self.weight, self.out)

    def marlin(self) -> Tensor:
        """Multiply by vLLM's."""
        from vllm import _custom_ops as ops
        from vllm.scalar_type import scalar_types

        rows = self.batch.sorted[self.batch.marlin_block]
        return ops.moe_wna16_marlin_gemm(
            self.x, self.out, self.words, None, self.scale, None, None, None, None, None, self.workspace, *rows,
            self.batch.weight, moe_block_size=self.batch.marlin_block, top_k=self.top_k,
            mul_topk_weights=self.weight is not None, b_q_type=scalar_types.uint4b8, size_m=len(self.x), size_n=self.n,
            size_k=self.k, is_k_full=True, use_atomic_add=False, use_fp32_reduce=True, is_zp_float=False,
        )  # fmt: skip

    def require_agreement(self) -> None:
        """Raise where the kernels differ by more than BF16's rounding of sums in another order.

        Raises:
            RuntimeError: they do.
        """
        mine, wanted = self.kernel().clone().float(), self.marlin().float()
        error = float((mine - wanted).norm() / wanted.norm())
        if not error <= 1e-3:
            raise RuntimeError(f"the kernel is {error:.1e} off Marlin")


def figures(name: str, router: str, tokens: int, gb_s: float) -> Iterator[Figure]:
    """Measure one GEMM with one batch."""
    gemm = Gemm(name, Batch(tokens, ROUTERS[router]))
    gemm.require_agreement()
    ms = interleaved_ms({"kernel": gemm.kernel, "marlin": gemm.marlin})
    ends = f"{name}_{router}_b{tokens}"
    yield Figure(f"decode_us_kernel_{ends}", 1e3 * ms["kernel"], "us", "<=")
    yield Figure(f"decode_us_marlin_{ends}", 1e3 * ms["marlin"], "us", "<=")
    yield Figure(f"decode_us_floor_{ends}", gemm.num_bytes / gb_s / 1e3, "us", "<=")
    yield Figure(f"decode_ratio_{ends}", ms["kernel"] / ms["marlin"], "", "<=", 1.0)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 32, 64, 96])
    parser.add_argument("--record", type=Path, help="results file that receives the figures")
    options = parser.parse_args()
    import_vllm("cuda")
    torch.manual_seed(0)
    gb_s = copy_gb_s()
    cases = [(name, router, tokens) for router in ROUTERS for tokens in options.tokens for name in GEMMS]
    record([figure for case in cases for figure in figures(*case, gb_s)], options.record)


if __name__ == "__main__":
    main()
