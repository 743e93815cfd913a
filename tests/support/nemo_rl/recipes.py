"""Recipes without NeMo-RL's below them, for machines that do not have it."""

from pathlib import Path
from typing import Any

import yaml

from qarl_nemo.config import merge_mappings

NEMO_RL = "${oc.env:NEMO_RL_ROOT}/examples/configs/"


def own_settings(path: Path) -> dict[str, Any]:
    """What our files of a recipe say, without NeMo-RL's below them."""
    own = yaml.safe_load(path.read_text())
    parents = own.pop("defaults", [])
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        if not parent.startswith(NEMO_RL):
            merged = merge_mappings(merged, own_settings(path.parent / parent))
    return merge_mappings(merged, own)
