"""NeMo-RL settings that are legal beside a `qarl:` block and make a run slow."""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.nemo.rl.conflicts import look_up

_PACKING = "policy.sequence_packing"
_EAGER = "policy.generation.vllm_cfg.enforce_eager"


def find_hints(config: Mapping[str, Any]) -> list[str]:
    """Say what costs time for nothing.

    Args:
        config: the whole config, as nested dictionaries.

    Returns:
        One line for each such setting: key, value, what it costs, and what to set.
    """
    hints = []
    if look_up(config, f"{_PACKING}.enabled", False) and not look_up(config, f"{_PACKING}.fuse_loss", False):
        hints.append(
            f"{_PACKING}.fuse_loss=false: the loss is called once a response, about 10 ms each; set true, and it is "
            "called once a micro-batch"
        )
    if look_up(config, _EAGER, False):
        hints.append(f"{_EAGER}=true: every kernel of a decoding step is launched from the host; set false")
    return hints
