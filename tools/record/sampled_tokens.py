"""What misalignment does to single tokens: their probability under the engine that sampled them and under the learner.

The tokens are those of a run's last diagnostics, a uniform sample of one step's.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from qarl_nemo.metrics.report.arms import group_by_arm
from qarl_nemo.metrics.report.scatter import scatter_figure
from qarl_nemo.metrics.report.style import FULL_WIDTH_IN, report_style
from qarl_nemo.metrics.results import Figure
from qarl_nemo.metrics.runs import Run

_SURE, _DOUBTED = np.log(0.9), np.log(0.1)
_DPI = 150


def token_figures(run: Run, name: str) -> Iterable[Figure]:
    """Yield the share of tokens that only the engine is sure of, and how far apart both are by the advantage's sign.

    Args:
        run: one that may have diagnostics.
        name: begins the rows' names.

    Yields:
        `doubted_tokens`, of the tokens with p > 0.9 under the engine those with p < 0.1 under the learner; and
        `below_engine_positive` and `_negative`, the mean of engine's minus learner's log-probability.
    """
    arrays = run.diagnostics.arrays if run.diagnostics else {}
    if "token_generation_logprob" not in arrays:
        return
    names = ("generation_logprob", "prev_logprob", "advantage")
    engine, learner, advantage = (arrays[f"token_{kind}"] for kind in names)
    sure = engine > _SURE
    if sure.any():
        yield Figure(f"{name}_doubted_tokens", float((learner[sure] < _DOUBTED).mean()), "fraction", "<=")
    for sign, chosen in (("positive", advantage > 0), ("negative", advantage < 0)):
        if chosen.any():
            below = float((engine - learner)[chosen].mean())
            yield Figure(f"{name}_below_engine_{sign}", below, "nats", "<=")


def write_token_scatter(runs: Sequence[Run], png_path: Path) -> None:
    """Draw the tokens of the runs' diagnostics, engine against learner, one panel an arm.

    Args:
        runs: those of up to four arms.
        png_path: the file; its folder is created.

    Raises:
        SystemExit: no run has diagnostics.
    """
    arms = [arm for arm in group_by_arm(list(runs)) if arm.has_diagnostic("token_generation_logprob")]
    if not arms:
        raise SystemExit(f"{png_path}: no run has diagnostics to draw")
    with report_style():
        figure = scatter_figure(
            arms, FULL_WIDTH_IN, x="generation", y="prev", labels=("p under the engine", "p under the learner")
        )
        png_path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png_path, dpi=_DPI)
