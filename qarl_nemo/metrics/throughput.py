"""Time per phase of a step, tokens per second and peak memory. Imports no torch: synchronization is injected."""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class PhaseTimer:
    """Adds up seconds per phase of one training step.

    Example:
        timer = PhaseTimer(synchronize=torch.cuda.synchronize)
        with timer.phase("rollout"):
            rollouts = sampler.generate(prompts)
        metrics |= timer.finish_step({"rollout": rollouts.num_tokens})

    Args:
        synchronize: waits for the device; called when a phase starts and ends, so that asynchronous kernels are billed
            to the phase that launched them. The default suits a CPU.
        on_phase: called with a phase's name when it starts.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] = lambda: None,
        on_phase: Callable[[str], None] | None = None,
    ):
        self._synchronize = synchronize
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._step_start: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Bill the enclosed block to phase `name`; a phase entered several times in a step is summed.

        Args:
            name: phase without unit, e.g. `rollout`; it becomes `timing/rollout_s`.
        """
        self._synchronize()
        if self._on_phase is not None:
            self._on_phase(name)
        start = time.perf_counter()
        if self._step_start is None:
            self._step_start = start
        yield
        self._synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def finish_step(self, num_tokens: Mapping[str, int]) -> dict[str, float]:
        """Close the step; the next one starts with its first phase.

        Args:
            num_tokens: tokens processed per phase, for tokens/s; phases may be left out.

        Returns:
            `timing/<phase>_s` per phase, `timing/step_s` (wall time since the step's first phase began, gaps included)
            and `throughput/<phase>_tokens_s` for the phases in `num_tokens`.

        Raises:
            ValueError: `num_tokens` names a phase that did not run in this step.
        """
        unknown = sorted(set(num_tokens) - set(self._seconds))
        if unknown:
            raise ValueError(f"no time was measured for phases {unknown}; measured: {sorted(self._seconds)}")
        assert self._step_start is not None, "a step without a phase has no beginning"
        metrics = {f"timing/{name}_s": seconds for name, seconds in self._seconds.items()}
        metrics["timing/step_s"] = time.perf_counter() - self._step_start
        for name, count in num_tokens.items():
            seconds = self._seconds[name]
            metrics[f"throughput/{name}_tokens_s"] = count / seconds if seconds > 0 else float("nan")
        self._seconds = {}
        self._step_start = None
        return metrics


def peak_memory() -> dict[str, float]:
    """Read the highest memory use of this process so far.

    Returns:
        `memory/process_peak_bytes` (resident), and `memory/device_peak_bytes` (allocated by torch on the current CUDA
        device) when torch is loaded and has one.
    """
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    metrics = {"memory/process_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes)}
    # Unless the process has loaded torch, it has nothing on a device to count.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        metrics["memory/device_peak_bytes"] = float(torch.cuda.max_memory_allocated())
    return metrics
