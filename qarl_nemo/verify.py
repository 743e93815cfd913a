"""Verifiable rewards: 1 if math-verify finds the response equal to the answer, else 0."""

import functools
import re

# A dollar sign that opens LaTeX, not an amount of money.
_LATEX = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
# Python refuses to convert numbers of more than 4300 digits; math-verify copes with them.
_INTEGERS = re.compile(r"\s*-?\d{1,1000}(\s+-?\d{1,1000})*\s*")


def reward(response: str, answer: str) -> float:
    """Return 1.0 if `response` gives `answer`, else 0.0.

    Args:
        response: decoded response text.
        answer: the expected answer, plain or LaTeX.

    Returns:
        0.0 or 1.0.
    """
    if _INTEGERS.fullmatch(answer) and _INTEGERS.fullmatch(response):
        # Plain integers are compared here: the parser takes milliseconds per call and finds no answer in a list.
        return float(list(map(int, response.split())) == list(map(int, answer.split())))
    return _verified(response, answer)


@functools.lru_cache(maxsize=65536)
def _verified(response: str, answer: str) -> float:
    from math_verify import parse, verify

    # Outside of an environment, the parser finds no words (`\text{east}`).
    gold = parse(answer if _LATEX.search(answer) else f"\\boxed{{{answer}}}")
    return float(verify(gold, parse(response)))
