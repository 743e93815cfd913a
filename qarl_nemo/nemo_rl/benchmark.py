"""A benchmark as a NeMo-RL data set, so that validation asks what `qarl eval` asks, in the same words."""

from pathlib import Path
from typing import Any

from datasets import Dataset
from nemo_rl.data.datasets.raw_dataset import RawDataset
from nemo_rl.data.processors import math_hf_data_processor

from qarl_nemo.config import ConfigError
from qarl_nemo.data.benchmark_problems import read_problems
from qarl_nemo.data.benchmarks import find_benchmark

_BENCHMARK = "benchmark"


class Benchmark(RawDataset):
    """One benchmark of `qarl_nemo.data.benchmarks`; its answers are checked in the environment `qarl_benchmark`.

    Without a `prompt_file` it is asked in its record's words, else in the file's, as training is.

    Args:
        benchmark: its name.
        data_path: a local copy in the set's own fields; None reads the hub.
        repeat: how often each problem comes.
        task_name: what NeMo-RL tells data sets apart by; None for the benchmark's name.
        unread: NeMo-RL's other keys of a dataset.

    Raises:
        ConfigError: there is no such benchmark, or its problems cannot be read.
    """

    def __init__(
        self,
        benchmark: str,
        data_path: str | None = None,
        repeat: int = 1,
        task_name: str | None = None,
        **unread: Any,  # noqa: ARG002
    ) -> None:
        try:
            self.record = find_benchmark(benchmark)
            problems = read_problems(self.record, Path(data_path) if data_path else None)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.task_name = task_name or self.record.name
        self.dataset = Dataset.from_list(
            [
                {
                    "messages": [
                        {"role": "user", "content": problem.question},
                        {"role": "assistant", "content": problem.answer},
                    ],
                    "task_name": self.task_name,
                    _BENCHMARK: self.record.name,
                }
                for problem in problems
            ]
        ).repeat(repeat)
        self.val_dataset = None

    def set_task_spec(self, data_config: Any) -> None:
        """Take NeMo-RL's settings of the data set, and the record's prompt where they have none."""
        super().set_task_spec(data_config)
        self.task_spec.prompt = self.task_spec.prompt or self.record.prompt

    def set_processor(self) -> None:
        """Use the processor that tells the environment which benchmark an answer belongs to."""
        self.processor = benchmark_processor


def benchmark_processor(datum: dict[str, Any], *arguments: Any, **named: Any) -> Any:
    """Make a prompt as NeMo-RL does for math, and name the benchmark to the environment.

    Args:
        datum: a record of `Benchmark.dataset`.
        arguments: NeMo-RL's other arguments of a processor.
        named: the same, by name.

    Returns:
        NeMo-RL's `DatumSpec`.
    """
    output = math_hf_data_processor(datum, *arguments, **named)
    output["extra_env_info"][_BENCHMARK] = datum[_BENCHMARK]
    return output
