"""Verifiable rewards: 1 if math-verify finds the response equal to the answer, else 0.

Parsing a long response takes milliseconds, so that many are shared out to processes of their own: this module is also
the program that they run.
"""

import contextlib
import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qarl_nemo.answer_text import amount_text, answer_text, base_of, response_text, without_percent

# It warns of each response that it gives up, after five seconds, with all of its text.
logging.getLogger("math_verify").setLevel(logging.ERROR)
# Python refuses to convert numbers of more than 4300 digits; math-verify copes with them.
_INTEGERS = re.compile(r"\s*-?\d{1,1000}(\s+-?\d{1,1000})*\s*")
# Parsing so many characters takes half a second; starting the processes takes two, but only once.
_WORTH_SHARING = 100_000
_MOST_PROCESSES = 4
# A number below the first is the same as another if they differ by less than this share of it.
_SMALL, _SAME = 1e-3, 1e-3
# What sums of roots may be off where zero is right.
_ZERO = 1e-12


def reward(response: str, answer: str) -> float:
    """Return 1.0 if `response` gives `answer`, else 0.0.

    Args:
        response: decoded response text.
        answer: the expected answer, plain or LaTeX.
    """
    if _INTEGERS.fullmatch(answer) and _INTEGERS.fullmatch(response):
        # Plain integers are compared here: the parser takes milliseconds per call and finds no answer in a list.
        return float(list(map(int, response.split())) == list(map(int, answer.split())))
    if response.strip() == answer.strip() != "":
        # The parser finds no plain words.
        return 1.0
    return _verified(response, answer)


def rewards(responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return the reward of every response; many long ones are verified in several processes.

    Returns:
        0.0 or 1.0 each.
    """
    pairs = list(zip(responses, answers, strict=True))
    parsed = [pair for pair in dict.fromkeys(pairs) if not all(map(_INTEGERS.fullmatch, pair))]
    if sum(len(response) for response, _ in parsed) < _WORTH_SHARING:
        return [reward(*pair) for pair in pairs]
    workers = _workers()
    shares = [parsed[start :: len(workers)] for start in range(len(workers))]
    with ThreadPoolExecutor(len(workers)) as threads:
        values = threads.map(_ask, workers, shares)
    known = {
        pair: value for share, each in zip(shares, values, strict=True) for pair, value in zip(share, each, strict=True)
    }
    return [known[pair] if pair in known else reward(*pair) for pair in pairs]


@functools.cache
def _workers() -> list[subprocess.Popen[str]]:
    # They end when this process does, however it ends, because their input does.
    command = [sys.executable, "-m", "qarl_nemo.verify"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    return [subprocess.Popen(command, **pipes) for _ in range(min(_MOST_PROCESSES, os.cpu_count() or 1))]


def _ask(worker: subprocess.Popen[str], pairs: list[tuple[str, str]]) -> list[float]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    line = ""
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.write(json.dumps(pairs) + "\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"a process that verifies answers ended with code {worker.wait()}; start the run again")
    return json.loads(line)


def _answer_requests() -> None:
    # Ctrl-C reaches every process of a terminal, a cluster's SIGTERM every one of a job; the one that asks says what to
    # do.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Whatever a parser prints must not stand between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps([reward(*pair) for pair in json.loads(line)]), file=answers, flush=True)


# Responses are kept whole: 4,096 of 60,000 characters take a quarter of a GiB.
@functools.lru_cache(maxsize=4096)
def _verified(response: str, answer: str) -> float:
    from math_verify import parse

    wanted, given = answer_text(answer), response_text(response)
    bases = base_of(wanted), base_of(given)
    if None not in bases and bases[0] != bases[1]:
        return 0.0
    gold = parse(wanted) or parse(amount_text(answer))
    if _is_same(gold, parse(given)):
        return 1.0
    # Of integers math-verify takes 12 for 12%, of other numbers not.
    bare_wanted, bare_given = without_percent(wanted), without_percent(given)
    if bare_wanted and not bare_given:
        return float(_is_same(parse(bare_wanted), parse(given)))
    number = _number(gold[0]) if gold and bare_given and not bare_wanted else None
    # 0.5% is not the 0.5 that 50% is.
    return float(number is not None and abs(number) >= 1 and _is_same(gold, parse(str(bare_given))))


def _is_same(gold: list[Any], found: list[Any]) -> bool:
    from math_verify import verify

    return verify(gold, found) and not _is_small_and_apart(gold, found)


def _is_small_and_apart(gold: list[Any], found: list[Any]) -> bool:
    """Tell small numbers apart: math-verify rounds to six decimals, and drops what is below 1e-15."""
    wanted, given = _parts(gold[0]), _parts(found[0])
    return len(wanted) == len(given) and any(map(_are_small_and_apart, wanted, given))


def _parts(value: Any) -> list[Any]:
    """Return the elements of a tuple or an interval in their order, those of a set by size, or the value alone."""
    kind = type(value).__name__
    if kind == "FiniteSet":
        return sorted(value.args, key=lambda part: abs(_number(part) or 0))
    return list(value.args) if kind in ("Tuple", "Interval") else [value]


def _are_small_and_apart(wanted: Any, given: Any) -> bool:
    wanted, given = _number(wanted), _number(given)
    if wanted is None or given is None or not abs(wanted) < _SMALL:
        return False
    return abs(given - wanted) > (_SAME * abs(wanted) or _ZERO)


def _number(value: Any) -> complex | None:
    value = getattr(value, "rhs", value)
    # Sympy recurses without end where a matrix is a factor.
    if not getattr(value, "is_number", False):
        return None
    try:
        return complex(value)
    except (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError):
        return None


if __name__ == "__main__":
    _answer_requests()
