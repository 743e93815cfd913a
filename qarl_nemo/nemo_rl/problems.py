"""Data sets of NeMo-RL that read what the embedded engine's read: fields of one's own, GSM8K, MATH, OpenR1-Math-46K."""

import json
from typing import Any, ClassVar

from datasets import Dataset
from nemo_rl.data.datasets.raw_dataset import RawDataset
from nemo_rl.data.processors import math_hf_data_processor

from qarl_nemo.config import ConfigError, validate
from qarl_nemo.data.config import DatasetConfig
from qarl_nemo.data.problems import Messages, read_tasks
from qarl_nemo.nemo_rl.data_checks import DATA_SETS, READ

RECORD = "record"


class Problems(RawDataset):
    """Problems with answers from a file, a folder or the hub; of messages, the last one of the user is the problem.

    Args:
        split_validation_size: share or number of problems set aside for validation.
        seed: seeds their choice.
        given: keys of `DatasetConfig` out of `READ`; NeMo-RL's other keys of a data set are not read.

    Raises:
        ConfigError: the data set cannot be loaded, or records lack a field; all are listed.
    """

    named: ClassVar[str] = DATA_SETS["Problems"]

    def __init__(self, split_validation_size: float = 0, seed: int = 42, **given: Any) -> None:
        values = {"dataset_name": self.named} | {key: given[key] for key in READ if key in given}
        config = validate(values, DatasetConfig, source=f"data set {type(self).__name__}")
        try:
            tasks = read_tasks(config)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        # NeMo-RL tells data sets apart by this name.
        self.task_name = f"{config.title}-{config.split}"
        self.dataset = Dataset.from_list(
            [
                {
                    "messages": [
                        {"role": "user", "content": _problem(task.prompt)},
                        {"role": "assistant", "content": task.answer},
                    ],
                    "task_name": self.task_name,
                    RECORD: json.dumps(task.record, default=str),
                }
                for task in tasks
            ]
        )
        self.val_dataset = None
        self.split_train_validation(split_validation_size, seed)

    def set_processor(self) -> None:
        """Take NeMo-RL's processor, unless a recipe names another one, and hand on the record for a reward function."""
        super().set_processor()
        if "processor" not in self.data_config or self.processor is math_hf_data_processor:
            self.processor = with_record


class GSM8K(Problems):
    """GSM8K from the hub or a local copy; answers are what follows `####`."""

    named = DATA_SETS["GSM8K"]


class MATH(Problems):
    r"""MATH from the hub or a local copy; answers are the content of the last `\boxed{}`."""

    named = DATA_SETS["MATH"]


class OpenR1Math46K(Problems):
    """OpenR1-Math-46K, the paper's training data, or any other with the same fields."""

    named = DATA_SETS["OpenR1Math46K"]


def with_record(
    datum_dict: dict[str, Any], task_data_spec: Any, tokenizer: Any, max_seq_length: int | None, idx: int
) -> dict[str, Any]:
    """Process one problem as NeMo-RL does, and put its record beside the answer.

    Args:
        datum_dict: a row of the data set.
        task_data_spec: prompt and system prompt.
        tokenizer: whose chat template is used.
        max_seq_length: prompts of as many tokens or more are masked, tokens.
        idx: the row's number.

    Returns:
        What NeMo-RL's processor returns; `extra_env_info` has the record.
    """
    datum = math_hf_data_processor(datum_dict, task_data_spec, tokenizer, max_seq_length, idx)
    datum["extra_env_info"][RECORD] = json.loads(datum_dict[RECORD])
    return datum


def _problem(prompt: str | Messages) -> str:
    if isinstance(prompt, str):
        return prompt
    problems = [message["content"] for message in prompt if message["role"] == "user"]
    if not problems:
        raise ValueError(f"a record has no user message: {str(prompt)[:200]}")
    return problems[-1]
