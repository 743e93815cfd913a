"""Tasks from a data set's records, or one error that lists every record that is none."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from qarl_nemo.data.answers import NoMarkError, answer_text, final_answer
from qarl_nemo.data.config import DatasetConfig
from qarl_nemo.data.named import AnswerFormat
from qarl_nemo.data.records import fields_of, listed, read_records
from qarl_nemo.data.reward_function import RewardFunction
from qarl_nemo.verify import reward, rewards

Messages = tuple[dict[str, str], ...]
_MAX_QUOTED = 200
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Task:
    """One problem.

    Attributes:
        prompt: text, or chat messages.
        answer: the expected answer.
        reward_function: judges responses; None for math-verify.
        record: the data set's fields, for `reward_function`; empty without one.
        dataset: what the score of its data set is called; empty for generated problems.
    """

    prompt: str | Messages
    answer: str
    reward_function: Callable[[str, str, Mapping[str, Any]], float] | None = None
    record: Mapping[str, Any] = field(default_factory=dict, compare=False)
    dataset: str = field(default="", compare=False)

    def reward(self, response: str) -> float:
        """Return what a response earns: by `reward_function`, else 1.0 if math-verify finds the answer in it, or 0.0.

        Raises:
            ValueError: the function failed, or returned no finite number.
        """
        if self.reward_function is not None:
            return self.reward_function(response, self.answer, self.record)
        return reward(response, self.answer)


def task_rewards(tasks: Sequence[Task], responses: Sequence[str]) -> list[float]:
    """Return what responses earn, with several processes where math-verify has much to read.

    Args:
        tasks: a task for each response.
        responses: decoded response texts.

    Raises:
        ValueError: a reward function failed, or returned no finite number.
    """
    places = [place for place, task in enumerate(tasks) if task.reward_function is None]
    verified = rewards([responses[place] for place in places], [tasks[place].answer for place in places])
    known = dict(zip(places, verified, strict=True))
    return [
        known[place] if place in known else task.reward(response)
        for place, (task, response) in enumerate(zip(tasks, responses, strict=True))
    ]


def read_tasks(config: DatasetConfig, *, one_turn: bool = False) -> list[Task]:
    """Read a data set.

    Args:
        config: the data set's block.
        one_turn: refuse records with other messages than the system's and one of the user.

    Returns:
        The tasks, in the data set's order.

    Raises:
        ValueError: the data set or the reward function cannot be loaded, it is empty, or records lack a field or hold
            something else in it; all are listed, with the fields they have.
    """
    judge = RewardFunction(config.reward_function) if config.reward_function else None
    tasks: list[Task] = []
    problems: dict[str, list[str]] = {}
    fix = ""
    for place, record in read_records(config):
        try:
            tasks.append(_task(record, config, judge, one_turn=one_turn))
        except _MissingFieldError as error:
            problems.setdefault(str(error), []).append(place)
            fix = "; set input_key and output_key to the fields of problem and answer"
        except json.JSONDecodeError as error:
            # Its own text counts lines within this one.
            problems.setdefault(f"not JSON, column {error.colno}: {error.msg}", []).append(place)
        except (ValueError, TypeError, RecursionError) as error:
            # Our errors are sentences; a parser's need their type's name.
            name = "" if type(error) in (ValueError, TypeError) else f"{type(error).__name__} "
            problems.setdefault(name + str(error)[:_MAX_QUOTED], []).append(place)
    if problems or not tasks:
        source, (input_key, output_key, _) = config.data_path or config.dataset_name, config.fields
        raise ValueError(
            f"{source}: every record needs the fields `{input_key}` (text or messages) and `{output_key}` (text or a "
            f"number); {listed(problems) + fix or f'split {config.split!r} is empty'}"
        )
    return tasks


def with_system_prompt(text: str, system_prompt: str | None) -> str | Messages:
    """Return a prompt of a user's message, with a system message before it if there is one.

    Args:
        text: the user's message.
        system_prompt: the system's; None for none.

    Returns:
        The text alone, or chat messages.
    """
    if system_prompt is None:
        return text
    return ({"role": "system", "content": system_prompt}, {"role": "user", "content": text})


class _MissingFieldError(ValueError):
    """A record lacks a field."""


def _task(record: Any, config: DatasetConfig, judge: RewardFunction | None, *, one_turn: bool) -> Task:
    if isinstance(record, Exception):
        raise record
    if not isinstance(record, Mapping):
        raise TypeError(f"a {type(record).__name__} and no object")
    input_key, output_key, _ = config.fields
    problem, answer = _look_up(record, input_key), _look_up(record, output_key)
    missing = [key for key, value in ((input_key, problem), (output_key, answer)) if value is _ABSENT]
    if missing:
        raise _MissingFieldError(f"no field {' and no '.join(map(repr, missing))}{fields_of(record)}")
    text = answer_text(answer)
    if text is None:
        raise TypeError(f"the answer is {answer!r}, neither text nor a number")
    prompt = _prompt(problem, config, one_turn=one_turn)
    return Task(prompt, _answer(text, config), judge, record if judge else {})


def _answer(text: str, config: DatasetConfig) -> str:
    *_, answer_format = config.fields
    try:
        return final_answer(text, answer_format)
    except NoMarkError as error:
        others = " or ".join(other for other in get_args(AnswerFormat) if other != answer_format)
        raise ValueError(
            f"{error}, which answer_format={answer_format} reads: set answer_format to {others}"
        ) from error


def _look_up(record: Mapping[str, Any], key: str) -> Any:
    found: Any = record
    for part in (key,) if key in record else key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _ABSENT
        found = found[part]
    return found


def _prompt(problem: Any, config: DatasetConfig, *, one_turn: bool) -> str | Messages:
    """Put the problem into the template; of messages, the last one."""
    if isinstance(problem, str):
        _require_words(problem)
        text = config.prompt_template.replace("{problem}", problem)
        return with_system_prompt(text, config.system_prompt)
    if not isinstance(problem, list) or not problem:
        raise TypeError(f"the problem is {problem!r}, neither text nor messages")
    messages = [_message(message) for message in problem]
    _require_turns([message["role"] for message in messages], one_turn=one_turn)
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise ValueError("it has a system message, and the config's system prompt is another one: remove either")
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    _require_words(messages[-1]["content"])
    messages[-1]["content"] = config.prompt_template.replace("{problem}", messages[-1]["content"])
    return tuple(messages)


def _require_turns(roles: Sequence[str], *, one_turn: bool) -> None:
    if roles[-1] != "user":
        raise ValueError(
            f"its last message is of the role {roles[-1]!r}, and has to be the user's: what follows that is the answer"
        )
    num_turns = len(roles) - (roles[0] == "system")
    if one_turn and num_turns > 1:
        raise ValueError(
            f"it has {num_turns} messages beside the system's, and NeMo-RL takes one, the user's: leave it out, or "
            "train with `qarl train`"
        )


def _require_words(problem: str) -> None:
    if not problem.strip():
        raise ValueError("the problem is empty")


def _message(message: Any) -> dict[str, str]:
    if isinstance(message, Mapping):
        role, content = message.get("role"), message.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return {"role": role, "content": content}
    raise TypeError(f"message {message!r} lacks the texts `role` and `content`")
