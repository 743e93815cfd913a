"""The configs of whole steps, for tests that have `tools("bench/full_size")`."""

import json
from pathlib import Path

import yaml

from qarl_nemo.config import merge_mappings, read_yaml
from support.nemo_rl.recipes import BELOW, own_settings

MODEL = Path(__file__).parents[2] / "examples" / "models" / "qwen3-30b-a3b"


def composed(workload, arm, placement, gib, changes, folder):
    """An arm's config, as far as files here say it."""
    from arms import ARMS, IN_FLIGHT, nested, settings
    from workloads import WORKLOADS

    model = read_yaml(MODEL / "config.json") | {"num_hidden_layers": WORKLOADS[workload].layers}
    (folder / "config.json").write_text(json.dumps(model))
    above = settings(arm, placement, workload, "NEMO_RL")
    values = BELOW
    for file in above.pop("defaults"):
        values = merge_mappings(values, {} if file.startswith("NEMO_RL") else own_settings(Path(file)))
    values = merge_mappings(values, above)
    values["policy"]["model_name"] = str(folder)
    own = {"format": "bf16", "alignment": "none"} if ARMS[arm].recipe is None else {}
    values = merge_mappings(values, {"qarl": {"gpu_memory_gib": gib} | own})
    for key, _, value in (change.partition("=") for change in changes):
        values = merge_mappings(values, nested({key: yaml.safe_load(value)}))
    # NeMo-RL's own asynchronous arms may; aligned ones may not.
    first, *_, last = IN_FLIGHT.split(".")
    values[first].get("async_grpo", {}).pop(last, None)
    return values
