"""The benchmarks of the paper's Table 1 and GSM8K, one record each: where it is and how it is asked.

Temperature, top-p and lengths are the paper's (appendix B). The numbers of answers are those of LUFFY (arXiv
2504.14945), whose training data the paper uses: 32 to each problem of the three small sets, one elsewhere.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any, Literal

from qarl_nemo.data import benchmark_fields as fields

Check = Literal["math", "letter"]

_MATH = "{}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CHOICE = "{}\n\nPlease reason step by step, and put the letter of your final answer within \\boxed{{}}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: what users call it.
        title: what the paper calls it.
        hub_path: its name on the Hugging Face hub.
        subsets: the hub's configurations that make it up, in order; empty for the only one.
        split: the hub's split.
        read: makes a problem of a record in the set's own fields.
        num_problems: how many there are.
        group: the paper's average that it belongs to, if any.
        check: `math` asks math-verify, `letter` compares the chosen letter.
        prompt: the user's message as NeMo-RL's prompt files have it: `{}` for question and options, braces doubled.
        num_samples: answers to each problem.
        temperature: sampling temperature.
        top_p: smallest probability mass that is kept.
        max_prompt_tokens: longer prompts are not asked.
        max_new_tokens: longest answer, tokens.
    """

    name: str
    title: str
    hub_path: str
    subsets: tuple[str, ...] = ()
    split: str = "test"
    read: Callable[[Mapping[str, Any]], fields.Problem]
    num_problems: int
    group: Literal["math", "ood"] | None = None
    check: Check = "math"
    prompt: str = _MATH
    num_samples: int = 1
    temperature: float = 0.6
    top_p: float = 1.0
    max_prompt_tokens: int = 2048
    max_new_tokens: int = 16_384

    def ask(self, question: str) -> str:
        """Return the user's message."""
        return self.prompt.format(question)


_CHOICES: dict[str, Any] = {"group": "ood", "check": "letter", "prompt": _CHOICE}
_TABLE = (
    Benchmark(
        name="aime24",
        title="AIME24",
        hub_path="HuggingFaceH4/aime_2024",
        split="train",
        read=fields.plain("problem", "answer"),
        group="math",
        num_problems=30,
        num_samples=32,
    ),
    Benchmark(
        name="aime25",
        title="AIME25",
        hub_path="opencompass/AIME2025",
        subsets=("AIME2025-I", "AIME2025-II"),
        read=fields.plain("question", "answer"),
        group="math",
        num_problems=30,
        num_samples=32,
    ),
    Benchmark(
        name="amc23",
        title="AMC23",
        hub_path="math-ai/amc23",
        read=fields.plain("question", "answer"),
        group="math",
        num_problems=40,
        num_samples=32,
    ),
    Benchmark(
        name="math500",
        title="MATH-500",
        hub_path="HuggingFaceH4/MATH-500",
        read=fields.plain("problem", "answer"),
        group="math",
        num_problems=500,
    ),
    Benchmark(
        name="minerva",
        title="Minerva",
        hub_path="math-ai/minervamath",
        read=fields.minerva,
        group="math",
        num_problems=272,
    ),
    Benchmark(
        name="olympiadbench",
        title="OlympiadBench",
        hub_path="Hothan/OlympiadBench",
        subsets=("OE_TO_maths_en_COMP",),
        split="train",
        read=fields.olympiadbench,
        group="math",
        num_problems=674,
    ),
    Benchmark(
        name="arc_c",
        title="ARC-c",
        hub_path="allenai/ai2_arc",
        subsets=("ARC-Challenge",),
        read=fields.arc,
        num_problems=1172,
        **_CHOICES,
    ),
    Benchmark(
        name="gpqa",
        title="GPQA",
        hub_path="Idavidrein/gpqa",
        subsets=("gpqa_diamond",),
        split="train",
        read=fields.gpqa,
        num_problems=198,
        **_CHOICES,
    ),
    Benchmark(
        name="mmlu_pro",
        title="MMLU-Pro",
        hub_path="TIGER-Lab/MMLU-Pro",
        read=fields.mmlu_pro,
        num_problems=12_032,
        **_CHOICES,
    ),
    Benchmark(
        name="gsm8k",
        title="GSM8K",
        hub_path="openai/gsm8k",
        subsets=("main",),
        read=fields.gsm8k,
        num_problems=1319,
    ),
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _TABLE}
GROUPS = {"math": "math average", "ood": "OOD average"}
# Name -> why it is not among them.
_UNSUPPORTED = {
    "livecodebench": "its answers are programs, and this package has no sandbox in which to run what a model wrote"
}


def find_benchmarks(names: list[str]) -> list[Benchmark]:
    """Return the benchmarks of these names.

    Args:
        names: names of the table, each once; `math` and `ood` stand for the benchmarks of an average, `all` for all.

    Raises:
        ValueError: a name is unknown, not supported or given twice, or there is none; all are listed.
    """
    found, problems = [], []
    for name in names:
        key = re.sub("[-_ ]", "", name.lower())
        members = [one for one in _TABLE if key in (one.name.replace("_", ""), one.group) or key == "all"]
        if key in _UNSUPPORTED:
            problems.append(f"{name} is not supported: {_UNSUPPORTED[key]}")
        elif not members:
            problems.append(f"unknown benchmark {name!r}")
        found += members
    twice = sorted({one.name for one in found if found.count(one) > 1})
    if twice:
        problems.append(f"named more than once: {', '.join(twice)}")
    if problems or not found:
        legal = f"legal: {', '.join(BENCHMARKS)}, or math, ood and all"
        raise ValueError("; ".join(problems or ["no benchmark is named"]) + f"; {legal}")
    return found


def find_benchmark(name: str) -> Benchmark:
    """Return the benchmark of a name that stands for one.

    Raises:
        ValueError: the name is unknown, not supported, or stands for several.
    """
    found = find_benchmarks([name])
    if len(found) > 1:
        raise ValueError(f"benchmark {name!r} stands for several; write an entry of data.validation for each")
    return found[0]


def with_prompt(benchmark: Benchmark, template: str) -> Benchmark:
    """Return a benchmark that is asked in other words.

    Args:
        benchmark: its record.
        template: NeMo-RL's prompt file: text in which `{}` stands for the question, and `{{` for a brace.

    Raises:
        ValueError: the template has no `{}`, or other braces.
    """
    legal = "a prompt's template has one {} for the question, and braces doubled"
    try:
        places = sum(name is not None for _, name, _, _ in Formatter().parse(template))
        if places == 1:
            template.format("")
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{legal}: {error}") from error
    if places != 1:
        raise ValueError(f"{legal}; this one has {places} places in single braces")
    return replace(benchmark, prompt=template)
