"""Settings of `qarl eval`, and the checked job that is made from them."""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qarl_nemo.checkpoints.content import require_whole
from qarl_nemo.checkpoints.shapes import target_problems
from qarl_nemo.config.problems import attempt
from qarl_nemo.data.benchmark_fields import Problem
from qarl_nemo.data.benchmark_problems import read_problems
from qarl_nemo.data.benchmarks import BENCHMARKS, Benchmark, find_benchmarks, with_prompt
from qarl_nemo.files import FileError, read_json, read_words, require_makeable
from qarl_nemo.measure.checks import count_problems, share_problems
from qarl_nemo.measure.eval.models import EvalModel, find_model
from qarl_nemo.measure.served import adapter_problems, cpu_problems
from qarl_nemo.train.config import TokenizerConfig
from qarl_nemo.train.model import checkpoint_config
from qarl_nemo.train.rollout_config import LOWEST_TEMPERATURE
from qarl_nemo.train.setup import resolve_device
from qarl_nemo.train.vllm.host import vllm_problem

ENGINES = ("auto", "vllm", "packed")
PRECISIONS = ("bfloat16", "float32")
_GPU_SHARE = 0.9
_BATCH_SIZES = {"packed": 32, "vllm": 256}
# vLLM is asked for several batches at once: short answers make room for others while long ones go on.
_BATCHES_A_CHUNK = {"packed": 1, "vllm": 4}
# Settings that may differ when an evaluation goes on: the other answers stay as they are.
_FREE = (
    *("models", "benchmarks", "output", "data", "base", "gpu_memory_utilization", "tensor_parallel_size", "device"),
    # What they decide is compared answer by answer.
    *("prompt_file", "system_prompt", "prompts"),
)


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """One evaluation; None stands for what each benchmark's record, or the model, says.

    Attributes:
        models: Hugging Face checkpoints, quantized or not, or runs.
        benchmarks: names of benchmarks.
        output: JSON file of the results; the answers are kept beside it.
        data: benchmark name -> local copy; the others come from the hub.
        base: where the frozen base of the runs is now; None for where it was.
        engine: `vllm`, `packed`, or `auto` for vLLM where it runs.
        device: `cpu`, `cuda` or `auto`.
        precision: dtype of activations and unquantized parameters in the built-in sampler.
        limit: most problems of each benchmark, a fixed sample.
        num_samples: answers to each problem.
        temperature: sampling temperature; 0 decodes greedily.
        top_p: smallest probability mass that is kept.
        max_new_tokens: longest answer.
        seed: seeds sampling.
        batch_size: answers decoded at once.
        prompt_file: NeMo-RL's prompt file in the place of the records' prompts.
        system_prompt: system message.
        prompts: how prompts are written for all models.
        gpu_memory_utilization: share of each GPU that vLLM takes.
        tensor_parallel_size: GPUs that share a model in vLLM.
    """

    models: tuple[Path, ...]
    benchmarks: tuple[str, ...]
    output: Path
    data: dict[str, Path] = dataclasses.field(default_factory=dict)
    base: Path | None = None
    engine: str = "auto"
    device: str = "auto"
    precision: str | None = None
    limit: int | None = None
    num_samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    batch_size: int | None = None
    prompt_file: Path | None = None
    system_prompt: str | None = None
    prompts: TokenizerConfig | None = None
    gpu_memory_utilization: float = _GPU_SHARE
    tensor_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class Questions:
    """The problems of one benchmark that are asked.

    Attributes:
        benchmark: its record, sampled as asked for.
        problems: index in the whole set -> problem.
        num_total: problems of the whole set.
    """

    benchmark: Benchmark
    problems: dict[int, Problem]
    num_total: int


@dataclass(frozen=True, slots=True)
class EvalJob:
    """An evaluation whose settings have all been checked.

    Attributes:
        settings: what was asked for.
        models: what is evaluated.
        questions: what is asked, one entry for each benchmark.
        engine: `vllm` or `packed`.
        device: where it computes.
        batch_size: answers decoded at once.
    """

    settings: EvalSettings
    models: tuple[EvalModel, ...]
    questions: tuple[Questions, ...]
    engine: str
    device: torch.device
    batch_size: int

    @property
    def chunk_size(self) -> int:
        """How many answers are asked for, and kept, at once."""
        return _BATCHES_A_CHUNK[self.engine] * self.batch_size

    def record(self) -> dict[str, Any]:
        """Return all settings, with what `auto` and None stand for where it is the same for all."""
        resolved: dict[str, Any] = {"engine": self.engine, "device": self.device.type, "batch_size": self.batch_size}
        if self.settings.prompts is not None:
            resolved["prompts"] = self.settings.prompts.model_dump()
        return dataclasses.asdict(self.settings) | resolved

    def fixed_settings(self) -> dict[str, Any]:
        """Return what decides the answers to a benchmark and is not compared answer by answer."""
        return {key: value for key, value in self.record().items() if key not in _FREE}

    def dtype(self, model: EvalModel) -> torch.dtype:
        """Return the built-in sampler's dtype: the one asked for, else the checkpoint's; quantized ones are BF16.

        A run on a frozen base has its own precision.
        """
        config = model.checkpoint.config
        stored = model.run.config.policy.precision if model.run else config.get("dtype", config.get("torch_dtype"))
        return getattr(torch, self.settings.precision or (stored if stored in PRECISIONS else "bfloat16"))


