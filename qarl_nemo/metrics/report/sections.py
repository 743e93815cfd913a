"""The report's sections, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from qarl_nemo.metrics.report import curves, sign_curves, timings
from qarl_nemo.metrics.report.arms import Arm
from qarl_nemo.metrics.report.distributions import histogram_figure, mismatch_weights, prox_ratios
from qarl_nemo.metrics.report.panels import Panel, curve_panel, diagnostics_panel, figure_panel, in_rows, width_in
from qarl_nemo.metrics.report.positions import error_position_figure
from qarl_nemo.metrics.report.scatter import scatter_figure
from qarl_nemo.metrics.report.style import FULL_WIDTH_IN


@dataclass(frozen=True, slots=True)
class Section:
    """A titled group of panels; `anchor` is its id on the page."""

    anchor: str
    title: str
    intro: str
    panels: tuple[Panel, ...]


def build_sections(arms: Sequence[Arm]) -> list[Section]:
    """Draw every figure of the report."""
    noise = [_noise(arms)] if curves.has_values(arms, "noise/sigma") else []
    return [_learning(arms), _mismatch(arms), *noise, _bands(arms), _errors(arms), _time(arms), _optimizer(arms)]


def _learning(arms: Sequence[Arm]) -> Section:
    panels = [
        *_rewards(arms),
        curve_panel(arms, "KL of the updates", "loss/kl_k3", "KL prev to curr (nats)", "k3 per token.", log=True),
        *_entropy(arms),
        curve_panel(
            arms, "Response length", "response_length_tokens/mean", "response length (tokens)", "Mean over rollouts."
        ),
        curve_panel(
            arms,
            "Truncated responses",
            "truncated_fraction",
            "share of rollouts",
            "Rollouts that hit the length limit.",
            percent=True,
        ),
    ]
    intro = "Bold: moving mean; faint: every step. Several seeds of an arm: their mean, with the range shaded."
    return Section("learning", "Learning", intro, tuple(panels))


def _rewards(arms: Sequence[Arm]) -> list[Panel]:
    """Show training reward with the points of the first validation set, and the other sets apart."""
    sets = {name: column for arm in arms for run in arm.runs for name, column in run.score_columns().items()}
    firsts = dict.fromkeys(next(iter(run.score_columns())) for arm in arms for run in arm.runs)
    of_first = " or ".join(name for name in firsts if name)
    caption = f"Points: validation{of_first and ' on '}{of_first}."
    figure = curves.reward_figure(arms, FULL_WIDTH_IN, 4.2)
    missing = "Not recorded: reward/mean in metrics.jsonl."
    others = [
        curve_panel(arms, f"Validation on {name}", column, "mean reward", "Over its problems.", smooth=False)
        for name, column in sets.items()
        if name not in firsts
    ]
    return [figure_panel("Reward", caption, figure, missing, wide=True), *others]


def _entropy(arms: Sequence[Arm]) -> list[Panel]:
    """Show the exact entropy and, apart from it, NeMo-RL's estimate from the sampled tokens, where there is one."""
    exact = curves.curve_figure(arms, "loss/entropy", "entropy per token (nats)")
    estimate = curves.curve_figure(arms, "loss/approx_entropy", "estimate per token (nats)")
    panels = []
    if exact is not None or estimate is None:
        missing = "Not recorded: loss/entropy in metrics.jsonl."
        caption = "Of the learner's distribution: exact, over the whole vocabulary."
        panels.append(figure_panel("Entropy", caption, exact, missing))
    if estimate is not None:
        caption = "NeMo-RL's approx_entropy: -log p of the sampled tokens, weighed by curr over generation; not exact."
        panels.append(figure_panel("Approximate entropy", caption, estimate, ""))
    return panels


def _mismatch(arms: Sequence[Arm]) -> Section:
    measured = [arm for arm in arms if arm.has_diagnostic("seq_mismatch_weight")]
    labels = ("p under the rollout engine", "p under the learner (prev)")
    panels = (
        curve_panel(
            arms,
            "Logprob gap",
            "mismatch/abs_gap_mean",
            "mean |prev - generation| (nats)",
            "Per response token, between learner and rollout engine.",
            log=True,
        ),
        curve_panel(arms, "KL sampler to learner", "mismatch/kl_k3", "KL (nats)", "k3 per token.", log=True),
        diagnostics_panel(
            measured,
            "Mismatch weight",
            "exp(prev - generation); shaded: used without a cap. The outermost bins hold what lies beyond.",
            in_rows(partial(histogram_figure, quantity="mismatch weight", line_name="cap"), mismatch_weights(measured)),
        ),
        diagnostics_panel(
            measured,
            "Rollout engine against learner",
            "One point per sampled token; on the dashed line both agree.",
            in_rows(partial(scatter_figure, x="generation", y="prev", labels=labels), measured),
        ),
    )
    intro = "How far the learner's view of a response is from the rollout engine's that sampled it, before any update."
    return Section("mismatch", "Training-inference mismatch", intro, panels)


