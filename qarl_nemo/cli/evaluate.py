"""`qarl eval`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qarl_nemo.cli.options import FrozenBase, settings_of
from qarl_nemo.cli.program import command
from qarl_nemo.config.problems import attempt

if TYPE_CHECKING:
    from qarl_nemo.measure.eval.evaluation import ModelEvaluation
    from qarl_nemo.measure.eval.settings import EvalSettings
    from qarl_nemo.measure.eval.store import Row
    from qarl_nemo.train.config import TokenizerConfig

Models = Annotated[
    list[Path],
    typer.Argument(
        help="BF16 or quantized Hugging Face folders, or runs: the newest checkpoint, served as its rollouts were."
    ),
]
Benchmarks = Annotated[
    str,
    typer.Option(
        help="Comma-separated: aime24, aime25, amc23, math500, minerva, olympiadbench (all six: math), arc_c, "
        "gpqa, mmlu_pro (all three: ood), gsm8k; or all."
    ),
]
ChatTemplate = Annotated[
    str | None, typer.Option(help="none, or a .jinja file. Default: the tokenizer's, or the run's.")
]
ChatTemplateKwargs = Annotated[
    str | None, typer.Option(help='The template\'s own options, JSON: {"enable_thinking": false}.')
]


@command
def eval_(
    models: Models,
    benchmarks: Benchmarks = "math",
    output: Annotated[
        Path, typer.Option(help="Results; every answer is kept beside it, and the same command goes on.")
    ] = Path("runs/eval/results.json"),
    data: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH: a local copy, file or folder; repeat. Else the hub.")
    ] = None,
    base: FrozenBase = None,
    engine: Annotated[str, typer.Option(help="vllm, packed (built in, any machine), or auto: vLLM on a GPU.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    precision: Annotated[
        str | None, typer.Option(help="bfloat16 or float32, with the packed engine. Default: the checkpoint's.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Ask a fixed sample of at most this many problems each.")] = None,
    num_samples: Annotated[int | None, typer.Option(help="Answers to each problem. Default: the benchmark's.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 decodes greedily. Default: the paper's 0.6.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Default: the paper's 1.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer. Default: the paper's 16384.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of sampling.")] = 0,
    batch_size: Annotated[int | None, typer.Option(help="Answers decoded at once: 256 in vLLM, else 32.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Ask as in training: NeMo-RL's prompt file, {} for the question.")
    ] = None,
    system_prompt: Annotated[str | None, typer.Option(help="A system message before each question.")] = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of each GPU that vLLM takes.")] = 0.9,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that share a model in vLLM.")] = 1,
) -> None:
    """Measure how many benchmark problems models solve as they are served: avg@k and pass@k with standard errors.

    Each benchmark has its own prompts, answer check, temperature and lengths; the tokenizer's chat template is used if
    it has one. Several models are asked the same and stand side by side. The same command resumes a killed one.
    """
    given = locals()
    from qarl_nemo.measure.eval.settings import EvalSettings

    problems: list[str] = []
    settings = settings_of(
        EvalSettings,
        given,
        models=tuple(models),
        benchmarks=tuple(name.strip() for name in benchmarks.split(",") if name.strip()),
        data=attempt(problems, named_copies, data or []) or {},
        prompts=attempt(problems, _prompts, chat_template, chat_template_kwargs),
    )
    evaluate(settings, problems)


def _prompts(template: str | None, options: str | None) -> "TokenizerConfig | None":
    from qarl_nemo.config import validate
    from qarl_nemo.files import parse_json
    from qarl_nemo.train.config import TokenizerConfig

    if template is None and options is None:
        return None
    if template == "none" and options is not None:
        raise ValueError("--chat-template-kwargs are a template's, and --chat-template none has none; leave one out")
    kwargs = {} if options is None else parse_json(options, "--chat-template-kwargs", "the template's options")
    written = {"chat_template": None if template == "none" else template or "default", "chat_template_kwargs": kwargs}
    return validate(written, TokenizerConfig, source="--chat-template")


def named_copies(given: list[str]) -> dict[str, Path]:
    """Read the values of `--data`.

    Args:
        given: NAME=PATH each.

    Returns:
        Name -> path.

    Raises:
        ValueError: one is not of this form, or a name comes twice; all are listed.
    """
    parts = [text.partition("=") for text in given]
    wrong = [text for text, part in zip(given, parts, strict=True) if not all(part)]
    problems = (
        [f"--data {', '.join(wrong)}: write NAME=PATH, for example --data gsm8k=data/test.jsonl"] if wrong else []
    )
    names = [name for name, *rest in parts if all(rest)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        problems.append(f"--data names more than one copy of {', '.join(twice)}; choose one")
    if problems:
        raise ValueError("; ".join(problems))
    return {name: Path(path) for name, _, path in parts}


def evaluate(settings: "EvalSettings", beside: Sequence[str] = ()) -> None:
    """Evaluate, and show and keep the results.

    Args:
        settings: what to evaluate.
        beside: what else is wrong, to be listed with the rest.

    Raises:
        RunStoppedError: it was interrupted from the keyboard.
    """
    from qarl_nemo.files import exclusive, make_folder
    from qarl_nemo.measure.eval.output import answers_path, first_prompts, left_out, lock_for, write_results
    from qarl_nemo.measure.eval.run import plan, run
    from qarl_nemo.measure.eval.settings import prepare
    from qarl_nemo.measure.eval.store import AnswerStore
    from qarl_nemo.train.progress import LiveProgress
    from qarl_nemo.train.run_dir import RunStoppedError

    job = prepare(settings, beside)
    output, answers = settings.output, answers_path(settings.output)
    make_folder(output.parent, "the folder of an evaluation")
    with exclusive(lock_for(output), f"the evaluation {output}"):
        evaluations = plan(job, AnswerStore(answers, job.fixed_settings()))
        lost = left_out(job)
        total, done = (
            sum(counts) for counts in zip(*((one.num_answers, one.num_kept) for one in evaluations), strict=True)
        )
        typer.echo(
            f"engine {job.engine} on {job.device}: {total} answers" + f", {done} of them from before" * bool(done)
        )
        for shown in first_prompts(evaluations):
            typer.echo(shown)
        with LiveProgress("answers", total, done) as progress:

            def show(doing: str, num_new: int) -> None:
                nonlocal done
                done += num_new
                progress.update(done)
                progress.phase(doing)

            try:
                rows = run(evaluations, show, lambda found: write_results(job, found))
            except KeyboardInterrupt:
                raise RunStoppedError(f"stopped with {done} of {total} answers; the same command goes on") from None
    _tell(rows, evaluations)
    if lost:
        kept = f"{answers} keeps these answers, name them again with the rest"
        typer.echo(f"{output} no longer has {', '.join(lost)}: {kept}")
    typer.echo(f"written: {output}, {answers}")


def _tell(rows: "Sequence[Row]", evaluations: "Sequence[ModelEvaluation]") -> None:
    from rich.console import Console

    from qarl_nemo.measure.eval.output import notes, results_table

    console = Console()
    console.print(results_table(rows))
    for note in notes(rows):
        console.print(note, markup=False)
    if differently := sum(one.num_differently for one in evaluations):
        console.print(f"{differently} of the kept answers are judged differently than by the checker of that time")
