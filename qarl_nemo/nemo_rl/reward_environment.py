"""A NeMo-RL environment that rewards responses by a function: one's own, or the check of `qarl eval`'s benchmarks."""

import itertools
from collections.abc import Mapping
from typing import Any

import ray
import torch
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.environments.math_environment import BaseMathEnvironment
from nemo_rl.environments.utils import chunk_list_to_workers

from qarl_nemo.data.benchmark_problems import is_right
from qarl_nemo.data.benchmarks import BENCHMARKS
from qarl_nemo.data.reward_function import RewardFunction
from qarl_nemo.nemo_rl.problems import RECORD

_WORDS = {1.0: "correct", 0.0: "incorrect"}


def benchmark_reward(response: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 for an answer that is right by the check of the record's `benchmark`, else 0."""
    return float(is_right(BENCHMARKS[record["benchmark"]], response, answer))


class RewardWorker:
    """Calls the function, in the main thread of a process of its own, which math-verify's time limit needs.

    Args:
        path: `module:function`.
    """

    def __init__(self, path: str) -> None:
        self.function = RewardFunction(path)

    def score(self, rows: list[tuple[str, str, dict[str, Any]]]) -> list[float]:
        """Return the rewards of responses, each given with its answer and its record."""
        return [self.function(*row) for row in rows]


@ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=1000)
class RewardFunctionEnvironment(BaseMathEnvironment):
    """Rewards each response once; metrics are those of NeMo-RL's math environment.

    Args:
        cfg: `reward_function`, without which benchmarks are checked, and `num_workers` processes that call it.
    """

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.cfg, self.num_workers = cfg, cfg["num_workers"]
        worker = ray.remote(RewardWorker).options(runtime_env={"py_executable": PY_EXECUTABLES.SYSTEM})
        path = cfg.get("reward_function", f"{__name__}:{benchmark_reward.__name__}")
        self.workers = [worker.remote(path) for _ in range(self.num_workers)]
        self.words = {} if "reward_function" in cfg else _WORDS
        # Requests may come one response at a time, and each goes to the next worker.
        self.next_worker = itertools.count()

    def step(
        self,
        message_log_batch: list[Any],
        metadata: list[dict[str, Any]],
        return_extracted_answer: bool = False,  # noqa: ARG002 what is compared is no text
    ) -> EnvironmentReturn:
        """Reward the assistant's texts.

        Args:
            message_log_batch: B conversations.
            metadata: B times `ground_truth`, and `record` or `benchmark` where the data set is one of this package.
            return_extracted_answer: NeMo-RL's; ignored.

        Returns:
            Rewards [B] FP32; every conversation ends.
        """
        rows = [
            (_response(log), str(one["ground_truth"]), one.get(RECORD, one))
            for log, one in zip(message_log_batch, metadata, strict=True)
        ]
        first = next(self.next_worker)
        futures = [
            self.workers[(first + number) % self.num_workers].score.remote(chunk)
            for number, chunk in enumerate(chunk_list_to_workers(rows, self.num_workers))
            if chunk
        ]
        rewards = [reward for chunk in ray.get(futures) for reward in chunk]
        said = [self.words.get(reward, f"{reward:g}") for reward in rewards]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"Environment: {words}"} for words in said],
            metadata=metadata,
            next_stop_strings=[None] * len(rows),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            terminateds=torch.ones(len(rewards)),
            answers=None,
        )


def _response(log: list[dict[str, Any]]) -> str:
    return "".join(str(message["content"]) for message in log if message["role"] == "assistant")
