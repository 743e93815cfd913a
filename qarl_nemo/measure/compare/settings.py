"""Settings of `qarl compare`."""

from dataclasses import dataclass
from pathlib import Path

from qarl_formats import DEFAULT_FORMAT

ENGINES = ("packed", "vllm")
PRECISIONS = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """One comparison.

    Attributes:
        checkpoint: Hugging Face directory of a supported model, not quantized.
        formats: formats that the engine serves, with a pair of arms each; the BF16 floor is always measured.
        group_size: elements per scale of integer formats; None = 128.
        scale_convention: grid of integer formats; None = `full_range`.
        nested_in: the finer format whose codes integer formats round; None = codes of their own.
        own_width: store codes in no more bits than their grid has.
        targets: what is quantized.
        engine: `packed` or `vllm`.
        device: `cpu`, `cuda` or `auto`.
        precision: dtype of activations and unquantized parameters, on both sides.
        attention: the learner's kernel, `torch`, or `engine` for vLLM's own.
        prompts: file of prompts; None makes random ones.
        num_prompts: random prompts, or the most that are read from the file; None = 16 random ones, or the whole file.
        prompt_tokens: length of a random prompt.
        num_responses: sampled responses to each prompt; one more is greedy.
        max_new_tokens: most tokens of a response.
        seed: seeds random prompts and sampling.
        batch_size: responses in one forward.
        gpu_memory_utilization: share of the GPU that vLLM takes.
        parallel: vLLM engines that run at a time and divide that share.
        layers: compare operator by operator as well, on vLLM's own inputs.
        adapter: PEFT folder of adapters that both sides add; None = none.
    """

    checkpoint: Path
    formats: tuple[str, ...] = (DEFAULT_FORMAT,)
    group_size: int | None = None
    scale_convention: str | None = None
    nested_in: str | None = None
    own_width: bool = False
    targets: tuple[str, ...] = ("experts",)
    engine: str = "packed"
    device: str = "auto"
    precision: str = "bfloat16"
    attention: str = "torch"
    prompts: Path | None = None
    num_prompts: int | None = None
    prompt_tokens: int = 32
    num_responses: int = 4
    max_new_tokens: int = 64
    seed: int = 0
    batch_size: int = 16
    gpu_memory_utilization: float = 0.8
    parallel: int = 1
    layers: bool = False
    adapter: Path | None = None
