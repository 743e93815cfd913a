"""Data sets of NeMo-RL that read what the embedded engine's read: fields of one's own, GSM8K, MATH, OpenR1-Math-46K."""

import copy
import json
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from nemo_rl.data.datasets.raw_dataset import RawDataset
from nemo_rl.data.processors import math_hf_data_processor

from qarl_nemo.config import ConfigError, validate
from qarl_nemo.data.config import DatasetConfig
from qarl_nemo.data.problems import Messages, Task, read_tasks
from qarl_nemo.files import read_words
from qarl_nemo.nemo_rl.data_sets import DATA_SETS, READ
from qarl_nemo.nemo_rl.data_sets import task_name as named_task

RECORD = "record"
_SYSTEM = "system"


class Problems(RawDataset):
    """Problems with answers from a file, a folder or the hub: text, or the user's message after a system message.

    Args:
        data_path: as `DatasetConfig` has it, and so are the next four.
        subset: the hub's configuration.
        split: the split, or a part of it.
        input_key: field of the problem.
        output_key: field of the answer.
        split_validation_size: share or number of problems set aside for validation.
        seed: seeds their choice.
        task_name: what NeMo-RL tells data sets apart by; None for one of path and split.
        system_prompt_file: file of a system message for every problem.
        given: the other keys of `READ`, and those of NeMo-RL, which are not read here.

    Raises:
        ConfigError: the data set cannot be loaded, or records lack a field or hold a longer conversation; all are
            listed.
    """

    named: ClassVar[str] = DATA_SETS["Problems"]

    # NeMo-RL warns of keys that are no parameters by name.
    def __init__(
        self,
        data_path: str | None = None,
        subset: str | None = None,
        split: str = "train",
        input_key: str | None = None,
        output_key: str | None = None,
        *,
        split_validation_size: float = 0,
        seed: int = 42,
        task_name: str | None = None,
        system_prompt_file: str | None = None,
        **given: Any,
    ) -> None:
        given |= {"data_path": data_path, "subset": subset, "split": split}
        given |= {"input_key": input_key, "output_key": output_key}
        config, tasks = _read(type(self).__name__, self.named, given, system_prompt_file)
        self.task_name = task_name or named_task(config.title, config.split)
        self.dataset = Dataset.from_list([_row(task, self.task_name) for task in tasks])
        self.val_dataset = None
        self.split_train_validation(split_validation_size, seed)

    def set_processor(self) -> None:
        """Take NeMo-RL's processor, unless a recipe names another one, and hand on what it does not know of a row."""
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
    """Process one problem as NeMo-RL does, with its own system message, and put its record beside the answer.

    Args:
        datum_dict: a row of the data set.
        task_data_spec: prompt and system prompt.
        tokenizer: whose chat template is used.
        max_seq_length: prompts of as many tokens or more are masked, tokens.
        idx: the row's number.

    Returns:
        What NeMo-RL's processor returns; `extra_env_info` has the record.
    """
    spec = copy.copy(task_data_spec)
    # A system_prompt_file stands in every row, too.
    spec.system_prompt = datum_dict[_SYSTEM] or None
    datum = math_hf_data_processor(datum_dict, spec, tokenizer, max_seq_length, idx)
    datum["extra_env_info"][RECORD] = json.loads(datum_dict[RECORD])
    return datum


def _read(name: str, named: str, given: dict[str, Any], system: str | None) -> tuple[DatasetConfig, list[Task]]:
    values = {"dataset_name": named} | {key: given[key] for key in READ if key in given}
    try:
        if system is not None:
            values["system_prompt"] = read_words(Path(system), "a system prompt")
        config = validate(values, DatasetConfig, source=f"data set {name}")
        return config, read_tasks(config, one_turn=True)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _row(task: Task, name: str) -> dict[str, Any]:
    system, problem = _messages(task.prompt)
    return {
        "messages": [{"role": "user", "content": problem}, {"role": "assistant", "content": task.answer}],
        "task_name": name,
        RECORD: json.dumps(task.record, default=str),
        _SYSTEM: system,
    }


def _messages(prompt: str | Messages) -> tuple[str, str]:
    """Return the system's message, empty for none, and the user's."""
    if isinstance(prompt, str):
        return "", prompt
    system, user = ("", *(message["content"] for message in prompt))[-2:]
    return system, user
