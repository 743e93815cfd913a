"""A workload with other prompts and answers, as options of the command line say."""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from workloads import ANSWERS_PER_PROMPT, TEMPLATE_TOKENS, WORKLOADS, Workload

from qarl_nemo.files import FileError, read_json

MOST_TOKENS = 18432
"""Of a prompt and its answer: what a micro-batch of `tuned.yaml` and a sequence of the shipped recipes hold."""
_OPTIONS = ("answers", "tokens", "prompt_tokens", "lengths")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that change a workload."""
    parser.add_argument("--answers", type=int, metavar="N", help="of a step, in place of the workload's")
    parser.add_argument("--tokens", type=int, metavar="N", help="of the longest answer; without --lengths, of each")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="of each prompt")
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="JSON list of answers' tokens; each step draws its answers' lengths from it",
    )


def said(arguments: argparse.Namespace) -> list[str]:
    """Return the words of the options that change the workload."""
    given = [(name, getattr(arguments, name)) for name in _OPTIONS]
    return [word for name, value in given if value is not None for word in (f"--{name.replace('_', '-')}", str(value))]


def own_workload(arguments: argparse.Namespace) -> Workload:
    """Return the workload with what the options change.

    Raises:
        ValueError: an option has an illegal value, or what is changed has no name of its own.
    """
    work = WORKLOADS[arguments.workload]
    if not said(arguments):
        return work
    _require_name(arguments)
    measured = _read_lengths(arguments.lengths) if arguments.lengths else ()
    longest = arguments.tokens if arguments.tokens is not None else max(measured, default=work.longest)
    changed: dict[str, Any] = {"longest": longest, "measured": measured}
    if arguments.tokens is not None or measured:
        changed["drawn"] = False
    for name in ("answers", "prompt_tokens"):
        if (value := getattr(arguments, name)) is not None:
            changed[name] = value
    work = replace(work, **changed)
    _require_sizes(work)
    return work


def _require_name(arguments: argparse.Namespace) -> None:
    label, options = arguments.label, " ".join(said(arguments)[::2])
    if not label:
        raise ValueError(
            f"{options}: rows of another workload need a --label; it is called {arguments.workload}_LABEL then"
        )
    # Whose rows they are is read from how their names end.
    if taken := [name for name in WORKLOADS if f"_{arguments.workload}_{label}".endswith(f"_{name}")]:
        raise ValueError(
            f"--label {label}: rows would end as those of workload {max(taken, key=len)}; take another word"
        )


def _read_lengths(file: Path) -> tuple[int, ...]:
    found = read_json(file, "a JSON list of answers' tokens", list)
    wrong = [value for value in found if type(value) is not int or value < 1]
    if wrong or not found:
        what = f"holds {', '.join(json.dumps(value)[:40] for value in wrong[:5])}" if wrong else "is empty"
        raise FileError(f"--lengths {file} {what}; legal: one or more whole numbers of 1 or more, [812, 1460, 4096]")
    return tuple(found)


def _require_sizes(work: Workload) -> None:
    problems, multiple = [], math.lcm(ANSWERS_PER_PROMPT, work.updates * work.gpus)
    if work.answers < 1 or work.answers % multiple:
        problems.append(
            f"--answers {work.answers}: legal are multiples of {multiple}, so that prompts have {ANSWERS_PER_PROMPT} "
            f"and each of {work.gpus} GPU(s) and {work.updates} update(s) as many"
        )
    if work.longest < 1:
        problems.append(f"--tokens {work.longest}: legal is 1 or more")
    if work.prompt_tokens <= TEMPLATE_TOKENS:
        problems.append(
            f"--prompt-tokens {work.prompt_tokens}: legal is more than {TEMPLATE_TOKENS}, which the template adds"
        )
    if work.prompt_tokens + work.longest > MOST_TOKENS:
        problems.append(
            f"prompts of {work.prompt_tokens} and answers of up to {work.longest} tokens: a micro-batch has at most "
            f"{MOST_TOKENS}; lower --tokens, --prompt-tokens or what --lengths holds"
        )
    if problems:
        raise ValueError("; ".join(problems))
