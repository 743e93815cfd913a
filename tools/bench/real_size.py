"""Measure whole RL steps of a model of real size, learner and engine on one device: response tokens/s by phase.

The model is a Hugging Face folder, or random weights in the shape of a `config.json`; a random model's answers are as
long as they may be, since it hardly ever draws the token that ends one.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qarl_nemo.config import merge_mappings, validate
from qarl_nemo.config.overrides import merge_overrides
from qarl_nemo.metrics.machine import facts
from qarl_nemo.metrics.recorded import read_lines
from qarl_nemo.metrics.results import Figure, record_figures, running_command
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.tokenizer import character_tokenizer
from qarl_nemo.train.trainer import Trainer

WARM_UP_STEPS = 2
GOALS = {"tokens_s": 10_000.0}
PHASES = ("rollout", "reward", "prev_logprobs", "update", "refit")
PROBLEM = (
    "A shop sells {a} boxes of apples a day, with {b} apples in each box. Every third day it sells twice as many. "
    "How many apples does it sell in {c} days? Think step by step and write the answer in \\boxed{{}}."
)


def random_model(config: Path, folder: Path) -> Path:
    """Write random weights in the shape of a config, with a tokenizer of characters.

    Args:
        config: a `config.json`, or its folder.
        folder: where the model goes.
    """
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def step_settings(model: Path, folder: Path, options: argparse.Namespace, **own: Any) -> dict[str, Any]:
    """Return the config of a run whose steps are timed.

    Args:
        model: the model's folder.
        folder: where data and run go.
        options: what the command line says.
        own: blocks of this benchmark, put over those that all have.

    Returns:
        Values of `LocalConfig`.
    """
    num_responses = options.num_prompts * options.num_generations
    lines = [{"problem": PROBLEM.format(a=n % 7 + 3, b=n % 11 + 4, c=n % 13 + 5), "answer": "1"} for n in range(1024)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    vllm = {"engine": "vllm", "kv_cache_gib": options.kv_cache_gib, "max_model_len": 512 + options.max_new_tokens}
    rollout = {"max_new_tokens": options.max_new_tokens, "batch_size": num_responses}
    shared = {
        "run_dir": str(folder / "run"),
        "device": options.device,
        "policy": {"model_path": str(model), "precision": "bfloat16"},
        "rollout": rollout | (vllm if options.engine == "vllm" else {}),
        "loss_fn": {"objective": "tbpo"},
        "grpo": {
            "num_prompts_per_step": options.num_prompts,
            "num_generations_per_prompt": options.num_generations,
            "train_global_batch_size": num_responses // options.minibatches,
            "max_num_steps": options.steps + WARM_UP_STEPS,
            "val_period": 0,
        },
        "data": {"source": "datasets", "train": {"data_path": str(folder / "train.jsonl")}},
        "checkpointing": {"enabled": False},
    }
    return merge_mappings(shared, own)


def settings(model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return a run's config: BF16, int4 on MLPs and attention, token budgets; see `step_settings`."""
    policy = {
        "optimizer": {"name": "adamw", "lr": 1e-6},
        "sequence_packing": {"enabled": True, "train_mb_tokens": 32_768, "logprob_mb_tokens": 65_536},
    }
    qarl = {"format": "w4a16", "group_size": 128, "targets": ["mlp", "attention"]}
    return step_settings(model, folder, options, qarl=qarl, policy=policy)


def bench(options: argparse.Namespace) -> dict[str, float]:
    """Train a few steps and return medians by name, units in the names."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or random_model(options.config_json, folder / "model")
        values = merge_overrides(settings(model, folder, options), options.overrides, LocalConfig)
        Trainer(validate(values, LocalConfig, source="the command line")).train()
        records = read_lines(folder / "run" / "metrics.jsonl")[WARM_UP_STEPS:]
    num_responses = options.num_prompts * options.num_generations
    tokens = [record["response_length_tokens/mean"] * num_responses for record in records]
    figures = {"response_tokens": median(tokens)}
    for phase in (*PHASES, "step"):
        seconds = [record[f"timing/{phase}_s"] for record in records]
        rate = median(count / max(elapsed, 1e-9) for count, elapsed in zip(tokens, seconds, strict=True))
        figures |= {f"{phase}_s": median(seconds), f"{phase}_tokens_s": rate}
    figures["tokens_s"] = figures.pop("step_tokens_s")
    figures["gap_nats"] = median(record["mismatch/abs_gap_mean"] for record in records)
    on_gpu = options.device == "cuda"
    figures["peak_bytes"] = records[-1]["memory/device_peak_bytes" if on_gpu else "memory/process_peak_bytes"]
    return figures


def main() -> None:
    """Run, print the figures, and record them on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="a Hugging Face folder")
    source.add_argument("--config-json", type=Path, help="a config.json, for random weights of its shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", choices=("vllm", "packed"), default="vllm")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--minibatches", type=int, default=4, help="optimizer steps of a rollout batch")
    parser.add_argument("--kv-cache-gib", type=float, default=16.0)
    parser.add_argument("--steps", type=int, default=4, help=f"measured, after {WARM_UP_STEPS} of warm-up")
    parser.add_argument("--label", default="", help="put at the end of the rows' names, e.g. 1.5b")
    parser.add_argument("--record", type=Path, help="results file, e.g. docs/results/real_model.json")
    parser.add_argument("overrides", nargs="*", help="dotted overrides of the run's config, a.b=c")
    options = parser.parse_args()
    figures = bench(options)
    found = []
    for name, value in figures.items():
        unit = "tokens/s" if name.endswith("tokens_s") else name.rpartition("_")[2]
        suffix = f"_{options.label}" if options.label else ""
        found.append(Figure(f"real_{name}{suffix}", value, unit, ">=" if unit == "tokens/s" else "<=", GOALS.get(name)))
    command = running_command("python tools/bench/real_size.py", "--record")
    if options.model:
        # Where it lies is this machine's affair.
        command = command.replace(str(options.model), options.model.name)
    record_figures(options.record, found, command=command, **facts(options.device))


if __name__ == "__main__":
    main()
