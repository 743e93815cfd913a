"""Turn an arm's logs into rows of docs/results/full_size.json.

python tools/bench/full_size/record.py WORK/w4a16 --arm w4a16 --skip 1 docs/results/full_size.json

NeMo-RL's own launcher writes no run.json: `--facts` takes that of another arm of the same host, and what only our
workers log has no row.
"""

import argparse
import math
from pathlib import Path

import numpy as np
from phase_memory import Figures, memory_figures, start_seconds

from qarl_nemo.files import read_json
from qarl_nemo.metrics.nemo_rl_logs import read_facts
from qarl_nemo.metrics.results import Figure, append_results, result_rows
from qarl_nemo.metrics.runs import Run, load_run

PHASES = ("rollout", "reward", "logprob_prep", "prev_logprobs", "training_prep", "update", "refit")
COMPUTED = ("rollout", "prev_logprobs", "update")
GOALS = {
    "full_step_s_w4a16_a": 30.0,
    "full_refit_s": 1.0,
    "full_other_share": 0.12,
    "full_update_tokens_s_gpu": 8000.0,
    "full_logprob_tokens_s_gpu": 20000.0,
    "full_memory_error": 0.05,
    "full_start_s": 150.0,
    "full_step_over_nemo_rl": 0.40,
    "full_step_over_nemo_rl_best": 0.67,
    "full_step_over_bf16": 0.67,
}
MODEL = Path(__file__).parents[3] / "examples/models/qwen3-30b-a3b/config.json"


def figures(run: Run, steps: list[int], *, tokens: float, gpus: int) -> Figures:
    """Return an arm's figures: name without the arm -> value, unit, direction.

    Args:
        run: its logs.
        steps: which count; the first compiles, and a profiled one is slow.
        tokens: prompt and answer tokens of a step.
        gpus: how many GPUs it ran on.
    """
    chosen = np.isin(run.steps, steps)

    def median(key: str) -> float:
        return float(np.median(run.column(key)[chosen]))

    step = median("timing/step_s")
    phases = {name: median(f"timing/{name}_s") for name in PHASES}
    other = step - sum(phases[name] for name in COMPUTED)
    found = {
        "full_step_s": (step, "s", "<="),
        "full_tokens_s_gpu": (tokens / gpus / step, "tokens/s", ">="),
        "full_update_tokens_s_gpu": (tokens / gpus / phases["update"], "tokens/s", ">="),
        "full_logprob_tokens_s_gpu": (tokens / gpus / phases["prev_logprobs"], "tokens/s", ">="),
        "full_other_share": (other / step, "", "<="),
        "full_refit_s": (median("refit/total_s"), "s", "<="),
        "full_gap": (median("mismatch/abs_gap_mean"), "nats", "<="),
        **{f"full_phase_s_{name}": (value, "s", "<=") for name, value in phases.items()},
    }
    return {name: figure for name, figure in found.items() if math.isfinite(figure[0])}


def ratios(run: Run, others: list[str], skip: list[int]) -> Figures:
    """Return an arm's step time over that of other arms of the same host.

    Args:
        run: the arm's logs.
        others: `NAME=FOLDER` each.
        skip: steps that do not count.
    """

    def step_seconds(read: Run) -> float:
        return float(np.median(read.column("timing/step_s")[~np.isin(read.steps, skip)]))

    named = dict(other.split("=", 1) for other in others)
    seconds = {name: step_seconds(load_run(Path(folder) / "logs")) for name, folder in named.items()}
    return {f"full_step_over_{name}": (step_seconds(run) / other, "", "<=") for name, other in seconds.items()}


def main() -> None:
    """Record what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the arm, with its logs")
    parser.add_argument("output", type=Path, help="file of docs/results")
    parser.add_argument("--arm", required=True)
    parser.add_argument("--workload", default="a")
    parser.add_argument(
        "--skip", type=lambda text: [int(step) for step in text.split(",")], default=[1], metavar="STEP,..."
    )
    parser.add_argument("--prompt-tokens", type=int, default=243)
    parser.add_argument("--responses", type=int, default=128)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--config", type=Path, default=MODEL, help="the model's config.json that run.py was given")
    parser.add_argument("--facts", type=Path, help="run.json of another arm, where this one has none")
    parser.add_argument(
        "--over", action="append", default=[], metavar="ARM=FOLDER", help="an arm to compare with; repeat"
    )
    parser.add_argument("--options", default="", help="what else run.py was given")
    arguments = parser.parse_args()
    run = load_run(arguments.folder / "logs")
    facts = read_json(arguments.facts, "facts") if arguments.facts else read_facts(arguments.folder / "logs")
    steps = [int(step) for step in run.steps if step not in arguments.skip]
    answers = float(np.median(run.column("response_length_tokens/mean")[np.isin(run.steps, steps)]))
    tokens = arguments.responses * (arguments.prompt_tokens + answers)
    found = []
    measured = figures(run, steps, tokens=tokens, gpus=arguments.gpus)
    measured |= memory_figures(arguments.folder, run, steps, arguments.config)
    measured["full_start_s"] = (start_seconds(arguments.folder, run), "s", "<=")
    measured |= ratios(run, arguments.over, arguments.skip)
    for name, (value, unit, op) in measured.items():
        arm = f"{name}_{arguments.arm}_{arguments.workload}"
        # Goals are those of the whole model.
        goal = GOALS.get(arm, GOALS.get(name)) if arguments.workload in ("a", "b") else None
        found.append(Figure(arm, value, unit, op, goal))
    command = f"python tools/bench/full_size/run.py WORK --nemo-rl ROOT --arm {arguments.arm} {arguments.options}"
    rows = result_rows(found, hardware=facts["hardware"], versions=facts["versions"], command=command.strip())
    append_results(arguments.output, rows)
    print(f"{len(rows)} rows of steps {steps} in {arguments.output}")


if __name__ == "__main__":
    main()
