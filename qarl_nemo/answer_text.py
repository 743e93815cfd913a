"""Rewrites what math-verify's parser misreads in responses and answers, so that it finds what their authors meant."""

import re
from decimal import Decimal
from itertools import pairwise

# A dollar sign that opens LaTeX, not an amount of money.
_LATEX = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
# The sign of an amount, with the letters of its currency: US$5.
_MONEY = re.compile(r"[A-Z]{0,3}\\?\$")
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
# The parser knows a box by its name and brace alone, without space between them.
_BOX_SPACE = re.compile(r"(?<=\\boxed)\s+(?=\{)")
# Boxes with no more than this between them are one answer of several parts. A blank takes all it can: with two ways to
# read a gap, a long one would take for ever.
_BLANK = r"(?:[\s$,;~*]|\\[()\[\],;:! ]|\\q?quad(?![a-z]))*+"
_AND = r"(?:and|or)|\\(?:text|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}"
# What the next one is called, as in `$x=\boxed{3}$ and $y=\boxed{5}$`, where something joins them.
_CALLED = r"(?P<label>[A-Za-z](?:_\{?\w+\}?)?\s*=\s*)?"
_BETWEEN = re.compile(rf"{_BLANK}(?:{_AND})?{_BLANK}{_CALLED}")
_JOINT = re.compile(rf"[,;]|{_AND}")
# After a comma the parser takes either word for the end of the answer, as it does Markdown's stars.
_COMMA_AND = re.compile(rf",\s*(?:{_AND})")
# The parser takes a full stop before the last closing brace for a part of the answer.
_STOP = re.compile(r"\.\s*((?:\}\s*)*)\Z")
# Space below a matrix's row, which the parser takes for factors of the next one.
_ROW_SPACE = re.compile(r"(?<=\\\\)\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]")
# Where a response loops in line ends, the parser takes longer than its five seconds.
_LONG_SPACE = re.compile(r"(\s\s)\s+")
# A space between thousands (`12\,500`), which the parser takes for a product.
_THOUSANDS = re.compile(r"(?<=\d)\s*\\[,;: ]\s*(?=\d{3}(?!\d))")
# `2 1/2`, which the parser takes for (2 + 1) / 2.
_MIXED = re.compile(r"(?<![\w.,/^}])(\d{1,9})(?:\s*\\[,;: ]\s*|[ ~]+)(\d{1,9})/(\d{1,9})(?![\w/^]|[.,]\d)")
# A number as programs write it, which the parser knows with a capital E alone; `2e-1` may as well be 2 e - 1.
_EXPONENT = re.compile(r"(?<![\w.])(\d+\.\d+|\d+(?=e(?:\d|[+-]0)))e([+-]?\d+)(?![\w^])")
# Of `1.1 \times 10^5` the parser makes a binary fraction, which is not 110000.
_TIMES_TEN = re.compile(
    r"(?<![\w./^])(\d+\.\d+)\s*(?:\\times(?![a-z])|\\cdot(?![a-z])|\u00d7|\*)\s*10\s*\^\s*"
    r"(?:\{\s*([+-]?\d+)\s*\}|(\d))(?![\w^!])"
)
# Outside of LaTeX the parser knows no exponents: up to so many digits they are written out.
_MOST_DIGITS = 40
# With a longer exponent the parser computes for days, and cannot be stopped.
_LONG_EXPONENT = re.compile(r"(?<=\d)([eE][+-]?)0*[1-9]\d{4,}")
# Invisible, and to the parser a factor.
_PHANTOM = re.compile(r"\\[hv]?phantom\s*+(?:\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|\\[A-Za-z]+|[^{}\\\s])")
_PERCENT = re.compile(r"\s*\\?%\s*\Z")
# A number in another base, which the parser ignores.
_IN_BASE = re.compile(r"\s*-?\d[\dA-F]*_\{?(\d+)\}?\s*")


def response_text(response: str) -> str:
    """Return a response of which the parser reads the last box, or the last few that belong together.

    Args:
        response: as it was sampled.
    """
    return _without_stop(_last_boxes_alone(_numbers(_BOX_SPACE.sub("", response))))


