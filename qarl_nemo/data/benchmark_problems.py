"""A benchmark's problems from the hub or a local file, and whether an answer to one is right."""

import functools
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl_nemo import answer_text, verify
from qarl_nemo.data.benchmark_fields import Problem
from qarl_nemo.data.benchmarks import Benchmark
from qarl_nemo.data.config import BenchmarkConfig, DatasetConfig
from qarl_nemo.data.problems import Task, with_system_prompt
from qarl_nemo.data.records import fields_of, listed, part_of_copy, read_records
from qarl_nemo.files import FileError
from qarl_nemo.installation import installed_version
from qarl_nemo.verify import reward, rewards


def _in_braces(depth: int) -> str:
    return r"[^{}]*" if depth == 0 else rf"(?:[^{{}}]|\{{{_in_braces(depth - 1)}\}})*"


_MAX_QUOTED = 200
# Not the article or pronoun before a word: `A dog` and `I think` choose nothing. These follow neither.
_AFTER_A_LETTER = (
    "and|or|is|are|because|since|which|that|as|with|in|for|from|due|based|by|on|at|but|where|whereas|when|while|if|so|not"
    "|only|rather|given|according|then|thus|hence|therefore|after|through|over|under|above|below|among|instead|it|this"
    "|the|using"
)
_ANY_LETTER = rf"(?:[B-HJ-Z]|[AI](?![ \t]+(?!(?:{_AFTER_A_LETTER})\b)[a-z]))"
# A small letter counts in parentheses: `is a dog` chooses nothing.
_EITHER = rf"(?:{_ANY_LETTER}|(?<=\()[a-z](?=\)))"
_LETTER = rf"(?:(?i:option|choice)\s*\(?(?=[A-Z]|{_EITHER})|\(?(?={_EITHER}))([A-Za-z])\)?(?![\w'])"
# What may stand before a letter: a colon, quotes, LaTeX's and Markdown's \textbf{, \(, **. It takes all space there:
# with two ways to read it, a response that ends in nothing else would take for ever.
_MARKUP = r"(?:\\(?:text|math|rm|bf)[a-z]*|\\[(\[]|[\s:*${`\"\[])*"
# A box that was cut off ends with the response; in braces at most four deep.
_BOX = re.compile(rf"\\boxed\s*\{{({_in_braces(4)})")
_BOX_MARKUP = re.compile(
    r"\\boxed\s*|\\(?:text|math|rm|bf|bm|boldsymbol|underline|displaystyle|large|operatorname)[a-z]*"
    r"|\\[()\[\]{},;:! ]|[{}$*~`\"\[\]]"
)
# Spaces that markup leaves: (\text{C}).
_IN_PARENTHESES = re.compile(r"(?<=\()\s+|(?<!\s)\s+(?=\))")
# What joins letters takes all space between them: with two ways to read each gap, a long list would take for ever.
_NAMED = r"(?:(?i:option|choice)s?\b\s*)?\(?"
_JOINED = r"\)?(?:[\s,;/&+|\\]|\b(?:and|or)\b)+"
# A small letter alone, or with what follows an option's letter: `a dog` and `x = 3` choose nothing.
_SMALL = r"[a-z](?=\s*(?:[).:,;/&]|(?:and|or)\b|$))"
# Nor the variable of a formula: `F = 20` chooses nothing either.
_CAPITAL = rf"{_ANY_LETTER}(?!\s*(?:[=^<>+]|\\(?:approx|propto|times|cdot)))"
_BOXED_LETTER = re.compile(rf"\s*{_NAMED}({_CAPITAL}|{_SMALL})(?![\w'])")
# Alone in the box: `(C) V = IR` is one option with its text.
_BOXED_LETTERS = re.compile(
    "|".join(rf"\s*{_NAMED}{case}(?:{_JOINED}{_NAMED}{case})+\)?[\s.]*" for case in ("[A-Z]", "[a-z]"))
)
# May be of a formula, and counts only where no answer is said.
_BOXED_VARIABLE = re.compile(r"\s*[a-z][\s.]*")
# Not "let us analyze each option: A. Water", with which a response begins that was cut off before its answer.
_SAID = r"(?i:(?<!each )(?<!every )answer|(?:correct|right|best|final)\s+(?:option|choice))"
_SAID_LETTER = re.compile(rf"{_SAID}(?i:\s+(?:is|would be))?{_MARKUP}(?:(?i:either|both)\b{_MARKUP})?{_LETTER}")
# What else that statement names, up to its end: `C, and A is wrong` and `B, I think` name one.
_SAID_OTHERS = re.compile(
    rf"(?=[\s)]*(?:[,;/&+|]|and\b|or\b))(?:{_JOINED}{_NAMED}{_EITHER}(?![\w'-]))+"
    r"(?=\)?\s*(?:$|[.,;:!?)]|(?:because|since|as|but)\b))"
)
_ONE_LETTER = re.compile(r"\b[A-Za-z]\b")
_BARE_LETTER = re.compile(rf"\s*{_LETTER}[.\s]*")


