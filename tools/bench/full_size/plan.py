"""Compute steps that nobody has run from what was measured of their parts, and how wrong that is for those that ran.

python tools/bench/full_size/plan.py
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from step_time import Rates, Workload, phases

from qarl_nemo.memory import GIB, Learner, ModelSize, Parallelism, rank_memory
from qarl_nemo.metrics.results import Figure, read_results, record_figures

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
MODEL = ROOT / "examples" / "models" / "qwen3-30b-a3b"
_A = Workload(4, 4, 128, 243, 2048, 2048, 2, 18432, 36864)
_A24 = replace(_A, gpus=2, ep=2, responses=64)
ARMS = ("w4a16", "bf16")
# Layers on one GPU have been timed with micro-batches of one size only.
_FEWEST_MEASURED_EP = 2
# Those that were measured: layers, load and arms.
MEASURED = {
    "a": (48, _A, ARMS[:1]),
    # Spread evenly to its mean of 2979; in truth a quarter of its answers are the longest.
    "b": (48, replace(_A, responses=256, shortest=1862, longest=4096, updates=1), ARMS),
    "a24": (24, _A24, ARMS),
    "a24_even": (24, _A24, ARMS),
    "a12_2gpu": (12, _A24, ARMS[:1]),
}
# Eight nodes: the load of each GPU as in `a`, and as in NeMo-RL's own published run (mean 3203, longest 4096).
PLANNED = {
    "a_8n8g": replace(_A, gpus=64, ep=8, responses=2048),
    "b_8n8g": Workload(64, 8, 4096, 243, 2310, 4096, 1, 18432, 36864),
}
# On which learner and engines may have half of the GPUs each: layers and load.
PLACED = {
    "a12_2gpu": (12, _A24),
    "a24_4gpu": (24, replace(_A24, gpus=4, ep=4, responses=128)),
    "a_1n8g": (48, replace(_A, gpus=8, ep=8, responses=256)),
    "b_1n8g": (48, replace(PLANNED["b_8n8g"], gpus=8, responses=512)),
}
# On four GPUs, of which one may serve and three learn: layers and load.
SPLIT = {"a": (48, _A), "a24_4gpu": PLACED["a24_4gpu"]}


def planned(model: ModelSize, work: Workload, arm: str) -> Iterator[tuple[str, float, str]]:
    """Yield a workload's figures: name without arm and workload, value, unit."""
    found = phases(model, Rates.read(RESULTS, arm, work.ep), work)
    step = sum(found.values())
    yield from ((f"phase_s_{phase}", seconds, "s") for phase, seconds in found.items())
    yield "step_s", step, "s"
    yield "tokens_s_gpu", work.tokens / work.gpus / step, "tokens/s"
    yield "memory_gib", _memory_gib(model, work, arm), "GiB"


