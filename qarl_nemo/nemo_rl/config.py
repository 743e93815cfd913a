"""Checks the `qarl:` block against NeMo-RL's settings and puts it where workers find it. Does not import NeMo-RL."""

from collections.abc import Mapping, MutableMapping
from math import ceil
from typing import Any

from pydantic import BaseModel

from qarl_formats import DEFAULT_FORMAT
from qarl_nemo.config import ConfigError, validate
from qarl_nemo.memory import GIB
from qarl_nemo.nemo_rl.block import NemoQarlConfig
from qarl_nemo.nemo_rl.checks.conflicts import find_conflicts
from qarl_nemo.nemo_rl.engine_room import CACHE, engine_room
from qarl_nemo.nemo_rl.layout_memory import card, needed_memory
from qarl_nemo.nemo_rl.plugin import SENTINEL
from qarl_nemo.nemo_rl.residency import optimizer_stays


def apply_qarl(master_config: Any) -> NemoQarlConfig:
    """Check a NeMo-RL config together with its `qarl:` block, and put the block where NeMo-RL's workers see it.

    `policy.qarl` and `policy.generation.qarl` become plain dictionaries, `policy.generation.quant_cfg` becomes the
    sentinel that selects our vLLM worker, `policy.offload_optimizer_for_refit` follows from `resident`, and
    `gpu_memory_utilization`, by which workers decide what stays, from `kv_cache_memory_bytes` if that is set. Shapes
    are checked if the model's config.json is at hand (`policy.model_name` is a folder, or in Hugging Face's cache);
    workers check them in any case.

    Args:
        master_config: NeMo-RL's `MasterConfig`, or the nested dictionary of one; changed in place.

    Returns:
        The checked block, `router_replay` and `resident` resolved.

    Raises:
        ConfigError: no `qarl:` block, an illegal key or value in it, or conflicts with NeMo-RL's keys; all are listed,
            each with key, value, legal values and the fix.
    """
    values = as_mapping(master_config)
    block = values.get("qarl")
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"the config has no `qarl:` block, so nothing would be quantized; add `qarl: {{format: "
            f"{DEFAULT_FORMAT}}}`, or run NeMo-RL's own examples/run_grpo.py"
        )
    qarl = validate({"qarl": block}, _Whole, source="config").qarl
    problems = find_conflicts(values, qarl)
    if problems:
        raise ConfigError(f"qarl: {len(problems)} conflict(s) with NeMo-RL's settings\n  " + "\n  ".join(problems))
    policy = master_config["policy"] if isinstance(master_config, Mapping) else master_config.policy
    replay = bool((policy.get("router_replay") or {}).get("enabled", False))
    stays = optimizer_stays(values, qarl)
    qarl = qarl.model_copy(update={"router_replay": replay, "resident": stays})
    policy["offload_optimizer_for_refit"] = not stays
    policy["qarl"] = qarl.model_dump(mode="json")
    generation: MutableMapping[str, Any] = policy["generation"]
    generation["qarl"], generation["quant_cfg"] = qarl.model_dump(mode="json"), SENTINEL
    needed, gpu_bytes = needed_memory(values, qarl, optimizer_stays=stays), card(qarl).gib * GIB
    room = engine_room(values, needed, gpu_bytes) if needed else None
    if room is not None and room.key == CACHE:
        generation["vllm_cfg"]["gpu_memory_utilization"] = ceil(room.share * 100) / 100
    return qarl


def as_mapping(master_config: Any) -> Mapping[str, Any]:
    """Return a NeMo-RL config as nested dictionaries."""
    return master_config.model_dump() if isinstance(master_config, BaseModel) else master_config


class _Whole(BaseModel):
    qarl: NemoQarlConfig
