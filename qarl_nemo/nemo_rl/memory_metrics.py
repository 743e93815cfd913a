"""What a learner rank holds in each phase of a step, as torch's allocator and the GPU's driver count it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from qarl_nemo.memory import GIB


class PhaseMemory:
    """Peaks of the phases of a step; resets the allocator's own peaks, whose other readers see a phase's."""

    def __init__(self) -> None:
        self._peaks: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as part of a phase; a phase may consist of several."""
        torch.cuda.reset_peak_memory_stats()
        yield
        peaks = {
            f"memory/{name}_allocated_gib": torch.cuda.max_memory_allocated(),
            f"memory/{name}_reserved_gib": torch.cuda.max_memory_reserved(),
            f"memory/{name}_others_gib": others_bytes(),
        }
        self._peaks |= {key: max(value / GIB, self._peaks.get(key, 0.0)) for key, value in peaks.items()}

    def take(self) -> dict[str, float]:
        """Return the peaks since the last call, and forget them.

        Returns:
            GiB of each phase: `memory/<phase>_allocated_gib` and `_reserved_gib` at the allocator's peaks, and
            `_others_gib`, what the GPU held beside them at the phase's end: contexts, NCCL's buffers, an engine.
        """
        taken, self._peaks = self._peaks, {}
        return taken


def others_bytes() -> int:
    """Return what this process's GPU holds beside its tensors and reserve: contexts, NCCL's buffers, an engine."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def fullest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest value over ranks of each metric of `PhaseMemory.take`."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: max(rank[name] for rank in ranks if name in rank) for name in names}
