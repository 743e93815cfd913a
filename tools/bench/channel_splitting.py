"""What outlier channel splitting gains on a model's own weights, and what smaller groups gain beside it.

Both cost memory: split channels widen the MLP, smaller groups have more scales. Every case quantizes `down_proj` of all
layers of one FP32 model, which then reads what it answered unquantized.

    bits        = stored bits of the MLP's quantized weights over the number of weights before splitting
    weights_db  = 10 log10( sum w^2 / sum (w - w_hat)^2 ), where w_hat of a split channel is the sum of its halves
    outputs_db  = -10 log10( mean over tokens of |x (W - W_hat)^T|^2 / |x W^T|^2 ), x as in the unquantized model
    gap_down    = mean |difference| of the answers' log-probabilities, quantized and not, with `down_proj` quantized
    gap_mlp     = the same with gate and up quantized, too
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from answers import Answers
from torch import Tensor
from transformers import PreTrainedModel

from qarl_formats import QuantFormat
from qarl_kernels import get_format, quantize_weight
from qarl_nemo.checkpoints.split_channels import channel_order, plan_splitting, split_columns
from qarl_nemo.metrics.machine import facts
from qarl_nemo.metrics.results import Figure, record_figures, running_command
from qarl_nemo.train.config import PolicyConfig
from qarl_nemo.train.model import load_model

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Group size, and percent of the channels that are split.
CASES = ((128, 0), (128, 10), (128, 50), (64, 0), (32, 0))


def effective(down: Tensor, fmt: QuantFormat, percent: int) -> tuple[Tensor, int]:
    """Quantize a `down_proj` [H, I] whose channels are split as `qarl quantize --split-channels` splits them.

    Returns:
        The weight [H, I] FP32 that the wider model multiplies the unsplit channels by, and the wider model's I.
    """
    if not percent:
        return quantize_weight(down, fmt).dequantize().float(), down.shape[1]
    width = plan_splitting(percent / 100, {"mlp": down.shape[1]}, fmt).widths["mlp"][1]
    order = channel_order(down, width - down.shape[1], fmt.group_size)
    wide = quantize_weight(split_columns(down, order, fmt), fmt).dequantize().float()
    return torch.zeros_like(down, dtype=torch.float32).index_add_(1, order, wide), width


def read_inputs(model: PreTrainedModel, mlps: Sequence[Any], answers: Answers) -> list[Tensor]:
    """Return the inputs [tokens, I] that each `down_proj` has while a model reads prompts and answers."""
    inputs: list[list[Tensor]] = [[] for _ in mlps]
    hooks = [
        mlp.down_proj.register_forward_pre_hook(lambda _, given, kept=kept: kept.append(given[0][0]))
        for mlp, kept in zip(mlps, inputs, strict=True)
    ]
    for prompt, response in zip(answers.prompts, answers.responses, strict=True):
        model(input_ids=torch.tensor([prompt + response]))
    for hook in hooks:
        hook.remove()
    return [torch.cat(kept) for kept in inputs]


def decibels(exact: Tensor, quantized: Tensor) -> float:
    """Return the mean signal-to-noise ratio of the rows: 1 / mean(noise / signal), in dB."""
    return float(-10 * ((exact - quantized).square().sum(-1) / exact.square().sum(-1)).mean().log10())


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """Yield the figures of every case, names without their prefix."""
    policy = PolicyConfig(model_path=options.model)
    model = load_model(policy, torch.device("cpu"), options.seed)[0].eval().requires_grad_(False)
    mlps: list[Any] = [one for name, one in model.named_modules() if name.endswith(".mlp")]
    masters = [{name: one.get_submodule(name).weight.clone() for name in PROJECTIONS} for one in mlps]
    answers = Answers(options.model, options.data, options.num_prompts)
    answers.sample(model, options.max_new_tokens)
    plain, inputs = answers.read(model).double(), read_inputs(model, mlps, answers)
    yield Figure("tokens", len(plain), "tokens", ">=")
    for bits, (size, percent) in product((4, 3), CASES):
        fmt, width, found = get_format(f"w{bits}a16", group_size=size), 0, defaultdict(list)
        for mlp, master, x in zip(mlps, masters, inputs, strict=True):
            down = master["down_proj"]
            served, width = effective(down.bfloat16(), fmt, percent)
            found["weights"].append(decibels(down.view(1, -1), served.view(1, -1)))
            found["outputs"].append(decibels(x @ down.mT, x @ served.mT))
            mlp.down_proj.weight.copy_(served)
        case = f"{fmt.name}_g{size}_{percent}"
        yield Figure(f"{case}_bits", fmt.bits_per_weight * width / inputs[0].shape[1], "bits", "<=")
        for what, ratios in found.items():
            yield Figure(f"{case}_{what}_db", statistics.fmean(ratios), "dB", ">=")
        yield Figure(f"{case}_gap_down", float((answers.read(model) - plain).abs().mean()), "nats", "<=")
        for mlp, part in product(mlps, PROJECTIONS[:2]):
            weight = mlp.get_submodule(part).weight
            weight.copy_(quantize_weight(weight.bfloat16(), fmt).dequantize())
        yield Figure(f"{case}_gap_mlp", float((answers.read(model) - plain).abs().mean()), "nats", "<=")
        for mlp, master in zip(mlps, masters, strict=True):
            mlp.load_state_dict({f"{part}.weight": weight for part, weight in master.items()})


def main() -> None:
    """Measure, show and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of a dense model")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's test.jsonl")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="results file, e.g. docs/results/neighbours.json")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    command = running_command("python tools/bench/channel_splitting.py", "--record")
    # Where both lie is this machine's affair.
    for place, name in ((options.model, options.model.name), (options.data, "gsm8k/test.jsonl")):
        command = command.replace(str(place), name)
    record_figures(
        options.record,
        (figure._replace(name=f"split_{figure.name}") for figure in measure(options)),
        **facts("cpu"),
        command=command,
    )


if __name__ == "__main__":
    main()
