"""Problems with verifiable answers: generated arithmetic, JSONL, and datasets in OpenR1-Math-46K's fields."""

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl_nemo.files import read_text
from qarl_nemo.train.config import ArithmeticData, HfData, JsonlData

_NUM_SHOWN = 20
_MAX_QUOTED = 200


@dataclass(frozen=True, slots=True)
class Task:
    """One problem.

    Attributes:
        prompt: text, or chat messages for the tokenizer's template.
        answer: the expected answer, which math-verify compares with the response.
    """

    prompt: str | tuple[dict[str, str], ...]
    answer: str


class TaskSource:
    """Where prompts come from; they depend only on seed and step, so that a resumed run sees the same ones.

    Args:
        config: the data block.
        seed: the run's seed.

    Raises:
        ValueError: a file is missing or a record lacks a field; all are listed.
    """

    def __init__(self, config: ArithmeticData | JsonlData | HfData, seed: int) -> None:
        self.config = config
        self.seed = seed
        self._train: Sequence[Task] = ()
        self._validation: Sequence[Task] = ()
        if isinstance(config, JsonlData):
            self._train = read_jsonl(config.train, config.prompt_template)
            if config.validation:
                self._validation = read_jsonl(config.validation, config.prompt_template)
        elif isinstance(config, HfData):
            self._train = read_huggingface(config.path, config.train_split)
            if config.validation_split:
                self._validation = read_huggingface(config.path, config.validation_split)

    def train(self, step: int, num_prompts: int, *, stream: str = "train") -> list[Task]:
        """Return the prompts of one step: generated ones, or an epoch-wise shuffle of the data.

        Args:
            step: 1-based step.
            num_prompts: how many.
            stream: a name that separates independent draws (`train`, `warm_start`).

        Returns:
            The tasks.
        """
        if isinstance(self.config, ArithmeticData):
            return arithmetic_tasks(self.config, num_prompts, random.Random(f"{stream}-{self.seed}-{step}"))
        first = (step - 1) * num_prompts
        return [self._at(index, stream) for index in range(first, first + num_prompts)]

    def validation(self, num_prompts: int) -> list[Task]:
        """Return the validation prompts, the same at each call: generated ones, the validation split, or train's head.

        Args:
            num_prompts: how many at most.

        Returns:
            The tasks.
        """
        if isinstance(self.config, ArithmeticData):
            return arithmetic_tasks(self.config, num_prompts, random.Random("validation"))
        return list((self._validation or self._train)[:num_prompts])

    def _at(self, index: int, stream: str) -> Task:
        epoch, position = divmod(index, len(self._train))
        return self._train[_epoch_order(f"{stream}-{self.seed}-epoch-{epoch}", len(self._train))[position]]


# A step looks up an epoch's order for every prompt. Two streams, each at the end of an epoch, use four orders.
@functools.lru_cache(maxsize=4)
def _epoch_order(key: str, num_tasks: int) -> list[int]:
    return random.Random(key).sample(range(num_tasks), num_tasks)


def arithmetic_tasks(config: ArithmeticData, num_tasks: int, rng: random.Random) -> list[Task]:
    """Draw problems such as `12+34=`; terms are zero-padded to `digits`.

    Args:
        config: digits, terms and operators.
        num_tasks: how many.
        rng: source of randomness.

    Returns:
        The tasks.
    """
    tasks = []
    for _ in range(num_tasks):
        terms = [rng.randrange(10**config.digits) for _ in range(config.num_terms)]
        operators = [rng.choice(config.operators) for _ in terms[1:]]
        text = f"{terms[0]:0{config.digits}d}"
        for operator, term in zip(operators, terms[1:], strict=True):
            text += f"{operator}{term:0{config.digits}d}"
        first = 1 if config.running_totals else len(operators)
        counts = range(first, len(operators) + 1)
        totals = [eval_chain(terms[: count + 1], operators[:count]) for count in counts]
        answer = " ".join("-" * (total < 0) + f"{abs(total):0{config.answer_digits}d}" for total in totals)
        tasks.append(Task(text + "=", answer))
    return tasks


