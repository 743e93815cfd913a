"""Options of `qarl compare` alone."""

from pathlib import Path
from typing import Annotated, Any

import typer

from qarl_formats import DEFAULT_FORMAT


def _maintainers(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="For maintainers")


Checkpoint = Annotated[Path, typer.Argument(help="Hugging Face Qwen, Llama or Mistral directory, not quantized.")]
Formats = Annotated[
    list[str] | None,
    typer.Option("--format", help=f"What the engine serves; repeat for several. Default {DEFAULT_FORMAT}."),
]
GroupSize = Annotated[int | None, typer.Option(help="Elements per scale along K, of integer formats.")]
Engine = Annotated[str, typer.Option(help="packed (built in, any machine) or vllm (own process).")]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
Precision = Annotated[str, typer.Option(help="bfloat16, or float32 with the packed engine.")]
Attention = Annotated[
    str, typer.Option(help="The learner's kernel: torch's, or vLLM's own (engine, on Hopper), to leave it out of gaps.")
]
Prompts = Annotated[
    Path | None,
    typer.Option(help="Text, one prompt a line, or JSONL with prompt_token_ids, prompt or problem; else random."),
]
NumPrompts = Annotated[int | None, typer.Option(help="Random prompts (16), or the first ones of the file.")]
PromptTokens = Annotated[int, typer.Option(help="Length of a random prompt.")]
NumResponses = Annotated[int, typer.Option(help="Sampled responses of each prompt; one more is greedy.")]
MaxNewTokens = Annotated[int, typer.Option(help="Longest response, tokens.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of random prompts and of sampling.")]
BatchSize = Annotated[int, typer.Option(help="Responses in one forward.")]
GpuMemoryUtilization = Annotated[float, typer.Option(help="Share of the GPU that vLLM takes.")]
Parallel = Annotated[int, typer.Option(help="vLLM engines that run at a time and divide that share.")]
Adapter = Annotated[
    Path | None, typer.Option(help="PEFT folder of adapters that both sides add, as a run's checkpoints hold them.")
]
Layers = Annotated[bool, typer.Option(help="Compare operator by operator as well, on vLLM's own inputs.")]
Output = Annotated[Path, typer.Option(help="Folder of compare.json and compare.png.")]
Record = Annotated[Path | None, _maintainers("Results file (docs/results) to add the gaps to.")]
RecordOperators = Annotated[Path | None, _maintainers("The same for --layers.")]
