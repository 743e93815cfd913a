"""Curves that tell positive from negative advantages: shares in the band, error-token rates."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qarl_nemo.metrics.report.arms import Arm
from qarl_nemo.metrics.report.curves import draw_curves, finish_curves, has_values, thin_out
from qarl_nemo.metrics.report.style import SIGN_COLORS, SIGN_LABELS, new_figure

_PLACE_STYLES = {"in_band": "-", "above_band": "--", "below_band": ":"}
_PLACE_LABELS = {"in_band": "in the band", "above_band": "above it", "below_band": "below it"}


def band_share_figure(arms: Sequence[Arm], width_in: float) -> Figure | None:
    """Draw the share of each sign's responses in, above and below its band; only `in` when arms are compared."""
    places = ["in_band", "above_band", "below_band"] if len(arms) == 1 else ["in_band"]
    if not any(has_values(arms, f"band_share/in_band_{sign}") for sign in SIGN_COLORS):
        return None
    figure = new_figure(width_in, 3.3)
    for axes, sign in zip(figure.subplots(1, 2, sharey=True), SIGN_COLORS, strict=True):
        for place in places:
            key = f"band_share/{place}_{sign}"
            if len(arms) > 1:
                draw_curves(axes, arms, key)
            elif has_values(arms, key):
                steps, mean, _, _ = thin_out(*arms[0].curve(key))
                style, label = _PLACE_STYLES[place], _PLACE_LABELS[place]
                axes.plot(steps, mean, style, color=SIGN_COLORS[sign], label=label)
        finish_curves(axes, f"share of those with {SIGN_LABELS[sign]}", percent=True, legend=len(arms) == 1)
        axes.set_ylim(-0.03, 1.03)
    return figure


def error_rate_figure(arms: Sequence[Arm], width_in: float) -> Figure | None:
    """Draw error tokens per response token by sign, one arm's on one axis, several arms' on an axis per sign."""
    keys = {sign: f"error_tokens/rate_{sign}" for sign in SIGN_COLORS}
    if not any(has_values(arms, key) for key in keys.values()):
        return None
    figure = new_figure(width_in, 3.3)
    if len(arms) == 1:
        axes = figure.subplots()
        draw_signs(axes, arms[0], keys)
        finish_curves(axes, "error tokens per token", percent=True, legend=True)
        return figure
    for axes, (sign, key) in zip(figure.subplots(1, 2, sharey=True), keys.items(), strict=True):
        draw_curves(axes, arms, key)
        finish_curves(axes, f"error tokens per token, {SIGN_LABELS[sign]}", percent=True)
    return figure


def draw_signs(axes: Axes, arm: Arm, keys: Mapping[str, str]) -> None:
    """Draw an arm's metric of each advantage sign, given its key, with its range over seeds."""
    for sign, key in keys.items():
        steps, mean, low, high = thin_out(*arm.curve(key))
        axes.plot(steps, mean, color=SIGN_COLORS[sign], label=SIGN_LABELS[sign])
        axes.fill_between(steps, low, high, color=SIGN_COLORS[sign], alpha=0.16, linewidth=0)
