"""Problems out of records in each benchmark's own fields, as its publishers wrote them."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from qarl_nemo.data.answers import answer_text, final_answer

_SCIENTIFIC = re.compile(r"(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)")
# A dollar sign that opens or ends a formula, not an amount of money.
_DOLLAR = re.compile(r"(?<!\\)\$")
_MAX_QUOTED = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a benchmark.

    Attributes:
        question: the question, with its options if there are any, one a line after a letter.
        answer: the expected answer: a letter, plain text or LaTeX.
    """

    question: str
    answer: str


def plain(question: str, answer: str) -> Callable[[Mapping[str, Any]], Problem]:
    """Return a reader of records with a question and an answer.

    Args:
        question: the question's field.
        answer: the answer's field.

    Returns:
        Makes a problem of a record.
    """
    return lambda record: Problem(_text(record, question), _text(record, answer))


def gsm8k(record: Mapping[str, Any]) -> Problem:
    """Read `question`, and what follows #### in `answer`."""
    return Problem(_text(record, "question"), final_answer(_text(record, "answer"), "hash"))


def minerva(record: Mapping[str, Any]) -> Problem:
    r"""Read `question` and `answer`, or `problem` and what `solution` boxes, as in the set's first publication.

    The parser knows `1.5 \times 10^{3}`, not `1.5e3`.
    """
    if "solution" in record:
        question, answer = _text(record, "problem"), final_answer(_text(record, "solution"), "boxed")
    else:
        question, answer = _text(record, "question"), _text(record, "answer")
    number = _SCIENTIFIC.fullmatch(answer.strip())
    return Problem(question, rf"{number[1]} \times 10^{{{int(number[2])}}}" if number else _formula(answer))


def olympiadbench(record: Mapping[str, Any]) -> Problem:
    """Read `question`, with `context` before it if there is one, and the list `final_answer`."""
    context = record.get("context")
    question = _text(record, "question")
    answer = ", ".join(map(_formula, _texts(record, "final_answer")))
    return Problem(f"{context}\n\n{question}" if context else question, answer)


def arc(record: Mapping[str, Any]) -> Problem:
    """Read `question`, `choices` of `text` and `label`, and `answerKey`; some labels are digits.

    In AI2's own files `question` holds `stem` and a list of `choices`.
    """
    own = record["question"] if isinstance(record["question"], Mapping) else record
    choices = own["choices"]
    if isinstance(choices, list) and all(isinstance(choice, Mapping) for choice in choices):
        choices = {key: [choice[key] for choice in choices] for key in ("label", "text")}
    if not isinstance(choices, Mapping):
        raise TypeError(f"choices is {_quoted(choices)}, not lists of label and text")
    labels, texts = _texts(choices, "label"), _texts(choices, "text")
    if len(labels) != len(texts):
        raise ValueError(f"choices have {len(labels)} label and {len(texts)} text, not as many of both")
    return _choice(_text(own, "question" if own is record else "stem"), texts, _place(record, "answerKey", labels))


def gpqa(record: Mapping[str, Any]) -> Problem:
    """Read `Question`, `Correct Answer` and `Incorrect Answer 1` to 3, in an order that only the question decides."""
    question = _text(record, "Question")
    keys = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
    order = random.Random(question).sample(keys, len(keys))
    return _choice(question, [_text(record, key) for key in order], order.index("Correct Answer"))


def mmlu_pro(record: Mapping[str, Any]) -> Problem:
    """Read `question`, `options` and `answer`, the letter of the right one."""
    options = _texts(record, "options")
    return _choice(_text(record, "question"), options, _place(record, "answer", list(ascii_uppercase[: len(options)])))


def _choice(question: str, options: Sequence[str], right: int) -> Problem:
    if len(options) > len(ascii_uppercase):
        raise ValueError(f"there are {len(options)} options, and letters for {len(ascii_uppercase)}")
    listed = "\n".join(f"{letter}. {option.strip()}" for letter, option in zip(ascii_uppercase, options, strict=False))
    return Problem(f"{question.strip()}\n\n{listed}", ascii_uppercase[right])


def _place(record: Mapping[str, Any], key: str, labels: list[str]) -> int:
    """Return which option the label in a field stands for."""
    label = _text(record, key).strip()
    if label not in labels:
        raise ValueError(f"{key} is {_quoted(label)}; legal: {', '.join(labels)}")
    return labels.index(label)


def _formula(answer: str) -> str:
    # The parser takes one formula: where an answer has several, or a dollar sign too many, it would find a part.
    return _DOLLAR.sub("", answer).strip().removesuffix(".")


def _text(record: Mapping[str, Any], key: str) -> str:
    text = answer_text(record[key])
    if text is None:
        raise TypeError(f"{key} is {_quoted(record[key])}, neither text nor a number")
    if not text.strip():
        raise ValueError(f"{key} is empty")
    return text


def _texts(record: Mapping[str, Any], key: str) -> list[str]:
    values = record[key]
    texts = list(map(answer_text, values)) if isinstance(values, list) else []
    known = [text for text in texts if text is not None]
    if not known or len(known) < len(texts):
        raise TypeError(f"{key} is {_quoted(values)}, not a list of texts")
    return known


def _quoted(value: Any) -> str:
    return repr(str(value)[:_MAX_QUOTED])
