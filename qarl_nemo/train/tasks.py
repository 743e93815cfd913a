"""The problems of a run: generated arithmetic, or data sets; which step sees which."""

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from qarl_nemo.config.problems import SeveralProblemsError, attempt
from qarl_nemo.data.benchmark_problems import benchmark_tasks
from qarl_nemo.data.config import BenchmarkConfig, DatasetConfig, Datasets, DatasetsData, ValidationSets
from qarl_nemo.data.problems import Task, read_tasks
from qarl_nemo.train.config import ArithmeticData


class TaskSource:
    """Where prompts come from; they depend only on seed and step, so that a resumed run sees the same ones.

    Args:
        config: the data block.
        seed: the run's seed.

    Raises:
        SeveralProblemsError: data sets cannot be loaded, or records lack a field; all are listed with their places.
    """

    def __init__(self, config: ArithmeticData | DatasetsData, seed: int) -> None:
        self.config = config
        self.seed = seed
        # By their key in the config; empty for arithmetic, which has as many as are asked for.
        self.tasks: dict[str, list[Task]] = {"train": [], "validation": []}
        if isinstance(config, DatasetsData):
            problems: list[str] = []
            train = _read("data.train", config.train, problems)
            validation = _read("data.validation", config.validation or [], problems)
            if problems := problems or _split_problems(config):
                raise SeveralProblemsError(problems)
            self.tasks["train"] = [task for tasks in train for task in tasks]
            in_turn = itertools.zip_longest(*validation)
            self.tasks["validation"] = [task for tasks in in_turn for task in tasks if task is not None]

    def train(self, step: int, num_prompts: int, *, stream: str = "train") -> list[Task]:
        """Return the prompts of one step: generated ones, or an epoch-wise shuffle of the data.

        Args:
            step: 1-based step.
            num_prompts: how many.
            stream: a name that separates independent draws (`train`, `warm_start`).
        """
        if isinstance(self.config, ArithmeticData):
            return arithmetic_tasks(self.config, num_prompts, random.Random(f"{stream}-{self.seed}-{step}"))
        first = (step - 1) * num_prompts
        return [self._at(index, stream) for index in range(first, first + num_prompts)]

    def validation(self, num_prompts: int) -> list[Task]:
        """Return the validation prompts, the same at each call: generated ones, the validation sets', or train's head.

        Args:
            num_prompts: how many at most; of several validation sets, in turn.
        """
        if isinstance(self.config, ArithmeticData):
            return arithmetic_tasks(self.config, num_prompts, random.Random("validation"))
        return (self.tasks["validation"] or self.tasks["train"])[:num_prompts]

    def _at(self, index: int, stream: str) -> Task:
        tasks = self.tasks["train"]
        epoch, position = divmod(index, len(tasks))
        return tasks[_epoch_order(f"{stream}-{self.seed}-epoch-{epoch}", len(tasks))[position]]


def _read(key: str, datasets: Datasets | ValidationSets, problems: list[str]) -> list[list[Task]]:
    """Read the data sets of a key; `problems` gets the place and the error of every one that cannot be read."""
    several = isinstance(datasets, list)
    sets = datasets if isinstance(datasets, list) else [datasets]
    names = _score_names([config.title for config in sets])
    read = []
    for number, (config, name) in enumerate(zip(sets, names, strict=True)):
        own: list[str] = []
        tasks = attempt(own, _read_set, config)
        problems += [f"{key}.{number}: {error}" if several else f"{key}: {error}" for error in own]
        read.append([replace(task, dataset=name) for task in tasks or ()])
    return read


def _split_problems(config: DatasetsData) -> list[str]:
    """Find files of which the config names several splits, though a single file is all of each."""
    splits: dict[str, set[str]] = {}
    for datasets in (config.train, config.validation or []):
        for one in datasets if isinstance(datasets, list) else [datasets]:
            if isinstance(one, DatasetConfig) and one.data_path and Path(one.data_path).is_file():
                names = {part.partition("[")[0].strip() for part in one.split.split("+")}
                splits.setdefault(one.data_path, set()).update(names)
    return [
        f"{path} is read as the splits {', '.join(sorted(names))}, but a file has none, and each would be all of it; "
        "cut it, such as split: train[:90%] and train[90%:], or name another file"
        for path, names in splits.items()
        if len(names) > 1
    ]


def _read_set(config: DatasetConfig | BenchmarkConfig) -> list[Task]:
    return benchmark_tasks(config) if isinstance(config, BenchmarkConfig) else read_tasks(config)


def _score_names(titles: Sequence[str]) -> list[str]:
    """Return the shortest end of each title that no other has, file endings left out; equal titles get numbers."""
    ends = {title: _ends(title) for title in titles}
    every = [end for own in ends.values() for end in set(own)]
    names = [next((end for end in ends[title] if every.count(end) == 1), title) for title in titles]
    numbers = [titles[: place + 1].count(title) for place, title in enumerate(titles)]
    return [f"{name}#{number}" if number > 1 else name for name, number in zip(names, numbers, strict=True)]


def _ends(title: str) -> list[str]:
    path = PurePath(title)
    *folders, _ = path.parts
    return ["/".join([*folders[place:], path.stem]) for place in range(len(folders), -1, -1)] + [title]


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
    """
    summands = [terms[0]]
    for operator, term in zip(operators, terms[1:], strict=True):
        if operator == "*":
            summands[-1] *= term
        else:
            summands.append(-term if operator == "-" else term)
    return sum(summands)
