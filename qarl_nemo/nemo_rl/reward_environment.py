"""A NeMo-RL environment that rewards responses by a function of one's own."""

import itertools
from typing import Any

import ray
import torch
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.environments.math_environment import BaseMathEnvironment
from nemo_rl.environments.utils import chunk_list_to_workers

from qarl_nemo.data.reward_function import RewardFunction
from qarl_nemo.nemo_rl.problems import RECORD


class RewardWorker:
    """Calls the function, in a process of its own.

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
        cfg: `reward_function`, and `num_workers` processes that call it.
    """

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.cfg, self.num_workers = cfg, cfg["num_workers"]
        worker = ray.remote(RewardWorker).options(runtime_env={"py_executable": PY_EXECUTABLES.SYSTEM})
        self.workers = [worker.remote(cfg["reward_function"]) for _ in range(self.num_workers)]
        # Requests may come one response at a time, and each goes to the next worker.
        self.next_worker = itertools.count()

    def step(self, message_log_batch: list[Any], metadata: list[dict[str, Any]]) -> EnvironmentReturn:
        """Reward the assistant's texts.

        Args:
            message_log_batch: B conversations.
            metadata: B times `ground_truth`, and `record` where the data set is one of this package.

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
        rewards = torch.tensor([reward for chunk in ray.get(futures) for reward in chunk])
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"Environment: {reward:g}"} for reward in rewards],
            metadata=metadata,
            next_stop_strings=[None] * len(rows),
            rewards=rewards,
            terminateds=torch.ones_like(rewards),
            answers=None,
        )


def _response(log: list[dict[str, Any]]) -> str:
    return "".join(str(message["content"]) for message in log if message["role"] == "assistant")
