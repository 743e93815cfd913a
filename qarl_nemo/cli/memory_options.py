"""Options of `qarl memory` alone."""

from pathlib import Path
from typing import Annotated

import typer

from qarl_formats import WIDE_NAMES
from qarl_nemo.cli.options import SERVED

Model = Annotated[
    Path,
    typer.Argument(
        help="Hugging Face Qwen3, Qwen3-MoE or Qwen2 folder, or its config.json; with --lora also Llama, Mistral."
    ),
]
Format = Annotated[str, typer.Option("--format", help=f"{SERVED}; with --lora also {', '.join(WIDE_NAMES)}.")]
Gpus = Annotated[int, typer.Option(help="GPUs that share the model.")]
GpuGib = Annotated[float, typer.Option(help="Memory of each, in GiB: 79 for an H100, 139 for an H200.")]
Layouts = Annotated[
    list[str] | None,
    typer.Option(help="Parallel sizes, the rest is data parallel: dp, ep8, tp2_ep8; repeat. Default: several."),
]
QuantizedTargets = Annotated[
    str | None,
    typer.Option(help="What is quantized: experts, attention, mlp. Default: experts, or a dense model's mlp."),
]
KeepOperand = Annotated[
    bool, typer.Option(help="Keep what the learner's GEMMs multiply, as qarl.keep_operand says, true by default.")
]
Tokens = Annotated[int, typer.Option(help="Tokens of a micro-batch, before tp and cp ranks share it.")]
Optimizers = Annotated[
    list[str] | None,
    typer.Option(help="adam, adam_bf16 (BF16 moments), muon, offloaded (to the host); repeat. Default: all."),
]
Recomputes = Annotated[
    list[str] | None, typer.Option(help="Activation checkpointing: full or none; repeat. Default: both.")
]
GradientBytes = Annotated[int, typer.Option(help="Bytes of one gradient element: 4, or 2 without grad_reduce_in_fp32.")]
LogprobChunk = Annotated[
    int | None,
    typer.Option(help="Tokens whose log-probabilities are computed at a time. Default: all; with --lora 1024."),
]
EngineTp = Annotated[
    int | None,
    typer.Option(help="GPUs of one rollout engine on the learner's GPUs: adds a refit's peaks and host memory."),
]
EngineEp = Annotated[
    int | None,
    typer.Option(help="GPUs that share an engine's experts, if not those of --engine-tp alone (1 if left out)."),
]
LoraRank = Annotated[
    int | None,
    typer.Option(help="Rank: compute one GPU of qarl train with adapters on a frozen base, learner and engine."),
]
LoraTargets = Annotated[str, typer.Option(help="What has adapters: experts, attention, mlp.")]
CacheGib = Annotated[float, typer.Option(help="With --lora: keys and values of the rollouts, in GiB.")]
ShowAll = Annotated[bool, typer.Option("--all", help="Show what does not fit, too.")]
