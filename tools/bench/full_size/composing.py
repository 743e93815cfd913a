"""An arm's whole config, as its launcher will read it, and whether the host's memory is enough for it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from arms import nested

from qarl_nemo.config import merge_mappings
from qarl_nemo.files import read_text
from qarl_nemo.memory import GIB
from qarl_nemo.nemo_rl.block import NemoQarlConfig
from qarl_nemo.nemo_rl.layout_memory import first_host_gib, needed_memory
from qarl_nemo.nemo_rl.residency import optimizer_stays

_ROOT = "${oc.env:NEMO_RL_ROOT}"
OPTIMIZER = "policy.megatron_cfg.optimizer.optimizer"
_BATCHES = ("sequence_packing", "dynamic_batching")
# NeMo-RL's own learner computes in BF16.
_OWN_BLOCK = {"format": "bf16", "alignment": "none"}


def compose(config: Mapping[str, Any], nemo_rl: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Merge a config with the files below it and what stands on its command line, without NeMo-RL.

    Args:
        config: as `arms.settings` composes it, with paths or without.
        nemo_rl: NeMo-RL's folder, for which recipes have a variable.
        overrides: `a.b=c`, with Hydra's signs before them.

    Returns:
        Nested dictionaries; references between keys are kept as they stand.
    """
    values: dict[str, Any] = {}
    for file in config.get("defaults", ()):
        values = merge_mappings(values, _read(Path(file), nemo_rl))
    values = merge_mappings(values, {key: block for key, block in config.items() if key != "defaults"})
    for key, _, value in (override.lstrip("+").partition("=") for override in overrides):
        # What it takes away with a tilde decides about nothing here.
        if not key.startswith("~"):
            values = merge_mappings(values, nested({key: _parsed(value)}))
    return values


def host_hint(config: Mapping[str, Any], nemo_rl: Path, overrides: Sequence[str], *, ours: bool) -> str:
    """Say that more is computed for the host's memory than this machine has; empty if not, or if it has no GPU.

    Args:
        config: as for `compose`.
        nemo_rl: likewise.
        overrides: likewise.
        ours: whether our learner runs it, and not NeMo-RL's own.
    """
    room = first_host_gib()
    if room is None:
        return ""
    try:
        computed = _host_gib(compose(config, nemo_rl, overrides), ours=ours)
    except ValueError:
        # What is wrong with its config is for the launcher to say.
        return ""
    if computed <= room:
        return ""
    return (
        f"{computed:.0f} GiB are computed for the host's memory, and this machine has {room:.0f}: the system may kill "
        "a worker, and the run with it; engines of more GPUs hold fewer copies of the weights, and an optimizer that "
        "stays on the GPU leaves none of its state there"
    )


def _host_gib(config: dict[str, Any], *, ours: bool) -> float:
    # Micro-batches, which NeMo-RL writes as products of other keys, take nothing there.
    values = merge_mappings(config, {"policy": {name: {"_override_": True} for name in _BATCHES}})
    qarl = NemoQarlConfig.model_validate(values["qarl"] if ours else _OWN_BLOCK)
    stays = optimizer_stays(values, qarl)
    # NeMo-RL's own learner always parts with its parameters.
    needed = needed_memory(values, qarl, optimizer_stays=stays, parameters_stay=stays and ours, engines_forget=ours)
    return sum(needed.host.values()) / GIB if needed else 0.0


def _parsed(value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        # Whether it is none is for the launcher to say.
        return value


def _read(file: Path, nemo_rl: Path) -> dict[str, Any]:
    own = yaml.load(read_text(file, "a recipe"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
    below = own.pop("defaults", [])
    values: dict[str, Any] = {}
    for name in [below] if isinstance(below, str) else below:
        values = merge_mappings(values, _read(file.parent / name.replace(_ROOT, str(nemo_rl.absolute())), nemo_rl))
    return merge_mappings(values, own)
