"""How much of a GPU an engine takes, according to a config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qarl_nemo.memory import ENGINE_BYTES
from qarl_nemo.nemo_rl.layout_memory import Needed
from qarl_nemo.nemo_rl.lookup import look_up

UTILIZATION = "policy.generation.vllm_cfg.gpu_memory_utilization"
CACHE = "policy.generation.vllm_kwargs.kv_cache_memory_bytes"


@dataclass(frozen=True)
class EngineRoom:
    """The key that decides what an engine takes.

    Attributes:
        key: `gpu_memory_utilization`, or `kv_cache_memory_bytes`, in place of which vLLM does not read the first.
        value: the config's.
        share: the part of a GPU that follows: of the second, weights, cache and what an engine has beside them.
    """

    key: str
    value: float
    share: float

    def at(self, share: float, needed: Needed, gpu_bytes: float) -> float:
        """Return the value of the key with which an engine takes another share of a GPU.

        Args:
            share: that share.
            needed: what GPUs will hold.
            gpu_bytes: one GPU's memory.
        """
        return share if self.key == UTILIZATION else max(0, int(share * gpu_bytes - needed.engine - ENGINE_BYTES))


def engine_room(config: Mapping[str, Any], needed: Needed, gpu_bytes: float) -> EngineRoom | None:
    """Read what an engine takes of a GPU.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.
        needed: what GPUs will hold.
        gpu_bytes: one GPU's memory.

    Returns:
        The key, its value and the share; None if the config says neither.
    """
    cache, share = look_up(config, CACHE, None), look_up(config, UTILIZATION, None)
    if isinstance(cache, int) and not isinstance(cache, bool):
        return EngineRoom(CACHE, cache, (needed.engine + ENGINE_BYTES + cache) / gpu_bytes)
    return EngineRoom(UTILIZATION, share, share) if isinstance(share, int | float) else None