def answer_text(answer: str) -> str:
    """Return an expected answer as LaTeX, outside of which the parser finds no words.

    Args:
        answer: plain or LaTeX.
    """
    answer = _numbers(answer)
    return _without_stop(answer if _LATEX.search(answer) else f"\\boxed{{{answer}}}")


def amount_text(answer: str) -> str:
    """Return an expected answer without its currency: the parser takes the sign in `-$5` for the start of a formula.

    Args:
        answer: plain.
    """
    return _without_stop(f"\\boxed{{{_MONEY.sub('', _numbers(answer))}}}")


def without_percent(text: str) -> str | None:
    r"""Return a text whose last box ends in a percent sign without that sign; None if it ends in none.

    Args:
        text: from `response_text` or `answer_text`.
    """
    boxes = _boxes(text)
    if not boxes or not _PERCENT.search(text[: boxes[-1][1]]):
        return None
    _, end = boxes[-1]
    return _PERCENT.sub("", text[:end]) + text[end:]


def base_of(text: str) -> str | None:
    """Return the base in which the last box of a text has its number; None if it names none.

    Args:
        text: from `response_text` or `answer_text`.
    """
    boxes = _boxes(text)
    start, end = boxes[-1] if boxes else (0, 0)
    found = _IN_BASE.fullmatch(text, start + len("\\boxed{"), end) if boxes else None
    return found[1].lstrip("0") if found else None


def _numbers(text: str) -> str:
    text = _ROW_SPACE.sub(" ", _LONG_SPACE.sub(r"\1", _PHANTOM.sub("", text)))
    text = _TIMES_TEN.sub(_written_out, _LONG_EXPONENT.sub(r"\g<1>9999", text))
    return _EXPONENT.sub(_written_out, _MIXED.sub(_as_fraction, _THOUSANDS.sub("", text)))


def _written_out(number: re.Match[str]) -> str:
    digits, exponent = filter(None, number.groups())
    if len(exponent) > 3 or abs(int(exponent)) > _MOST_DIGITS:
        return _LONG_EXPONENT.sub(r"\g<1>9999", f"{digits}E{exponent}")
    return f"{Decimal(f'{digits}e{exponent}'):f}"


def _as_fraction(mixed: re.Match[str]) -> str:
    whole, numerator, denominator = map(int, mixed.groups())
    return f"{whole * denominator + numerator}/{denominator}" if numerator < denominator else mixed[0]


def _last_boxes_alone(text: str) -> str:
    # Outside of formulas the parser takes all boxes for one set, also those that a response corrects later.
    boxes = _boxes(text)
    first = len(boxes) - 1
    for (_, end), (start, _) in reversed(list(pairwise(boxes))):
        between = _BETWEEN.fullmatch(text, end + 1, start)
        if not between or (between["label"] and not _JOINT.search(text, end + 1, start)):
            break
        first -= 1
    for (_, end), (start, _) in reversed(list(pairwise(boxes[max(first, 0) :]))):
        text = text[: end + 1] + _COMMA_AND.sub(",", text[end + 1 : start].replace("*", "")) + text[start:]
    for start, _ in reversed(boxes[: max(first, 0)]):
        text = text[:start] + text[start + len("\\boxed") :]
    return text


def _without_stop(text: str) -> str:
    boxes = _boxes(text)
    if not boxes:
        return text
    _, end = boxes[-1]
    return _STOP.sub(r"\1", text[:end]) + text[end:]


def _boxes(text: str) -> list[tuple[int, int]]:
    """Return where each box begins that is in no other, and where its own brace closes."""
    found: list[tuple[int, int]] = []
    # Where the braces that are open began, with -1 for those of no box.
    still_open: list[int] = []
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            start = still_open.pop() if still_open else -1
            if start >= 0:
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, brace.start()))
        elif brace[0] == "{":
            still_open.append(-1)
        elif brace[0].startswith("\\boxed"):
            still_open.append(brace.start())
    return found
