"""Validations of made-up runs."""

import json
from pathlib import Path
from typing import Any

from qarl_nemo.config import write_yaml
from qarl_nemo.metrics.report.arms import Arm, group_by_arm
from qarl_nemo.metrics.runs import load_runs
from qarl_nemo.metrics.validations import write_validation


def answers(right: list[int], dataset: str = "gsm8k") -> list[dict[str, Any]]:
    """Return an answer a problem, right or wrong."""
    return [
        {
            "dataset": dataset,
            "prompt": f"problem {place}",
            "answer": "1",
            "response": "so 1",
            "reward": float(reward),
            "num_tokens": 2,
            "truncated": False,
        }
        for place, reward in enumerate(right)
    ]


def nemo_rl_lines(right: list[int]) -> str:
    """Return the same as NeMo-RL's loop dumps it."""
    return "".join(
        json.dumps(
            {
                "content": [
                    [{"role": "user", "content": f"problem {place}"}, {"role": "assistant", "content": "so 1"}]
                ],
                "rewards": [reward],
                "idx": place,
            }
        )
        + "\n"
        for place, reward in enumerate(right)
    )


def make_arm(folder: Path, name: str, *seeds: dict[int, list[int]]) -> Arm:
    """Return an arm whose runs, one a seed, have these validations by step."""
    paths = []
    for seed, validations in enumerate(seeds, start=1):
        path = folder / f"{name}-seed{seed}"
        path.mkdir()
        write_yaml(path / "config.yaml", {"run": {"arm": name}, "seed": seed})
        for step, right in validations.items():
            write_validation(path, step, answers(right))
        paths.append(path)
    (arm,) = group_by_arm(load_runs(paths))
    return arm