def prepare(settings: EvalSettings, beside: Sequence[str] = ()) -> EvalJob:
    """Check everything and read the problems, before a weight is read.

    Args:
        settings: what to evaluate.
        beside: what else is wrong, to be listed with it.

    Raises:
        ValueError: settings, models or data are wrong; all that is wrong is listed.
    """
    problems = [*beside, *_number_problems(settings), *_choice_problems(settings)]
    device = attempt(problems, resolve_device, settings.device)
    found_models = [attempt(problems, find_model, path, settings.base) for path in settings.models]
    models = [model for model in found_models if model is not None]
    if settings.base and not problems and not any(model.run for model in models):
        problems.append(f"--base {settings.base}: none of the models is a run on a frozen base; leave it out")
    engine = _engine(settings, models, device, problems) if device else settings.engine
    problems += _model_problems(settings, models, engine)
    found = attempt(problems, find_benchmarks, list(settings.benchmarks)) or []
    problems += _unasked_data(settings, found)
    template = attempt(problems, read_words, settings.prompt_file, "a prompt file") if settings.prompt_file else None
    records = [attempt(problems, _sampled_as, settings, one, template) for one in found]
    # Data is read once all else is right.
    questions = [] if problems else _read_questions(settings, [one for one in records if one], problems)
    if problems:
        problems = list(dict.fromkeys(problems))
        raise ValueError(f"{len(problems)} problem(s) with this evaluation:\n  " + "\n  ".join(problems))
    assert device
    batch_size = settings.batch_size or _BATCH_SIZES[engine]
    return EvalJob(settings, tuple(models), tuple(questions), engine, device, batch_size)


def _number_problems(settings: EvalSettings) -> list[str]:
    names = ("limit", "num_samples", "max_new_tokens", "batch_size", "tensor_parallel_size")
    problems = count_problems((name, getattr(settings, name)) for name in names)
    temperature, lowest = settings.temperature, LOWEST_TEMPERATURE
    if temperature not in (None, 0) and not lowest <= temperature <= 100:
        legal = f"must be 0 or lie in [{lowest}, 100]"
        problems.append(f"temperature={temperature} {legal}; vLLM samples at {lowest} where less is set")
    if temperature == 0 and settings.top_p not in (None, 1):
        problems.append(f"top_p={settings.top_p} does nothing beside temperature=0, which draws nothing; leave one out")
    return problems + share_problems(settings, "top_p", "gpu_memory_utilization")


def _choice_problems(settings: EvalSettings) -> list[str]:
    problems = []
    for name, legal in (("engine", ENGINES), ("precision", (None, *PRECISIONS))):
        if getattr(settings, name) not in legal:
            problems.append(f"unknown {name} {getattr(settings, name)!r}; legal: {', '.join(filter(None, legal))}")
    unknown = [name for name in settings.data if name not in BENCHMARKS]
    if unknown:
        problems.append(f"no benchmark for the data of {', '.join(unknown)}; legal: {', '.join(BENCHMARKS)}")
    if not settings.models:
        problems.append("no model is named")
    if settings.output.is_dir():
        problems.append(f"output {settings.output} is a folder; name a file, such as {settings.output}/results.json")
    elif settings.output.exists() and not _holds_results(settings.output):
        problems.append(f"output {settings.output} holds no results of qarl eval and would be lost; name another file")
    attempt(problems, require_makeable, settings.output)
    return problems


def _unasked_data(settings: EvalSettings, found: list[Benchmark]) -> list[str]:
    """Find copies of known benchmarks that are not asked; where one is misspelt, nobody knows what is."""
    unasked = [name for name in settings.data if name in BENCHMARKS and name not in {one.name for one in found}]
    if not found or not unasked:
        return []
    names = ", ".join(unasked)
    return [
        f"--data has a copy of {names}, which --benchmarks does not ask; add {names} there, or leave out its --data"
    ]