def _noise(arms: Sequence[Arm]) -> Section:
    panels = (
        curve_panel(arms, "Noise", "noise/sigma", "standard deviation", "As scheduled.", log=True, smooth=False),
        curve_panel(
            arms,
            "Noise that was served",
            "noise/rms",
            "root mean square",
            "What the norms' dtype keeps of it: BF16 rounds most noise below 0.001 away where weights are near 1.",
            log=True,
            smooth=False,
        ),
    )
    intro = "Noise on the norms of the rollout engine, drawn anew for each step and annealed stage by stage."
    return Section("noise", "Exploration by noise", intro, panels)


def _bands(arms: Sequence[Arm]) -> Section:
    measured = [arm for arm in arms if arm.has_diagnostic("seq_prox_ratio")]
    panels = (
        diagnostics_panel(
            measured,
            "Prox ratio",
            "exp(curr - prev); shaded: the objective has a gradient. The outermost bins hold what lies beyond.",
            in_rows(partial(histogram_figure, quantity="prox ratio", line_name="band"), prox_ratios(measured)),
        ),
        diagnostics_panel(
            measured,
            "Old against new token probability",
            "Error tokens sit at the lower left, where small changes are large ratios.",
            in_rows(partial(scatter_figure, x="prev", y="curr", labels=("old p (prev)", "new p (curr)")), measured),
        ),
        figure_panel(
            "Share in the band",
            "Over the responses (token-level objectives: tokens) of one advantage sign.",
            sign_curves.band_share_figure(arms, FULL_WIDTH_IN),
            "Not recorded: loss/in_band_fraction_positive, loss/in_band_fraction_negative in metrics.jsonl.",
            wide=True,
        ),
    )
    intro = "What the objective keeps: the ratio of the learner now to the learner at rollout time, and its clip lines."
    return Section("bands", "Ratios and bands", intro, panels)


def _errors(arms: Sequence[Arm]) -> Section:
    figure = sign_curves.error_rate_figure(arms, FULL_WIDTH_IN)
    panel = figure_panel(
        "Error-token rate",
        "Share of response tokens, by advantage sign.",
        figure,
        "Not recorded: error_tokens/rate_positive, error_tokens/rate_negative in metrics.jsonl.",
        wide=True,
    )
    intro = "Error tokens are improbable under both policies (garbled), or part of a long repetition of one n-gram."
    counted = [arm for arm in arms if arm.has_diagnostic("position_tokens")]
    by_position = diagnostics_panel(
        counted,
        "Error tokens by position",
        "Share of the tokens at a place in the response.",
        [error_position_figure(counted, width_in(counted))] if counted else [],
    )
    return Section("errors", "Error tokens", intro, (panel, by_position))


def _time(arms: Sequence[Arm]) -> Section:
    panels = (
        figure_panel("Phases", "Time per step by phase.", timings.phase_figure(arms), "Not recorded: timing/*_s."),
        figure_panel(
            "Tokens per second",
            "Rollout and update.",
            timings.throughput_figure(arms),
            "Not recorded: throughput/rollout_tokens_s, throughput/update_tokens_s in metrics.jsonl.",
        ),
    )
    return Section("time", "Time", "Seconds are wall time.", panels)


def _optimizer(arms: Sequence[Arm]) -> Section:
    panels = (
        curve_panel(arms, "Gradient norm", "optim/grad_norm", "gradient norm", "Before clipping.", log=True),
        curve_panel(arms, "Learning rate", "optim/lr", "learning rate", "As scheduled.", smooth=False),
        *_flips(arms),
    )
    intro = (
        "Updates with a non-finite loss or gradient are skipped and counted, and those that Megatron skips by itself."
    )
    return Section("optimizer", "Optimizer", intro, panels)


def _flips(arms: Sequence[Arm]) -> list[Panel]:
    """Show how much of the served policy each step changed, if some run has codes."""
    figure = curves.curve_figure(arms, "refit/flipped_codes", "share of codes", log=True)
    caption = "Published weights that got another code in a step; masters may move without."
    return [] if figure is None else [figure_panel("Flipped codes", caption, figure, "")]
