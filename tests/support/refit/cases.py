"""The engines that the refit tests start, and what is asked of each: plain data, for both processes."""

from dataclasses import dataclass

FORMATS = ("w4a16", "w4a8", "fp8_block", "fp8_channel", "int8", "nvfp4", "bf16")
ALL = ("experts", "attention")
NO_START = "an engine that vLLM refuses to start"


@dataclass(frozen=True)
class EngineCase:
    """One engine.

    Attributes:
        format: the targeted layers' format.
        checks: functions of `checks`, in this order; or `NO_START`.
        group_size: elements per scale; None for the format's own.
        targets: what is quantized.
        device: `cuda` or `cpu`.
        starts_from: which of the two checkpoints it loads, `A` or `B`.
        sender: `direct`, `ipc`, `collective` or `file`.
        tensor_parallel: GPUs of the engine; with `expert_parallel` each holds whole experts.
        rounds: how often weights go there and back again.
        sleeps: started so that it can sleep.
        expert_size: I, width of an expert; 0: a dense model whose q, k and v have biases.
        one_kernel_at_a_time: every launch waits for the one before, whatever its stream.
        rehearsed: updates come layer by layer, twice.
        nested_in: the finer format that updates are published in.
        adapters: updates bring adapters of all targets, and norms; the base stays.
    """

    format: str
    checks: tuple[str, ...]
    group_size: int | None = None
    targets: tuple[str, ...] = ALL
    device: str = "cuda"
    starts_from: str = "A"
    sender: str = "direct"
    tensor_parallel: int = 1
    expert_parallel: bool = False
    rounds: int = 3
    sleeps: bool = False
    expert_size: int = 512
    one_kernel_at_a_time: bool = False
    rehearsed: bool = False
    nested_in: str | None = None
    adapters: bool = False

    @property
    def name(self) -> str:
        """A name that differs from every other case's."""
        parts = [self.device, self.format]
        if self.group_size:
            parts.append(f"g{self.group_size}")
        parts += ["+".join(self.targets), self.sender, f"from{self.starts_from}"]
        if self.tensor_parallel > 1:
            parts.append(f"{'ep' if self.expert_parallel else 'tp'}{self.tensor_parallel}")
        if self.expert_size != 512:
            parts.append(f"I{self.expert_size}" if self.expert_size else "dense")
        if self.one_kernel_at_a_time:
            parts.append("blocking")
        if self.rehearsed:
            parts.append("rehearsed")
        if self.nested_in:
            parts.append("nested")
        if self.adapters:
            parts.append("adapters")
        return "-".join(parts)

    @property
    def in_this_process(self) -> bool:
        """Whether the engine runs in the learner's process, as CPU vLLM always does."""
        return self.sender == "direct" or self.device == "cpu"

    @property
    def loads_what_it_should(self) -> bool:
        """Whether vLLM's own load is to be trusted: on several ranks it packs W4A8's scales while another stream still
        writes them."""
        return self.format != "w4a8" or self.tensor_parallel == 1 or self.one_kernel_at_a_time

    @property
    def num_gpus(self) -> int:
        """GPUs of engine and learner together; a collective's learner has one of its own."""
        return self.tensor_parallel + (self.sender == "collective")


_BRIEF = ("first_refit", "there_and_back")
_REHEARSED = (*_BRIEF, "broken_rehearsal")
_WHOLE = ("methods", *_BRIEF, "prefix_cache", "refusals", "cuts", "in_flight", "memory")
_ADAPTERS = ("methods", "there_and_back", "prefix_cache", "refusals", "cuts", "in_flight", "memory", "saved_adapter")
# The formats whose experts' kernels vLLM runs beside adapters.
_ADAPTED = ("w4a16", "w8a16", "fp8_block", "int8", "nvfp4", "bf16")
# (format, group size)
_GROUPS = ((name, None) for name in FORMATS), (("w4a16", 64), ("w4a16", 32))
_STORED = tuple(pair for pairs in _GROUPS for pair in pairs)


