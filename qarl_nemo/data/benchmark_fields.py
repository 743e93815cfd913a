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
    answers = record["final_answer"]
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise TypeError(f"final_answer is {str(answers)[:80]!r}, not a list of texts")
    return Problem(f"{context}\n\n{question}" if context else question, ", ".join(map(_formula, answers)))


def arc(record: Mapping[str, Any]) -> Problem:
    """Read `question`, `choices` of `text` and `label`, and `answerKey`; some labels are digits.

    In AI2's own files `question` holds `stem` and a list of `choices`.
    """
    if isinstance(record["question"], Mapping):
        own = record["question"]
        choices = {key: [choice[key] for choice in own["choices"]] for key in ("label", "text")}
        record = {"question": own["stem"], "choices": choices, "answerKey": record["answerKey"]}
    labels, texts = list(record["choices"]["label"]), list(record["choices"]["text"])
    return _choice(_text(record, "question"), texts, labels.index(_text(record, "answerKey")))


def gpqa(record: Mapping[str, Any]) -> Problem:
    """Read `Question`, `Correct Answer` and `Incorrect Answer 1` to 3, in an order that only the question decides."""
    question = _text(record, "Question")
    keys = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
    order = random.Random(question).sample(keys, len(keys))
    return _choice(question, [_text(record, key) for key in order], order.index("Correct Answer"))


def mmlu_pro(record: Mapping[str, Any]) -> Problem:
    """Read `question`, `options` and `answer`, the letter of the right one."""
    letter = _text(record, "answer").strip()
    return _choice(_text(record, "question"), list(record["options"]), ascii_uppercase.index(letter))


def _choice(question: str, options: Sequence[str], right: int) -> Problem:
    if not right < len(options) <= len(ascii_uppercase):
        raise ValueError(f"the right option is number {right + 1} of {len(options)}")
    listed = "\n".join(
        f"{letter}. {str(option).strip()}" for letter, option in zip(ascii_uppercase, options, strict=False)
    )
    return Problem(f"{question.strip()}\n\n{listed}", ascii_uppercase[right])


def _formula(answer: str) -> str:
    # The parser takes one formula: where an answer has several, or a dollar sign too many, it would find a part.
    return _DOLLAR.sub("", answer).strip().removesuffix(".")


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    text = answer_text(value)
    if text is None or not text.strip():
        raise TypeError(f"{key} is {str(value)[:80]!r}, neither text nor a number")
    return text
