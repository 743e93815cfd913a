"""Final answers out of worked solutions."""

import math
import re
from decimal import Decimal
from typing import Any

from qarl_nemo.data.named import AnswerFormat

_MARK = "####"
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+)")
# An escaped brace groups nothing; \\ is a line's end, and a brace after it groups.
_BRACE = re.compile(r"\\.|[{}]")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class NoMarkError(ValueError):
    """A solution has no mark of its final answer, as another `answer_format` may not need one."""


def final_answer(text: str, answer_format: AnswerFormat) -> str:
    r"""Return the answer that a solution ends with.

    Args:
        text: the solution, or the answer itself.
        answer_format: `plain` is all of it; `hash` what follows the last `####`, thousands without commas; `boxed` the
            content of the last `\boxed{}`.

    Raises:
        NoMarkError: the solution has no such mark.
        ValueError: the answer is empty, or its mark has no end.
    """
    if answer_format == "hash":
        if _MARK not in text:
            raise NoMarkError(f"its answer has no {_MARK}")
        text = _THOUSANDS.sub("", text.rpartition(_MARK)[2])
    elif answer_format == "boxed":
        text = _last_box(text)
    if not text.strip():
        raise ValueError("its answer is empty")
    return text.strip()


def answer_text(value: Any) -> str | None:
    """Return a record's text or number as text, numbers without an exponent or empty decimals, as answers write them.

    Args:
        value: a field of a record.

    Returns:
        None if it is neither text nor a finite number.
    """
    if isinstance(value, float):
        return f"{Decimal(str(value)).normalize():f}" if math.isfinite(value) else None
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def _last_box(text: str) -> str:
    boxes = list(_BOX.finditer(text))
    if not boxes:
        raise NoMarkError(r"its answer has no \boxed{}")
    start = boxes[-1].end()
    if not boxes[-1][0].endswith("{"):
        # `\boxed 5`, as TeX reads it: up to the end of the formula.
        return re.split(r"[$\s]", text[start:], maxsplit=1)[0]
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : brace.start()]
    raise ValueError(r"its \boxed{ has no end")