def one_gpu() -> list[EngineCase]:
    """Every format and target set, each from both checkpoints, so that what one loads another is refitted to."""
    cases = []
    for name, size in _STORED:
        rounds = 100 if size is None else 3
        cases.append(EngineCase(name, _WHOLE if size is None else _BRIEF, size, rounds=rounds))
        checks = (*_BRIEF, "refusals", "cuts", "in_flight", "sleep", "memory")
        cases.append(EngineCase(name, checks, size, starts_from="B", sender="ipc", sleeps=True))
    for name in FORMATS:
        cases.append(EngineCase(name, ("methods", *_BRIEF), targets=("experts",)))
        cases.append(EngineCase(name, _BRIEF, targets=("experts",), starts_from="B", sender="file"))
        cases.append(EngineCase(name, (*_REHEARSED, "memory"), sender="ipc", rehearsed=True))
        cases.append(EngineCase(name, _BRIEF, targets=("attention", "mlp"), expert_size=0))
    # The kernels of w4a16, with words of four codes.
    cases.append(EngineCase("w8a16", _WHOLE, rounds=100))
    cases.append(EngineCase("w8a16", (*_BRIEF, "sleep"), 64, starts_from="B", sender="ipc", sleeps=True))
    cases.append(EngineCase("w8a16", _REHEARSED, sender="ipc", rehearsed=True))
    for name, size in (("w8a16", 32), ("w4a16", None), ("w2a16", 32), ("w4a8", None)):
        rounds = 100 if name == "w4a16" else 3
        cases.append(EngineCase(name, _BRIEF, size, nested_in="w8a16", rounds=rounds))
    cases.append(EngineCase("w4a16", _REHEARSED, sender="ipc", rehearsed=True, nested_in="w8a16"))
    for name in _ADAPTED:
        cases.append(EngineCase(name, _ADAPTERS, adapters=True))
        cases.append(EngineCase(name, ("there_and_back", "sleep"), adapters=True, sender="ipc", sleeps=True))
    # After the other checks, as its process is killed in the end.
    cases.append(EngineCase("w4a16", ("faults",), sender="ipc", targets=("experts",), rounds=100))
    return cases


def several_gpus() -> list[EngineCase]:
    """Tensor parallelism of 2, expert parallelism of 2 and 4, and the learner on a GPU of its own."""
    checks = (*_BRIEF, "refusals", "cuts", "memory")
    cases = [EngineCase(name, checks, size, sender="ipc", tensor_parallel=2) for name, size in _STORED if size != 32]
    for ranks in (2, 4):
        cases += [
            EngineCase(name, checks, sender="ipc", tensor_parallel=ranks, expert_parallel=True) for name in FORMATS
        ]
    for ranks, experts in ((2, False), (2, True), (4, True)):
        layout = {"tensor_parallel": ranks, "expert_parallel": experts}
        cases.append(EngineCase("w4a8", ("first_refit",), sender="ipc", one_kernel_at_a_time=True, **layout))
    cases += [EngineCase(name, checks, sender="collective") for name in ("w4a16", "fp8_block", "bf16")]
    cases.append(EngineCase("w4a8", checks, sender="collective", tensor_parallel=2))
    cases.append(EngineCase("w4a16", checks, sender="collective", tensor_parallel=2, expert_parallel=True))
    cases.append(EngineCase("w4a16", _BRIEF, sender="file", tensor_parallel=2))
    cases.append(EngineCase("w4a16", _REHEARSED, sender="ipc", tensor_parallel=2, rehearsed=True))
    cases.append(EngineCase("bf16", _REHEARSED, sender="ipc", tensor_parallel=2, expert_parallel=True, rehearsed=True))
    cases.append(EngineCase("fp8_block", _REHEARSED, sender="collective", rehearsed=True))
    cases.append(EngineCase("w4a16", _BRIEF, sender="ipc", tensor_parallel=2, nested_in="w8a16"))
    for name in ("w4a16", "bf16"):
        for experts in (False, True):
            layout = {"tensor_parallel": 2, "expert_parallel": experts}
            cases.append(EngineCase(name, _ADAPTERS, adapters=True, sender="ipc", **layout))
    cases.append(EngineCase("w4a16", _ADAPTERS, adapters=True, sender="collective"))
    for layout in ({"tensor_parallel": 2}, {"tensor_parallel": 2, "expert_parallel": True}):
        cases.append(EngineCase("w8a16", _BRIEF, sender="ipc", **layout))
    # 192 on each rank: not a multiple of the group.
    cases.append(EngineCase("w4a16", (NO_START,), sender="ipc", tensor_parallel=2, expert_size=384))
    return cases


def on_cpu() -> list[EngineCase]:
    """What CPU vLLM serves."""
    checks = ("methods", *_BRIEF, "prefix_cache", "refusals", "cuts", "in_flight")
    return [
        EngineCase("w4a16", checks, 64, device="cpu"),
        EngineCase("w4a16", ("first_refit", "missed_broadcast"), 64, device="cpu", sender="collective"),
        EngineCase("fp8_block", _BRIEF, targets=("experts",), device="cpu", sender="file", starts_from="B"),
        EngineCase("w4a16", ("faults",), 64, targets=("experts",), device="cpu", rounds=100),
    ]
