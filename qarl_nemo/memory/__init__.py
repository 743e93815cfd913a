"""Memory of GPUs and hosts, computed: which model fits on which GPUs, before anything is started.

All sizes are bytes of tensors. What tensors do not account for is `OVERHEAD_BYTES` of a learner, and `ASLEEP_BYTES` of
an engine that shares its GPU, or `EMBEDDED_PROCESS_BYTES` where one process has both; what the allocator reserves and
cannot use comes on top and is not computed.
"""

from qarl_nemo.memory.engine import EngineRanks, arriving_bytes, engine_bytes, refit_bytes, served_bytes
from qarl_nemo.memory.host import host_memory
from qarl_nemo.memory.layouts import layouts, require_layout, require_targets
from qarl_nemo.memory.learner import (
    MAX_TOKENS,
    OPTIMIZERS,
    PARTS,
    Learner,
    Memory,
    Recompute,
    largest_budget,
    logprob_bytes,
    rank_memory,
)
from qarl_nemo.memory.model_size import ModelSize
from qarl_nemo.memory.requests import named_layouts, named_targets, require_groups
from qarl_nemo.memory.units import ASLEEP_BYTES, EMBEDDED_PROCESS_BYTES, ENGINE_BYTES, GIB, MIB, OVERHEAD_BYTES
from qarl_nemo.parallelism import Parallelism

__all__ = [
    "ASLEEP_BYTES",
    "EMBEDDED_PROCESS_BYTES",
    "ENGINE_BYTES",
    "GIB",
    "MAX_TOKENS",
    "MIB",
    "OPTIMIZERS",
    "OVERHEAD_BYTES",
    "PARTS",
    "EngineRanks",
    "Learner",
    "Memory",
    "ModelSize",
    "Parallelism",
    "Recompute",
    "arriving_bytes",
    "engine_bytes",
    "host_memory",
    "largest_budget",
    "layouts",
    "logprob_bytes",
    "named_layouts",
    "named_targets",
    "rank_memory",
    "refit_bytes",
    "require_groups",
    "require_layout",
    "require_targets",
    "served_bytes",
]
