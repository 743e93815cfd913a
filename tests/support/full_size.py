"""The configs and logs of whole steps, for tests that have `tools("bench/full_size")`."""

import csv
import json
from pathlib import Path

import numpy as np
import yaml
from torch.utils.tensorboard import SummaryWriter

from qarl_nemo.config import merge_mappings, read_yaml
from support.nemo_rl.recipes import BELOW, own_settings

MODEL = Path(__file__).parents[2] / "examples" / "models" / "qwen3-30b-a3b"
# Refit, rollout, rewards, log-probabilities and update, as NeMo-RL times them.
SECONDS = {
    "prepare_for_generation/total": 2,
    "generation": 10,
    "reward_calculation": 0,
    "logprob_inference_prep": 1,
    "policy_and_reference_logprobs": 3,
    "training_prep": 0,
    "policy_training": 6,
}


def composed(workload, arm, placement, gib, changes, folder):
    """An arm's config, as far as files here say it."""
    from arms import ARMS, IN_FLIGHT, nested, settings
    from workloads import WORKLOADS

    model = read_yaml(MODEL / "config.json") | {"num_hidden_layers": WORKLOADS[workload].layers}
    (folder / "config.json").write_text(json.dumps(model))
    above = settings(arm, placement, WORKLOADS[workload], "NEMO_RL")
    values = BELOW
    for file in above.pop("defaults"):
        values = merge_mappings(values, {} if file.startswith("NEMO_RL") else own_settings(Path(file)))
    values = merge_mappings(values, above)
    values["policy"]["model_name"] = str(folder)
    own = {"format": "bf16", "alignment": "none"} if ARMS[arm].recipe is None else {}
    values = merge_mappings(values, {"qarl": {"gpu_memory_gib": gib} | own})
    for key, _, value in (change.lstrip("+").partition("=") for change in changes):
        values = merge_mappings(values, nested({key: yaml.safe_load(value)}))
    # NeMo-RL's own asynchronous arms may; aligned ones may not.
    first, *_, last = IN_FLIGHT.split(".")
    values[first].get("async_grpo", {}).pop(last, None)
    return values


def write_run(
    folder,
    *,
    ends,
    arm="w4a16",
    workload="a24",
    placement="colocated",
    allocated=None,
    work=None,
    refit=None,
    seconds=(),
    phases=SECONDS,
    host="",
):
    """Steps, of 22 s if nothing else is said, that end at these times; the GPU holds as many GiB as a step's second."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"arm": arm, "workload": workload, "placement": placement, "command": "run", "host": host}
    facts |= {} if work is None else {"work": work}
    (folder / "facts.json").write_text(json.dumps(facts))
    start = folder / "logs" / "exp_001"
    writer = SummaryWriter(log_dir=str(start / "tensorboard"))
    for step, end in enumerate(ends, start=1):
        writer.add_scalar("train/loss", 0.0, step, walltime=end)
        total = seconds[step - 1] if seconds else 22.0
        writer.add_scalar("timing/train/total_step_time", total, step, walltime=end)
        for phase, took in phases.items():
            writer.add_scalar(f"timing/train/{phase}", took, step, walltime=end)
        writer.add_scalar("train/mean_gen_tokens_per_sample", 100.0, step, walltime=end)
        writer.add_scalar("train/qarl/memory/update_reserved_gib", 90.0 + step, step, walltime=end)
        for part, took in (refit or {}).items():
            writer.add_scalar(f"refit/{part}_s", took, step, walltime=end)
        if allocated is not None:
            writer.add_scalar("train/qarl/memory/update_allocated_gib", allocated, step, walltime=end)
    writer.close()
    with (folder / "memory.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["time_s", "host_gib", "host_anonymous_gib", "gpu0_gib", "gpu1_gib"])
        for second in np.arange(ends[0] - 22, ends[-1] + 5):
            rows.writerow([second, 40.0, 9.0, 1.0, (second - ends[0]) % 22])
