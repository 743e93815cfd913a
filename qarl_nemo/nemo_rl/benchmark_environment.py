"""The environment of benchmarks in NeMo-RL: answers are checked as `qarl eval` checks them."""

from typing import Any

import ray
import torch
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.environments.math_environment import BaseMathEnvironment
from nemo_rl.environments.utils import chunk_list_to_workers

from qarl_nemo.data.benchmark_problems import is_right
from qarl_nemo.data.benchmarks import BENCHMARKS


class BenchmarkRewards(BaseMathEnvironment):
    """Rewards 1 for a right answer; reports what NeMo-RL's math environment reports.

    Args:
        cfg: the block `env.qarl_benchmark`: `num_workers`, how many processes check answers.
    """

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.cfg, self.num_workers = cfg, cfg["num_workers"]
        # The base class ends these; tasks of Ray end by themselves.
        self.workers = []

    def step(
        self,
        message_log_batch: list[list[dict[str, Any]]],
        metadata: list[dict[str, Any]],
        return_extracted_answer: bool = False,  # noqa: ARG002 what the check compares is no text
    ) -> EnvironmentReturn:
        """Check a batch of answers.

        Args:
            message_log_batch: conversations; the assistant's messages are the answer.
            metadata: `benchmark` and `ground_truth` of each.
            return_extracted_answer: NeMo-RL's; ignored.

        Returns:
            Rewards [B], and that every conversation has ended.
        """
        answers = [
            "".join(str(one["content"]) for one in log if one["role"] == "assistant") for log in message_log_batch
        ]
        asked = [(row["benchmark"], answer, row["ground_truth"]) for row, answer in zip(metadata, answers, strict=True)]
        # In processes of their own, because math-verify's time limit needs a main thread.
        parts = [_check.remote(part) for part in chunk_list_to_workers(asked, self.num_workers) if part]
        right = [one for part in ray.get(parts) for one in part]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"Environment: {_WORDS[one]}"} for one in right],
            metadata=metadata,
            next_stop_strings=[None] * len(right),
            rewards=torch.tensor(right, dtype=torch.float32),
            terminateds=torch.ones(len(right)),
            answers=None,
        )


_WORDS = {True: "correct", False: "incorrect"}


@ray.remote
def _check(asked: list[tuple[str, str, str]]) -> list[bool]:
    return [is_right(BENCHMARKS[name], answer, expected) for name, answer, expected in asked]


BenchmarkEnvironment = ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=1000)(BenchmarkRewards)
