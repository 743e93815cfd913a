"""A validation's answers, one a line, and how far apart two arms' answers to the same problems are.

RUN/validation/step_000100.jsonl          dataset, prompt, answer, response, reward, num_tokens, truncated
LOG_DIR/exp_001/val_data_step100.jsonl    NeMo-RL's own: content, the messages, and rewards
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qarl_nemo.files import FileError, write_atomic
from qarl_nemo.metrics.estimate import Estimate, mean_of
from qarl_nemo.metrics.nemo_rl_logs import run_files
from qarl_nemo.metrics.recorded import each_line

VALIDATION_DIR = "validation"
_NAME, _NEMO_RL_NAME = re.compile(r"step_(\d+)\.jsonl"), re.compile(r"val_data_step(\d+)\.jsonl")

# Data set and prompt: what makes two runs' problems the same.
Problem = tuple[str, str]


def write_validation(run_dir: Path, step: int, answers: Iterable[Mapping[str, Any]]) -> Path:
    """Write a validation's answers, whole or not at all.

    Args:
        run_dir: the run's folder.
        step: training step after which the validation was.
        answers: with the keys that the module's docstring names.

    Returns:
        Path of the file.
    """
    folder = run_dir / VALIDATION_DIR
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.jsonl"
    write_atomic(path, "".join(json.dumps(answer) + "\n" for answer in answers))
    return path


def validation_files(run_dir: Path) -> dict[int, Path]:
    """Return the files of a run's validations by step; of a run of NeMo-RL's that was resumed, the later start's."""
    found = {file: _NAME.fullmatch(file.name) for file in run_dir.glob(f"{VALIDATION_DIR}/*")}
    ours = {int(name[1]): file for file, name in found.items() if name}
    return dict(sorted((ours or run_files(run_dir, _NEMO_RL_NAME)).items()))


def read_rewards(file: Path) -> dict[Problem, float]:
    """Read what each problem of a validation earned, the mean of its answers if it has several.

    Args:
        file: one of `validation_files`.

    Raises:
        FileError: a line is no answer.
    """
    earned: dict[Problem, list[float]] = {}
    for number, line in enumerate(each_line(file), start=1):
        try:
            problem, reward = _answer(line)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise FileError(
                f"{file}, line {number} is damaged: expected an answer with its problem and reward, "
                f"but: {type(error).__name__} {error}"
            ) from error
        earned.setdefault(problem, []).append(reward)
    return {problem: math.fsum(rewards) / len(rewards) for problem, rewards in earned.items()}


def paired(one: Mapping[Problem, float], other: Mapping[Problem, float]) -> Estimate:
    """Return mean_i (one_i - other_i) over the problems that both have; NaN if they have none in common.

    Pairing takes out what makes some problems harder than others, which is most of the error of either mean.
    """
    return mean_of(reward - other[problem] for problem, reward in one.items() if problem in other)


def _answer(line: Mapping[str, Any]) -> tuple[Problem, float]:
    if "rewards" not in line:
        return (str(line["dataset"]), json.dumps(line["prompt"])), float(line["reward"])
    # NeMo-RL's loop writes lists of one, and names no data set.
    messages = line["content"][0]
    asked = [message["content"] for message in messages if message["role"] in ("system", "user")]
    return ("", json.dumps(asked)), float(line["rewards"][0])
