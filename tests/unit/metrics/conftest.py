"""Synthetic run directories: a learning curve, a mismatch and error tokens of plausible size, from a seed."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from qarl_nemo.metrics.diagnostics import DiagnosticsCollector, make_example
from qarl_nemo.metrics.events import EventWriter
from qarl_nemo.metrics.recorded import FACTS_FILE
from qarl_nemo.metrics.results import ResultRow, read_results

RAN_ON = {"hardware": "1x NVIDIA H200", "versions": {"torch": "2.11.0", "vllm": "0.25.1"}}
ARMS = {
    "aligned": ("w4a16", {"objective": "tbpo", "positive_clip_high": 4e-4, "mismatch_cap": 2.0}, 3e-5),
    "rollout_only": ("w4a16", {"objective": "grpo_tis", "clip_low": 0.2, "clip_high": 0.28}, 3e-2),
    "none": ("bf16", {"objective": "gspo"}, 2e-5),
}


def write_config(run_dir, *, alignment="aligned", seed=0, arm=None, **extra):
    number_format, loss_fn, _ = ARMS[alignment]
    config = {
        "seed": seed,
        "run": {"name": run_dir.name, "arm": arm},
        "qarl": {
            "alignment": alignment,
            "format": number_format,
            "group_size": 32 if number_format != "bf16" else None,
        },
        "loss_fn": loss_fn,
        "optimizer": {"lr": 5e-4},
    } | extra
    run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")


def step_metrics(step, *, alignment, rng):
    gap = ARMS[alignment][2] * (1 + step / 100) * rng.uniform(0.8, 1.2)
    ceiling = 0.62 if alignment == "rollout_only" else 0.75
    timing = {"rollout": 0.11, "reward": 0.01, "prev_logprobs": 0.03, "update": 0.14, "refit": 0.04}
    timing = {f"timing/{name}_s": seconds * rng.uniform(0.9, 1.15) for name, seconds in timing.items()}
    metrics = {
        "time_s": 0.35 * step,
        "weight_version": step,
        "reward/mean": ceiling - (ceiling - 0.3) * np.exp(-step / 40) + rng.normal(0, 0.02),
        "reward/std": 0.4,
        "response_length_tokens/mean": 9 + 4 * np.exp(-step / 60) + rng.normal(0, 0.15),
        "rollout/entropy_estimate": 0.5,
        "truncated_fraction": max(0.0, 0.08 * np.exp(-step / 30) + rng.normal(0, 0.004)),
        "loss/total": rng.normal(0, 0.01),
        "loss/kl_k3": 2e-5 * rng.lognormal(0, 0.3),
        "loss/entropy": 0.3 + 0.9 * np.exp(-step / 50) + rng.normal(0, 0.02),
        "mismatch/abs_gap_mean": gap,
        "mismatch/abs_gap_max": 20 * gap,
        "mismatch/kl_k3": gap**2,
        "error_tokens/rate": 0.004,
        "error_tokens/rate_positive": 0.001 * rng.lognormal(0, 0.3),
        "error_tokens/rate_negative": 0.008 * rng.lognormal(0, 0.3),
        "optim/grad_norm": 0.4 * rng.lognormal(0, 0.25),
        "optim/lr": 5e-4 * min(1, step / 10),
        "optim/skipped_steps": 0,
        "refit/flipped_codes": 0.01 / step,
        "timing/step_s": sum(timing.values()) + 0.01,
        "throughput/rollout_tokens_s": 5200 * rng.uniform(0.9, 1.1),
        "throughput/update_tokens_s": 3900 * rng.uniform(0.9, 1.1),
    } | timing
    for sign, kept in (("positive", 0.8), ("negative", 0.65)):
        metrics[f"loss/fraction_{sign}"] = 0.45
        inside = 0.45 * np.clip(kept + rng.normal(0, 0.04), 0, 1)
        metrics[f"loss/in_band_fraction_{sign}"] = inside
        metrics[f"loss/above_band_fraction_{sign}"] = 0.7 * (0.45 - inside)
        metrics[f"loss/below_band_fraction_{sign}"] = 0.3 * (0.45 - inside)
    if step % 25 == 0:
        metrics["validation/reward"] = metrics["reward/mean"] + 0.04
    return metrics


def write_diagnostics(run_dir, step, *, alignment, rng):
    gap = ARMS[alignment][2]
    shape = num_sequences, num_tokens = 256, 12
    advantage = rng.choice([-1.2, 0.8, 0.0], size=num_sequences, p=[0.45, 0.45, 0.1])
    advantages = np.repeat(advantage[:, None], num_tokens, axis=1)
    prev = np.log(np.clip(rng.beta(4, 0.6, shape), 1e-5, 1))
    garbled = (rng.random(shape) < 0.02) & (advantages < 0)
    prev[garbled] = np.log(rng.uniform(1e-5, 8e-4, garbled.sum()))
    curr = np.minimum(prev + rng.normal(0, 2e-3, shape) - 0.2 * prev * rng.normal(0, 0.05, shape), 0)
    generation = np.minimum(prev + gap * rng.normal(0, 1.3, shape) * (1 - prev), 0)
    collector = DiagnosticsCollector(step)
    sequences = {
        "prox_ratio": np.exp((curr - prev).mean(1)),
        "mismatch_weight": np.exp((prev - generation).mean(1)),
        "advantage": advantage,
        "kept": np.abs(np.exp((curr - prev).mean(1)) - 1) < 4e-4,
        "valid": np.ones(num_sequences, bool),
    }
    collector.add(
        sequences,
        prev_logprobs=prev,
        curr_logprobs=curr,
        generation_logprobs=generation,
        advantages=advantages,
        token_mask=np.ones(shape),
        error_mask=garbled,
    )
    example = make_example(
        prompt="57+68=",
        tokens=["1", "2", "5", "<b>", "+", "+", "=", "9"],
        answer="125",
        reward=0.0,
        advantage=-1.2,
        error_mask=[False, False, False, True, True, True, False, True],
        prev_logprobs=[-0.1, -0.2, -0.1, -8.0, -7.5, -7.7, -2.0, -9.0],
        generation_logprobs=[-0.1, -0.2, -0.1, -8.2, -7.1, -7.9, -2.1, -9.4],
    )
    collector.write(run_dir, [example])


def noise_metrics(step):
    stage = (step - 1) // 5
    return {"noise/stage": stage, "noise/sigma": 0.01 * stage, "noise/rms": 0.009 * stage}


def write_run(
    run_dir: Path,
    *,
    alignment="aligned",
    seed=0,
    arm=None,
    num_steps=12,
    diagnostics=True,
    noise=False,
    grids=(),
    **extra,
):
    rng = np.random.default_rng((seed, len(alignment)))
    write_config(run_dir, alignment=alignment, seed=seed, arm=arm, **extra)
    (run_dir / FACTS_FILE).write_text(json.dumps(RAN_ON))
    with EventWriter(run_dir) as writer:
        for step in range(1, num_steps + 1):
            metrics = step_metrics(step, alignment=alignment, rng=rng)
            metrics |= noise_metrics(step) if noise else {}
            writer.write(step, metrics | ({"refit/grid_bits": grids[step - 1]} if grids else {}))
    if diagnostics:
        write_diagnostics(run_dir, num_steps, alignment=alignment, rng=rng)
    modules = [
        {
            "name": f"model.layers.{layer}.mlp.experts",
            "kind": "experts",
            "shape": [8, 256, 128],
            "format": ARMS[alignment][0],
            "quantized": True,
            "reason": "",
        }
        for layer in range(2)
    ]
    skipped = {"name": "lm_head", "kind": "linear", "shape": [32, 128], "format": "bf16", "quantized": False}
    modules.append(skipped | {"reason": "lm_head stays BF16"})
    (run_dir / "quantized.json").write_text(json.dumps(modules))
    return run_dir


@pytest.fixture(scope="session")
def write_synthetic_run():
    """Write a run directory anywhere: write_synthetic_run(path, alignment=..., seed=..., num_steps=...)."""
    return write_run


@pytest.fixture
def make_run(tmp_path):
    """Write a run directory under the test's folder: make_run("name", alignment=..., seed=..., num_steps=...)."""
    return lambda name, **settings: write_run(tmp_path / name, **settings)


@pytest.fixture
def record(monkeypatch, tools, tmp_path):
    """Run a program of tools/record and return the rows that it wrote, by name: record("train_runs", option, ...)."""
    tools("record")

    def run(tool: str, *arguments: object) -> dict[str, ResultRow]:
        output = tmp_path / "rows.json"
        monkeypatch.setattr(sys, "argv", [tool, *map(str, arguments), "--record", str(output)])
        runpy.run_module(tool, run_name="__main__")
        return {row.name: row for row in read_results(output)}

    return run