def eval_chain(terms: Sequence[int], operators: Sequence[str]) -> int:
    """Evaluate terms[0] op[0] terms[1] ..., products first.

    Args:
        terms: the numbers.
        operators: one of `+-*` between each pair.

    Returns:
        The value.
    """
    summands = [terms[0]]
    for operator, term in zip(operators, terms[1:], strict=True):
        if operator == "*":
            summands[-1] *= term
        else:
            summands.append(-term if operator == "-" else term)
    return sum(summands)


def read_jsonl(path: Path, prompt_template: str) -> list[Task]:
    """Read `problem` and `answer` from each line.

    Args:
        path: the file.
        prompt_template: text with `{problem}`.

    Returns:
        The tasks.

    Raises:
        ValueError: the file is missing or empty, or lines lack a field or are not JSON; all are listed.
    """
    if not path.exists():
        raise ValueError(f"data file {path} does not exist")
    tasks, problems = [], []
    # JSON strings may contain the other line separators that splitlines() splits at.
    for number, line in enumerate(read_text(path, "JSONL data").split("\n"), start=1):
        if not line.strip():
            continue
        record = None
        try:
            record = json.loads(line)
            tasks.append(Task(prompt_template.replace("{problem}", record["problem"]), _answer(record["answer"])))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(f"line {number}: {type(error).__name__} {str(error)[:_MAX_QUOTED]}{_fields(record)}")
    return _whole(tasks, problems, f"{path}: every line needs the text fields `problem` and `answer`")


def _fields(record: Any) -> str:
    if not isinstance(record, dict):
        return ""
    return f" (its fields: {', '.join(map(str, record))[:_MAX_QUOTED] or 'none'})"


def read_huggingface(path: str, split: str) -> list[Task]:
    """Read a dataset with `prompt` (chat messages) and `reward_model.ground_truth`, as OpenR1-Math-46K has them.

    Args:
        path: hub name, local dataset directory, or one .jsonl / .json / .parquet file.
        split: split name, or a part of a split such as `train[:100]`.

    Returns:
        The tasks.

    Raises:
        ValueError: the file is missing, or records lack a field; all are listed.

    Source: Elliott/Openr1-Math-46k-8192 on the Hugging Face hub.
    """
    data = _load_dataset(path, split)
    missing = {"prompt", "reward_model"} - set(data.column_names)
    if missing:
        raise ValueError(f"dataset {path} lacks {sorted(missing)}; it has {data.column_names}")
    tasks, problems = [], []
    for number, record in enumerate(data):
        try:
            tasks.append(Task(_messages(record["prompt"]), _answer(record["reward_model"]["ground_truth"])))
        except (KeyError, TypeError) as error:
            problems.append(f"record {number}: {type(error).__name__} {error}")
    needs = "`prompt`, a list of messages with `role` and `content`, and `reward_model.ground_truth`"
    return _whole(tasks, problems, f"dataset {path}: every record needs {needs}")


def _load_dataset(path: str, split: str) -> Any:
    import datasets

    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
    kind = kinds.get(Path(path).suffix)
    if kind:
        if not Path(path).is_file():
            raise ValueError(f"data file {path} does not exist")
        source, files = kind, {split.partition("[")[0]: path}
    else:
        source, files = path, None
    try:
        return datasets.load_dataset(source, data_files=files, split=split)
    except Exception as error:  # the loader and the hub's client raise unrelated types
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(
            f"dataset {path}, split {split!r}, cannot be loaded: {lines[0][:_MAX_QUOTED]}; without a network, set "
            "data.path to a local folder, or to a .parquet or .jsonl file"
        ) from error


def _messages(messages: list[dict[str, Any]]) -> tuple[dict[str, str], ...]:
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _answer(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"the answer is {value!r}, neither text nor a number")
    return str(value)


def _whole(tasks: list[Task], problems: list[str], expected: str) -> list[Task]:
    if problems or not tasks:
        more = f"; and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
        raise ValueError(f"{expected}; " + ("; ".join(problems[:_NUM_SHOWN]) + more or "it is empty"))
    return tasks