def _holds_results(path: Path) -> bool:
    try:
        return "results" in read_json(path, "results of qarl eval")
    except FileError:
        return False


def _engine(settings: EvalSettings, models: list[EvalModel], device: torch.device, problems: list[str]) -> str:
    missing = vllm_problem(device.type, quantized=any(model.targets for model in models))
    engine = settings.engine
    if engine == "auto":
        engine = "vllm" if device.type == "cuda" and missing is None else "packed"
    if engine == "vllm":
        problems += [f"engine vllm does not run here: {missing}; or use engine packed"] if missing else []
        problems += [f"{model.label}: {problem}" for model in models for problem in _vllm_problems(model, device)]
    return engine


def _vllm_problems(model: EvalModel, device: torch.device) -> list[str]:
    fmt = model.served
    if fmt is None:
        return []
    unserved = [problem for target in model.targets for problem in target_problems(fmt, target)]
    if unserved:
        return [f"{problem}; or set --engine packed" for problem in unserved]
    problems = cpu_problems(fmt, model.targets) if device.type == "cpu" and model.targets else []
    if model.run and model.run.config.policy.lora:
        problems += adapter_problems([fmt], model.targets, device)
    return problems


def _model_problems(settings: EvalSettings, models: list[EvalModel], engine: str) -> list[str]:
    twice = [label for label, count in Counter(model.label for model in models).items() if count > 1]
    problems = [f"{label} is named more than once" for label in twice]
    for model in models:
        if model.served is None and engine == "packed":
            problems.append(
                f"{model.folder}: the built-in sampler does not know its quantization_config; set --engine vllm"
            )
        elif engine == "packed":
            attempt(problems, checkpoint_config, model.checkpoint.folder)
            if not model.run and not model.quantized:
                # Here, because the models before it may answer for hours.
                attempt(problems, require_whole, model.checkpoint)
    if engine == "vllm" and settings.precision == "float32":
        problems.append("engine vllm computes in bfloat16; leave precision out, or set --engine packed")
    if engine == "packed" and settings.tensor_parallel_size > 1:
        problems.append("the built-in sampler takes one device; leave tensor_parallel_size out")
    if engine == "packed" and settings.gpu_memory_utilization != _GPU_SHARE:
        problems.append("gpu_memory_utilization is vLLM's share, and the engine is packed; leave it out")
    return problems


def _sampled_as(settings: EvalSettings, benchmark: Benchmark, template: str | None) -> Benchmark:
    names = ("num_samples", "temperature", "top_p", "max_new_tokens")
    chosen: dict[str, Any] = {name: getattr(settings, name) for name in names}
    benchmark = dataclasses.replace(benchmark, **{name: value for name, value in chosen.items() if value is not None})
    if benchmark.temperature == 0 and benchmark.num_samples > 1:
        raise ValueError(
            f"{benchmark.name}: {benchmark.num_samples} answers at temperature 0 are one; set --num-samples 1"
        )
    if template is None:
        return benchmark
    try:
        return with_prompt(benchmark, template)
    except ValueError as error:
        raise ValueError(f"prompt file {settings.prompt_file}: {error}") from error


def _read_questions(settings: EvalSettings, records: list[Benchmark], problems: list[str]) -> list[Questions]:
    found, untried = {}, []
    # Local copies first: without a network, every attempt at the hub takes half a minute.
    for one in sorted(records, key=lambda one: one.name not in settings.data):
        if problems and one.name not in settings.data:
            untried.append(one.name)
        else:
            found[one.name] = attempt(problems, _ask, settings, one)
    if untried:
        problems.append(f"the hub has not been asked yet for {', '.join(untried)}: no --data names a copy of them")
    return [questions for one in records if (questions := found.get(one.name)) is not None]


def _ask(settings: EvalSettings, benchmark: Benchmark) -> Questions:
    copy = settings.data.get(benchmark.name)
    if copy is not None and not copy.exists():
        # The hub would be asked for it, half a minute long where there is no network.
        raise FileError(f"--data {benchmark.name}={copy} does not exist; name a local file or folder")
    whole = read_problems(benchmark, copy)
    chosen = range(len(whole))
    if settings.limit is not None and settings.limit < len(whole):
        # The same sample for every model and seed, and not the head: some sets are sorted by subject.
        chosen = sorted(random.Random(benchmark.name).sample(chosen, settings.limit))
    return Questions(benchmark, {index: whole[index] for index in chosen}, len(whole))