def placed(model: ModelSize, work: Workload, arm: str) -> Iterator[tuple[str, float, str]]:
    """Yield a step's seconds by placement, and a learner rank's peak.

    Learner and engines share the GPUs, or have half of them each, in turns or both at once: then a step is as long as
    the slower half, and a refit.
    """
    half = replace(work, gpus=work.gpus // 2, ep=min(work.ep, work.gpus // 2))
    shared, apart = (
        phases(model, Rates.read(RESULTS, arm, max(one.ep, _FEWEST_MEASURED_EP)), one) for one in (work, half)
    )
    slower = max(apart["rollout"], apart["prev_logprobs"] + apart["update"])
    yield "s_colocated", sum(shared.values()), "s"
    yield "s_separate", sum(apart.values()), "s"
    yield "s_asynchronous", slower + apart["refit"], "s"
    yield "memory_gib_colocated", _memory_gib(model, work, arm), "GiB"
    yield "memory_gib_separate", _memory_gib(model, half, arm), "GiB"


def split(model: ModelSize, work: Workload, arm: str) -> Iterator[tuple[str, float, str]]:
    """Yield a step's seconds with one GPU for the engine and the others for the learner, and a learner rank's peak.

    128 experts do not divide by three, so the learner's GPUs are stages of a pipeline, as in the harness. All take as
    long as the last one, which has the vocabulary as well, and wait for one micro-batch of each other stage. Layers
    cost what they do at EP2, the fewest ranks that were measured with two sizes; on one rank nothing is exchanged.
    """
    stages, rates = work.gpus - 1, Rates.read(RESULTS, arm, _FEWEST_MEASURED_EP)
    one, shared = replace(work, gpus=1, ep=1), phases(model, Rates.read(RESULTS, arm, work.ep), work)
    engine, stage = phases(model, rates, one), phases(replace(model, num_layers=model.num_layers // stages), rates, one)
    budgets = {
        "prev_logprobs": (work.tokens, work.logprob_tokens),
        "update": (work.tokens / work.updates, work.train_tokens),
    }
    learning = 0.0
    for phase, (tokens, budget) in budgets.items():
        micro_batches = math.ceil(tokens / budget)
        learning += stage[phase] * (micro_batches + stages - 1) / micro_batches
    yield "s_colocated", sum(shared.values()), "s"
    yield "s_learning", learning, "s"
    yield "s_separate", engine["rollout"] + learning + engine["refit"] + engine["other"], "s"
    yield "s_asynchronous", max(engine["rollout"], learning) + engine["refit"], "s"
    yield "memory_gib_separate", _memory_gib(model, work, arm, Parallelism(stages, pp=stages)), "GiB"


def _memory_gib(model: ModelSize, work: Workload, arm: str, ranks: Parallelism | None = None) -> float:
    learner = Learner(
        arm, 128, ("experts", "attention"), False, "adam_bf16", 2, work.train_tokens, "full", logprob_chunk=1024
    )
    return rank_memory(model, ranks or work.ranks, learner).peak_bytes / GIB


def errors(name: str, work: Workload, layers: int, arm: str) -> Iterator[tuple[str, float, str]]:
    """Yield how much longer each phase was computed to take than it took; what calibrates the model is left out."""
    rows = {row.name: row.value for row in read_results(RESULTS / "full_size.json")}
    found = phases(replace(ModelSize.read(MODEL), num_layers=layers), Rates.read(RESULTS, arm, work.ep), work)
    measured = {phase: rows[f"full_phase_s_{phase}_{arm}_{name}"] for phase in ("rollout", "prev_logprobs", "update")}
    measured |= {"refit": rows[f"full_refit_s_{arm}_{name}"], "step": rows[f"full_step_s_{arm}_{name}"]}
    for phase, seconds in measured.items():
        computed = sum(found.values()) if phase == "step" else found[phase]
        yield f"plan_s_{phase}_{arm}_{name}", computed, "s"
        yield f"plan_error_{phase}_{arm}_{name}", computed / seconds - 1, ""


def main() -> None:
    """Write what is computed to the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("docs/results/full_plan.json"), help="file to append to")
    arguments = parser.parse_args()
    model = ModelSize.read(MODEL)
    found = [
        figure
        for name, (layers, work, arms) in MEASURED.items()
        for arm in arms
        for figure in errors(name, work, layers, arm)
    ]
    for name, work in PLANNED.items():
        steps = {}
        for arm in ARMS:
            figures = list(planned(model, work, arm))
            found += [(f"plan_{kind}_{arm}_{name}", value, unit) for kind, value, unit in figures]
            steps[arm] = next(value for kind, value, _ in figures if kind == "step_s")
        found += [(f"plan_speedup_{arm}_{name}", steps["bf16"] / seconds, "") for arm, seconds in steps.items()]
    found += [
        (f"plan_placed_{kind}_{arm}_{name}", value, unit)
        for name, (layers, work) in PLACED.items()
        for arm in ARMS
        for kind, value, unit in placed(replace(model, num_layers=layers), work, arm)
    ]
    found += [
        (f"plan_split_{kind}_{arm}_{name}", value, unit)
        for name, (layers, work) in SPLIT.items()
        for arm in ARMS
        for kind, value, unit in split(replace(model, num_layers=layers), work, arm)
    ]
    rows = [Figure(name, value, unit, ">=" if unit == "tokens/s" else "<=") for name, value, unit in found]
    command = "python tools/bench/full_size/plan.py"
    record_figures(arguments.record, rows, hardware="computed for H200s", versions={}, command=command)


if __name__ == "__main__":
    main()
