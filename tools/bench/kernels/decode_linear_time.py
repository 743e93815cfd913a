"""int4 projections of Qwen3-30B-A3B's attention while an engine decodes: `decode_linear` beside vLLM's Marlin.

Both multiply the same tensors: one weight after the other, as many as the L2 cache cannot hold, so that a call's time
has the gap to the next in it. The floor is the time in which the GPU copies the bytes of one weight.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from device_time import copy_gb_s, interleaved_ms
from moe_shapes import HIDDEN
from record import record
from torch import Tensor

from qarl_kernels.decode_linear import decode_linear
from qarl_nemo.measure.compare.vllm_responses import import_vllm
from qarl_nemo.metrics.results import Figure

GROUP, NUM_WEIGHTS = 128, 64
# in-features, out-features
GEMMS = {"qkv": (HIDDEN, 5120), "o_proj": (4096, HIDDEN)}


class Projection:
    """Weights of one projection, layer after layer, and a batch's rows."""

    def __init__(self, name: str, rows: int) -> None:
        from vllm.model_executor.layers.quantization.utils.marlin_utils import (
            marlin_make_empty_g_idx,
            marlin_make_workspace_new,
        )

        self.k, self.n = GEMMS[name]
        shape = (NUM_WEIGHTS, self.k // 16, 2 * self.n)
        self.words = torch.randint(-(2**31), 2**31, shape, device="cuda", dtype=torch.int32)
        self.scale = (0.02 * torch.rand(NUM_WEIGHTS, self.k // GROUP, self.n, device="cuda")).bfloat16()
        self.x = torch.randn(rows, self.k, device="cuda").bfloat16()
        self.empty = marlin_make_empty_g_idx(self.x.device)
        self.workspace = marlin_make_workspace_new(self.x.device)

    def kernel(self, words: Tensor, scale: Tensor) -> Tensor:
        """Multiply by this package's kernel."""
        return decode_linear(self.x, words, scale)

    def marlin(self, words: Tensor, scale: Tensor) -> Tensor:
        """Multiply by vLLM's."""
        from vllm.model_executor.layers.quantization.utils.marlin_utils import apply_gptq_marlin_linear
        from vllm.scalar_type import scalar_types

        return apply_gptq_marlin_linear(
            self.x, words, scale, self.empty, self.empty, self.empty, self.workspace, scalar_types.uint4b8, self.n,
            self.k, is_k_full=True,
        )  # fmt: skip

    def each(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        """Return a call that multiplies by all weights."""

        def run() -> None:
            for words, scale in zip(self.words, self.scale, strict=True):
                multiply(words, scale)

        return run

    def require_agreement(self) -> None:
        """Raise where the kernels differ by more than BF16's rounding of sums in another order.

        Raises:
            RuntimeError: they do.
        """
        mine, wanted = (call(self.words[0], self.scale[0]).float() for call in (self.kernel, self.marlin))
        error = float((mine - wanted).norm() / wanted.norm())
        if not error <= 1e-3:
            raise RuntimeError(f"the kernel is {error:.1e} off Marlin")


def figures(name: str, rows: int, gb_s: float) -> Iterator[Figure]:
    """Measure one projection with one batch."""
    projection = Projection(name, rows)
    projection.require_agreement()
    ms = interleaved_ms({call.__name__: projection.each(call) for call in (projection.kernel, projection.marlin)})
    us = {kernel: 1e3 * total / NUM_WEIGHTS for kernel, total in ms.items()}
    num_bytes = projection.k * projection.n // 2 + projection.k // GROUP * projection.n * 2
    yield Figure(f"decode_us_kernel_{name}_b{rows}", us["kernel"], "us", "<=")
    yield Figure(f"decode_us_marlin_{name}_b{rows}", us["marlin"], "us", "<=")
    yield Figure(f"decode_us_floor_{name}_b{rows}", num_bytes / gb_s / 1e3, "us", "<=")
    yield Figure(f"decode_ratio_{name}_b{rows}", us["kernel"] / us["marlin"], "", "<=", 1.0)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--record", type=Path, help="results file that receives the figures")
    options = parser.parse_args()
    import_vllm("cuda")
    torch.manual_seed(0)
    gb_s = copy_gb_s()
    cases = [(name, rows) for name in GEMMS for rows in options.rows]
    record([figure for case in cases for figure in figures(*case, gb_s)], options.record)


if __name__ == "__main__":
    main()
