r"""Compare NVFP4 (W4A16) here and in ModelOpt, which NeMo-RL's "QARL" uses, on one model: bytes and log-probabilities.

Each learner's forward is held against an engine that multiplies its published tensors as vLLM's Marlin does, over
answers that the engine of this project samples. Engine and learners share everything but the linear layers, whose sums
the engine adds in another order: two BF16 models show what that alone does. `separate_scales` must come out bad: q, k
and v, gate and up keep global scales of their own, of which an engine takes the largest.

    pip install nvidia-modelopt==0.47.0
    PYTHONPATH=tests:tools/bench python tools/bench/nvfp4_modelopt/compare_modelopt.py --model model \
        --data gsm8k/test.jsonl --recipe NeMo-RL/examples/modelopt/quant_configs/nvfp4_a16.yaml
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import modelopt_model
import torch
from answers import Answers
from code_differences import code_figures, count_differences
from engine_arithmetic import Served, serve
from torch import Tensor
from transformers import PreTrainedModel

from qarl_kernels import get_format, largest, nvfp4
from qarl_nemo.layers.install import InstallReport, install
from qarl_nemo.metrics.machine import facts
from qarl_nemo.metrics.results import Figure, record_figures
from qarl_nemo.names import fused_groups
from qarl_nemo.train.config import PolicyConfig
from qarl_nemo.train.model import load_model

DEVICE = "cpu" if modelopt_model.INTERPRETED else "cuda"
TARGETS = ("attention", "mlp")


def load(options: argparse.Namespace) -> PreTrainedModel:
    """Return the checkpoint in BF16, its norms and products as in the embedded engine's learner."""
    policy = PolicyConfig(model_path=options.model, precision="bfloat16")
    model, _ = load_model(policy, modelopt_model.DEVICE, options.seed)
    return model.eval().requires_grad_(False)


def aligned(model: PreTrainedModel, *, fused: bool = True) -> tuple[InstallReport, dict[str, Served]]:
    """Align a model's linears.

    Args:
        model: changed in place.
        fused: False gives every weight a global scale of its own, which no engine serves.

    Returns:
        The report, and what an engine multiplies by of its published tensors, by the linears' names.
    """
    report = install(model, TARGETS, get_format("nvfp4"))
    for weight in () if fused else report.weights.values():
        weight.fused = ()
    tensors = {weight.name: weight.quantized().tensors for weight in report.weights.values()}
    factors = {name: nvfp4.tensor_scale(one["weight_global_scale"]).view(1) for name, one in tensors.items()}
    served = {
        name: Served(nvfp4.unscaled(one["weight_packed"], one["weight_scale"]), factors[name])
        for name, one in tensors.items()
    }
    return report, served if fused else _largest_factors(served)


def _largest_factors(served: Mapping[str, Served]) -> dict[str, Served]:
    found = dict(served)
    for group in fused_groups(f"{name}.weight" for name in served):
        names = [name.removesuffix(".weight") for name in group]
        factor = torch.stack([served[name].factor for name in names]).amax(0)
        found |= {name: served[name]._replace(factor=factor) for name in names}
    return found


def weight_figures(linears: Mapping[str, Any], exported: Mapping[str, modelopt_model.Exported]) -> list[Figure]:
    """Compare the weights that ModelOpt's learner multiplies by with what its exporter wrote.

    Returns:
        The share that is the exported weight rounded to BF16, and the share that this rounding changed.
    """
    counts: Counter[str] = Counter()
    for name, linear in linears.items():
        exact = modelopt_model.fake_weight(exported[name])
        counts["weights"] += exact.numel()
        counts["learner_is_export"] += int((linear.weight == exact.to(torch.bfloat16)).sum())
        counts["rounded_weights"] += int((linear.weight != exact).sum())
    total = counts.pop("weights")
    return [Figure(name, count / total, "fraction", ">=") for name, count in counts.items()]


def compare(options: argparse.Namespace) -> Iterator[Figure]:
    """Compare bytes, then log-probabilities; figures come as they are measured, names without their prefix."""
    torch.manual_seed(options.seed)
    learner, theirs = load(options), load(options)
    report, ours = aligned(learner)
    linears = modelopt_model.quantize(theirs, options.recipe)
    exported = {name: modelopt_model.export(linear) for name, linear in linears.items()}
    counts: Counter[str] = Counter()
    for weight in report.weights.values():
        master, amax = weight.masters[0], weight.amax(weight.format)
        amax = largest(master) if amax is None else amax
        counts += count_differences(master, amax, weight.quantized(), exported[weight.name])
    yield from code_figures(counts)
    modelopt_model.fold(theirs)
    yield from weight_figures(linears, exported)

    answers, engine = Answers(options.model, options.data, options.num_prompts), serve(load(options), ours)
    answers.sample(engine, options.max_new_tokens)
    yield Figure("tokens", sum(map(len, answers.responses)), "tokens", ">=")
    served, plain = answers.read(engine), load(options)
    yield from gap_figures("aligned", answers.read(learner), served)
    logprobs = answers.read(plain)
    yield from gap_figures("bf16", logprobs, served)
    weights = {name: Served(plain.get_submodule(name).get_parameter("weight")) for name in ours}
    yield from gap_figures("floor", logprobs, answers.read(serve(plain, weights)))
    yield from modelopt_gaps(options, answers, theirs, exported)
    _, separate = aligned(learner := load(options), fused=False)
    yield from gap_figures("separate_scales", answers.read(learner), answers.read(serve(load(options), separate)))


def modelopt_gaps(
    options: argparse.Namespace,
    answers: Answers,
    learner: PreTrainedModel,
    exported: Mapping[str, modelopt_model.Exported],
) -> Iterator[Figure]:
    """Hold ModelOpt's learner, and the same one without the rounding of its weights, against an engine.

    Args:
        options: the command line's options.
        answers: what they read.
        learner: the one with folded weights.
        exported: the tensors that the engine serves.
    """
    weights = {name: Served(nvfp4.unscaled(one.packed, one.scale), one.global_scale) for name, one in exported.items()}
    served = answers.read(serve(load(options), weights))
    yield from gap_figures("fake_quantized", answers.read(learner), served)
    weights = {name: Served(modelopt_model.fake_weight(one)) for name, one in exported.items()}
    yield from gap_figures("unrounded", answers.read(serve(load(options), weights, num_parts=1)), served)


def gap_figures(name: str, logprobs: Tensor, served: Tensor) -> Iterator[Figure]:
    """Yield the mean |difference| of a learner's and an engine's log-probabilities, and its error over the tokens."""
    gaps = (logprobs.double() - served.double()).abs()
    yield Figure(f"gap_{name}", float(gaps.mean()), "nats", "<=")
    yield Figure(f"gap_error_{name}", float(gaps.std() / len(gaps) ** 0.5), "nats", "<=")


def main() -> None:
    """Compare, show and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of a dense model in BF16")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's test.jsonl")
    parser.add_argument("--recipe", type=Path, required=True, help="ModelOpt's YAML, NeMo-RL's nvfp4_a16.yaml")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="results file, e.g. docs/results/nvfp4_modelopt.json")
    options = parser.parse_args()
    record_figures(
        options.record,
        (figure._replace(name=f"nvfp4_modelopt_{figure.name}") for figure in compare(options)),
        **facts(modelopt_model.DEVICE.type, packages=["nvidia-modelopt"]),
        command=f"python tools/bench/nvfp4_modelopt/compare_modelopt.py --model {options.model.name} "
        f"--data gsm8k/{options.data.name} --recipe {options.recipe.name}",
    )


if __name__ == "__main__":
    main()
