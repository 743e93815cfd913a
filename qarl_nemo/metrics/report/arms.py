"""Arms of a comparison: runs that differ only by seed, their common colour and their curves as mean and range."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qarl_nemo.config import flatten
from qarl_nemo.config.free_keys import FREE_KEYS
from qarl_nemo.metrics.runs import Floats, Run
from qarl_nemo.metrics.summary import smoothing_window

# Okabe-Ito and Tol hues that stay apart under common colour blindness; blue and vermillion are reserved for the sign.
_ALIGNMENT_COLORS = {"none": "#4D4D4D", "rollout_only": "#AA3377", "aligned": "#009E73"}
_OTHER_COLORS = ("#E69F00", "#56B4E9", "#332288", "#999933", "#882255", "#CC6677", "#117733", "#88CCEE")
# In which repetitions of one arm may differ.
_OF_A_RUN = (*FREE_KEYS, "seed", "run.", "device", "grpo.val_")


@dataclass(frozen=True, slots=True)
class Arm:
    """Runs of one arm.

    Attributes:
        name: shown in legends.
        color: hex colour in every figure.
        runs: its runs, one per seed.
        dashed: it is another's variant, which has the same colour.
    """

    name: str
    color: str
    runs: tuple[Run, ...]
    dashed: bool = False

    @property
    def label(self) -> str:
        """The name as matplotlib draws it: without an escape, two dollars make a formula, and `_` hides a legend."""
        text = self.name.replace("$", r"\$")
        return f" {text}" if text.startswith("_") else text

    def curve(self, key: str, *, smooth: bool = True) -> tuple[Floats, Floats, Floats, Floats]:
        """Average a metric over the arm's runs, step by step.

        Args:
            key: key of metrics.jsonl.
            smooth: take each run's moving mean first.

        Returns:
            steps, mean, lowest and highest [S'], over the steps at which some run has a value.
        """
        values: dict[float, list[float]] = {}
        for run in self.runs:
            steps, column = finite_points(run, key)
            for step, value in zip(steps, moving_mean(column) if smooth else column, strict=True):
                values.setdefault(step, []).append(value)
        steps = np.array(sorted(values))
        rows = [values[step] for step in steps]
        statistics = [np.array([function(row) for row in rows]) for function in (np.mean, np.min, np.max)]
        return steps, statistics[0], statistics[1], statistics[2]

    def has_diagnostic(self, name: str) -> bool:
        """Tell whether there are runs with diagnostics and all have this array; NeMo-RL's dumps lack some."""
        measured = [run.diagnostics.arrays for run in self.runs if run.diagnostics is not None]
        return bool(measured) and all(name in arrays for arrays in measured)

    def each_diagnostic(self, *names: str) -> list[Floats]:
        """Stack arrays of one length of the newest diagnostics, one [len(names), P] for each run that has them."""
        measured = [run.diagnostics.arrays for run in self.runs if run.diagnostics is not None]
        return [np.stack([arrays[name] for name in names]) for arrays in measured]

    def diagnostic(self, name: str) -> Floats:
        """Pool one array of the newest diagnostics, such as seq_prox_ratio, over the arm's runs."""
        parts = [run.diagnostics.arrays[name] for run in self.runs if run.diagnostics is not None]
        return np.concatenate([*parts, np.empty(0)]).astype(float)


def group_by_arm(runs: list[Run], variant: str | None = None) -> list[Arm]:
    """Group runs by arm, in order of appearance, and give each arm its colour.

    Two runs of one arm with the same seed are not repetitions: something else differs, so each becomes its own arm.
    Nor are runs without `run.arm` whose configs differ in more than `_OF_A_RUN`, a learning rate say.

    Args:
        runs: what is compared.
        variant: arms called `ARM, variant` are dashed, in the colour of ARM and after it; None = every arm has its own.
    """
    counts = Counter((run.arm, run.seed) for run in runs)
    clashing = {arm for (arm, _), count in counts.items() if count > 1} | _no_repetitions(runs)
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.name if run.arm in clashing else run.arm, []).append(run)
    bases = {name: name.removesuffix(f", {variant}") if variant else name for name in grouped}
    colors: dict[str, str] = {}
    for name, members in grouped.items():
        if bases[name] not in colors:
            alignment = members[0].setting("qarl.alignment")
            colors[bases[name]] = _choose_color(alignment, set(colors.values()))
    order = list(colors)
    arms = [Arm(name, colors[bases[name]], tuple(members), bases[name] != name) for name, members in grouped.items()]
    return sorted(arms, key=lambda arm: (order.index(bases[arm.name]), arm.dashed))


def mixed_settings(runs: Sequence[Run]) -> list[str]:
    """List the settings in which these runs differ, and repetitions of one arm may not."""
    flat = [flatten(run.config) for run in runs if run.config]
    keys = sorted({key for settings in flat for key in settings if not key.startswith(_OF_A_RUN)})
    return [key for key in keys if len({str(settings.get(key)) for settings in flat}) > 1]


def _no_repetitions(runs: list[Run]) -> set[str]:
    """Return arms that nobody named, of runs whose settings differ; their mean would be nothing's."""
    unnamed: dict[str, list[Run]] = {}
    for run in runs:
        if not run.setting("run.arm"):
            unnamed.setdefault(run.arm, []).append(run)
    return {arm for arm, members in unnamed.items() if mixed_settings(members)}


def finite_points(run: Run, key: str) -> tuple[Floats, Floats]:
    """Return the steps at which a metric has a finite value, and those values."""
    column = run.column(key)
    finite = np.isfinite(column)
    return run.steps[finite], column[finite]


def moving_mean(values: Floats) -> Floats:
    """Average each of these finite values with those before it, at most `smoothing_window(len(values))` of them."""
    window = smoothing_window(len(values))
    # Each by itself: from a running sum a huge value takes the digits of all that follow.
    return np.array([values[max(0, end - window) : end].mean() for end in range(1, len(values) + 1)])


def _choose_color(alignment: str | None, used: set[str]) -> str:
    preferred = [_ALIGNMENT_COLORS[alignment]] if alignment in _ALIGNMENT_COLORS else []
    free = [color for color in (*preferred, *_OTHER_COLORS) if color not in used]
    return free[0] if free else _OTHER_COLORS[len(used) % len(_OTHER_COLORS)]