def read_problems(benchmark: Benchmark, path: Path | None = None) -> list[Problem]:
    """Read a benchmark.

    Args:
        benchmark: its record.
        path: a local file or folder in the set's own fields; None reads the hub.

    Returns:
        Its problems, in the set's order.

    Raises:
        ValueError: it cannot be loaded, is empty, or records are not the benchmark's; all are listed.
    """
    found: list[Problem] = []
    problems: dict[str, list[str]] = {}
    try:
        for place, record in _records(benchmark, path):
            try:
                found.append(_problem(benchmark, record))
            except (KeyError, TypeError, ValueError) as error:
                missing = f"no field {error}" if isinstance(error, KeyError) else str(error)[:_MAX_QUOTED]
                fields = fields_of(record) if isinstance(record, Mapping) else ""
                problems.setdefault(missing + fields, []).append(place)
    except FileError as error:
        raise FileError(
            f"{benchmark.name}: {error}; with `qarl eval`, --data {benchmark.name}=PATH names a copy"
        ) from error
    if problems or not found:
        told = listed(problems) or "it is empty"
        raise FileError(f"{benchmark.name}: {path or benchmark.hub_path} is not {benchmark.title} as published: {told}")
    return found


def benchmark_tasks(config: BenchmarkConfig) -> list[Task]:
    """Read a benchmark as problems of a run.

    Returns:
        The tasks, in the set's order.

    Raises:
        ValueError: it cannot be loaded, is empty, or records are not the benchmark's; all are listed.
    """
    benchmark, template = config.record, config.prompt_template

    def judge(response: str, answer: str, _record: Mapping[str, Any]) -> float:
        return float(is_right(benchmark, response, answer))

    tasks = []
    for problem in read_problems(benchmark, Path(config.data_path) if config.data_path else None):
        question = problem.question
        text = benchmark.ask(question) if template is None else template.replace("{problem}", question)
        # math-verify is what a task without a function is checked by, in several processes.
        own = None if benchmark.check == "math" else judge
        prompt = with_system_prompt(text, config.system_prompt)
        tasks.append(Task(prompt, problem.answer, own))
    return tasks


def is_right(benchmark: Benchmark, response: str, answer: str) -> bool:
    """Tell whether a response gives the expected answer.

    Args:
        benchmark: says how answers are checked.
        response: decoded response text.
        answer: the problem's answer.

    Returns:
        Whether it does; a response without an answer is wrong.
    """
    if benchmark.check == "letter":
        return chosen_letter(response) == answer
    return reward(response, answer) == 1.0


def are_right(benchmark: Benchmark, responses: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """Tell of each response what `is_right` tells; several processes verify long ones.

    Args:
        benchmark: says how answers are checked.
        responses: decoded response texts.
        answers: the expected answer to each.

    Returns:
        Whether each is right.
    """
    if benchmark.check == "math":
        return [value == 1.0 for value in rewards(responses, answers)]
    return [is_right(benchmark, *pair) for pair in zip(responses, answers, strict=True)]


@functools.cache
def checker() -> str:
    """Return what tells one version of `are_right` from another: a digest of its code and its libraries' versions."""
    found = hashlib.sha256()
    for module in (__file__, verify.__file__, answer_text.__file__):
        found.update(Path(module).read_bytes())
    for library in ("math-verify", "latex2sympy2-extended", "sympy"):
        found.update(f"{library} {installed_version(library)}\n".encode())
    return found.hexdigest()[:16]


def chosen_letter(response: str) -> str | None:
    r"""Return the option that a response chooses.

    Returns:
        The letter in the last `\boxed{}` that has one, of either case; where there is no such box, or it holds only a
        small letter, that of the last "answer is B" or "answer: (b)"; or the letter that is the whole response. None if
        there is none of these, or several letters in that box or beside that answer.
    """
    said = list(_SAID_LETTER.finditer(response))
    for box in reversed(_BOX.findall(response)):
        text = _IN_PARENTHESES.sub("", _BOX_MARKUP.sub(" ", box))
        if boxed := _BOXED_LETTER.match(text):
            if said and _BOXED_VARIABLE.fullmatch(text):
                break
            # To name several options would be right whichever is.
            return None if _BOXED_LETTERS.fullmatch(text) else boxed[1].upper()
    if said:
        return _said_letter(said[-1])
    bare = _BARE_LETTER.fullmatch(response)
    return bare[1].upper() if bare else None


def _said_letter(said: re.Match[str]) -> str | None:
    """Return the letter that a statement says; None if it names others beside it."""
    rest = _BOX_MARKUP.sub(" ", said.string[said.end() :])
    others = _SAID_OTHERS.match(rest)
    named = {letter.upper() for letter in _ONE_LETTER.findall(others[0])} if others else set()
    letter = said[1].upper()
    return None if named - {letter} else letter


def _records(benchmark: Benchmark, path: Path | None) -> Iterator[tuple[str, Any]]:
    subsets: tuple[str | None, ...] = benchmark.subsets or (None,)
    if path is None:
        parts = [(benchmark.hub_path, subset) for subset in subsets]
    elif path.is_dir():
        # A folder that is no copy of the hub's is the same for every subset, and read once.
        parts = list(dict.fromkeys(part_of_copy(path, subset) for subset in subsets))
        whole = (str(path), None)
        if len(parts) > 1 and whole in parts:
            # Read beside the others' folders, all of it would ask their problems twice.
            lacking = ", ".join(subset or "" for subset in subsets if part_of_copy(path, subset) == whole)
            raise FileError(f"{path} has folders of other parts than {lacking}; the copy is not whole: add {lacking}")
    else:
        parts = [(str(path), None)]
    for source, subset in parts:
        yield from read_records(DatasetConfig(data_path=source, subset=subset, split=benchmark.split))


def _problem(benchmark: Benchmark, record: Any) -> Problem:
    if isinstance(record, Exception):
        raise ValueError(f"no JSON: {record}")
    if not isinstance(record, Mapping):
        raise TypeError(f"it is {str(record)[:80]!r}, not an object")
    return benchmark.read(record)
