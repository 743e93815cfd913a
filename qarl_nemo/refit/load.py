"""vLLM's side of a refit: `worker_extension_cls="qarl_nemo.refit.load.PackedRefit"`.

Each rank checks the announced update against its own layers, takes tensors in, verifies them whole, and only then
converts layer by layer into the tensors its kernels and captured CUDA graphs already read (`rank.py`).
"""

import os
from typing import Any

import torch

from qarl_nemo.refit.answers import answering
from qarl_nemo.refit.manifest import checksums
from qarl_nemo.refit.rank import RankRefit


@answering
class PackedRefit:
    """RPC methods that vLLM adds to its workers; `push` calls them."""

    def qarl_process(self) -> int:
        """Return the process that this rank runs in."""
        return os.getpid()

    def qarl_version(self) -> dict[str, Any]:
        """Return the weight version served last (None before the first refit) and whether it is whole."""
        return rank_refit(self).state()

    def qarl_connect(self, message: dict[str, Any]) -> None:
        """Join a learner's process group."""
        rank_refit(self).arrivals.connect(message)

    def qarl_begin(self, manifest: dict[str, Any], rehearsed: bool) -> list[str]:
        """Expect an update; return what speaks against it."""
        return rank_refit(self).begin(manifest, rehearsed)

    def qarl_receive(self, version: int, kind: str, message: Any) -> None:
        """Take tensors of the expected update in."""
        rank_refit(self).receive(version, kind, message)

    def qarl_verify(self, version: int) -> list[str]:
        """Return what makes the update unfit to serve."""
        return rank_refit(self).verify(version)

    def qarl_replace(self, version: int) -> None:
        """Serve the update, if it is whole; one that was rehearsed as it comes once more."""
        rank_refit(self).replace(version)

    def qarl_replaced(self, version: int) -> None:
        """Serve the rehearsed update, which has come once more."""
        rank_refit(self).finish(version)

    def qarl_abort(self, version: int) -> None:
        """Forget the update; the old version keeps serving."""
        rank_refit(self).abort(version)

    def qarl_digests(self) -> dict[str, int]:
        """Return the checksum of every tensor that this rank's kernels read, by name."""
        model = rank_refit(self).model
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        return dict(zip(tensors, checksums(tensors.values()), strict=True))

    def qarl_memory(self) -> dict[str, int]:
        """Return this rank's GPU memory in bytes: allocated, reserved, and the peak since the last call."""
        memory = {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "peak": torch.cuda.max_memory_allocated(),
        }
        torch.cuda.reset_peak_memory_stats()
        return memory


def rank_refit(worker: Any) -> RankRefit:
    """Return the refits of a worker's rank; made when first asked for, because a worker gets its model late."""
    if "_qarl_refit" not in vars(worker):
        worker._qarl_refit = RankRefit(worker)
    return worker._qarl_refit
