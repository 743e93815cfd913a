"""Measure the embedded engine: tokens/s of rollout, prev_logprobs and update, seconds of refit, and memory."""

import argparse
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

from qarl_nemo.config import load_config
from qarl_nemo.metrics.machine import facts
from qarl_nemo.metrics.recorded import read_lines
from qarl_nemo.metrics.results import Figure, record_figures, running_command
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.trainer import Trainer

FORMATS = ("bf16", "w4a16", "w4a8", "fp8_channel", "fp8_block", "int8", "nvfp4")
WARM_UP_STEPS = 3


def bench(config: Path, format_name: str, device: str, steps: int, overrides: list[str]) -> dict[str, float]:
    """Train a few steps from random weights and return medians.

    Args:
        config: the run's YAML.
        format_name: rollout and learner format.
        device: `cpu` or `cuda`.
        steps: measured steps, after three of warm-up.
        overrides: dotted overrides.

    Returns:
        Figures by name, units in the names.
    """
    integer = format_name.startswith("w")
    settings = [
        f"qarl.format={format_name}",
        f"qarl.alignment={'none' if format_name == 'bf16' else 'aligned'}",
        f"qarl.group_size={128 if integer else 'null'}",
        f"device={device}",
        f"grpo.max_num_steps={steps + WARM_UP_STEPS}",
        "grpo.val_period=0",
        "policy.warm_start.steps=0",
        "checkpointing.enabled=false",
        *overrides,
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(load_config(config, [*settings, f"run_dir={folder}/run"], LocalConfig))
        trainer.train()
        records = read_lines(Path(folder) / "run" / "metrics.jsonl")[WARM_UP_STEPS:]
    names = {f"{phase}_tokens_s": f"throughput/{phase}_tokens_s" for phase in ("rollout", "prev_logprobs", "update")}
    figures = {name: median(record[key] for record in records) for name, key in names.items()}
    operands = [slot.operand() for slot in trainer.sampler.slots.values()]
    return figures | {
        "refit_s": median(record["timing/refit_s"] for record in records),
        "refit_bytes": records[-1]["refit/bytes"],
        "master_bytes": float(sum(p.nbytes for p in trainer.model.parameters())),
        "sampler_bytes": float(trainer.sampler.num_bytes),
        "sampler_operand_bytes": float(sum(operand.values.nbytes for operand in operands)),
        "peak_bytes": records[-1]["memory/device_peak_bytes" if device == "cuda" else "memory/process_peak_bytes"],
    }


def main() -> None:
    """Run every format, print its figures, and record them on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("examples/configs/local_demo.yaml"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated")
    parser.add_argument("--record", type=Path, help="results file, e.g. docs/results/bench.json")
    parser.add_argument("overrides", nargs="*", help="dotted overrides, a.b=c")
    arguments = parser.parse_args()
    command = running_command("python tools/bench/embedded_engine.py", "--record")
    for name in arguments.formats.split(","):
        # Each format has a process of its own, so that its memory peak does not hide the next one's.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            task = (arguments.config, name, arguments.device, arguments.steps, arguments.overrides)
            figures = pool.submit(bench, *task).result()
        found: list[Figure] = []
        for key, value in figures.items():
            unit = "tokens/s" if key.endswith("_tokens_s") else key.rpartition("_")[2]
            found.append(Figure(f"bench_{name}_{key}", value, unit, ">=" if unit == "tokens/s" else "<="))
        record_figures(arguments.record, found, command=command, **facts(arguments.device))


if __name__ == "__main__":
    main()
