"""Plots: each function draws one of the report's data classes on matplotlib axes, in the colors of a theme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from hdtool.builders.evaluation.pictures import OPEN_FRAME, png_of
from hdtool.builders.evaluation.report.source_shares import SourceShares
from hdtool.builders.evaluation.report.tables import Durations, Speeds
from hdtool.builders.evaluation.scores import PLAIN_METHOD
from hdtool.runtime.settings.draft_sources import registered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_INCHES = 5.4
"""Width of a plot in inches, chosen so that text stays readable on a phone."""
PLOT_DPI = 200

METHOD_COLOURS = {
    "generate": ("#aaaacc", "#887788"),
    "generate-pld": ("#5a5a78", "#77aaff"),
    "generate-assisted": ("#776611", "#aaaa99"),
    "llama.cpp": ("#883300", "#ee3311"),
    "llama.cpp-pld": ("#dd9999", "#ffaa99"),
    "llama.cpp-file": ("#b56a27", "#ca0924"),
    "ar": ("#999988", "#80803a"),
    "pld": ("#33bbee", "#22ddff"),
    "lade": ("#2277ff", "#2266dd"),
    "sam": ("#116677", "#118899"),
    "suffix": ("#550022", "#ff1188"),
    "rest": ("#bb3377", "#ffaaff"),
    "hd-paper": ("#ee9922", "#aa9911"),
    "logitspec": ("#00bbaa", "#11eebb"),
    "medusa": ("#ee77ee", "#ccbbff"),
    "amphista": ("#6611ee", "#aa66ff"),
    "hd": ("#ff4400", "#ee8800"),
    "tr": ("#aaaa11", "#ffee99"),
    "racer": ("#119933", "#88ff11"),
    "hd+logitspec": ("#225533", "#009966"),
    "hd+amphista": ("#000055", "#7722aa"),
    "hydra": ("#99cc88", "#aa4455"),
    "hd+hydra": ("#ddbb77", "#aaff88"),
    "mtp": ("#11dd00", "#4411ff"),
    "hd+mtp": ("#ff00ff", "#ffff22"),
    "drafter": ("#dd1144", "#ff00dd"),
    "hd+drafter": ("#8800aa", "#339900"),
}
"""Colors on light and on dark pages; any two differ by at least 20 in CIEDE2000, to tell adjacent bars apart."""


@dataclass(frozen=True)
class Theme:
    """Colors of a page."""

    name: str
    background: str
    foreground: str
    muted: str

    @property
    def sources(self) -> dict[str, str]:
        """Colors of all registered sources by name; the color of bonus tokens comes last."""
        known = sorted(registered().items(), key=lambda entry: not entry[0])
        return {source.name: source.light if self.name == "light" else source.dark for _, source in known}

    def source(self, name: str) -> str:
        return self.sources.get(name, self.foreground)

    def method(self, name: str) -> str:
        light, dark = METHOD_COLOURS.get(name, (self.foreground, self.foreground))
        return light if self.name == "light" else dark


LIGHT_THEME = Theme("light", background="#ffffff", foreground="#1d2229", muted="#d5d9df")
DARK_THEME = Theme("dark", background="#14181d", foreground="#e4e8ee", muted="#3a424d")
THEMES = (LIGHT_THEME, DARK_THEME)

Draw = Callable[["Axes", Theme], None]


def render_png(draw: Draw, theme: Theme, height: float) -> bytes:
    """Call ``draw`` with the axes of a new figure that is ``height`` inches high; return the figure as a PNG."""
    inches, settings = (PLOT_INCHES, height), _plot_settings(theme)
    return png_of(lambda figure: draw(figure.add_subplot(), theme), inches, PLOT_DPI, settings)


def _plot_settings(theme: Theme) -> dict[Any, Any]:
    """Return matplotlib's settings for a figure in the colors of ``theme``."""
    background, foreground = theme.background, theme.foreground
    return {
        **OPEN_FRAME,
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), background),
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), foreground),
        "grid.color": theme.muted,
        "axes.grid": True,
        "axes.axisbelow": True,
        "font.size": 10,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "lines.linewidth": 2,
        "lines.markersize": 5,
    }


METHOD_MARKERS = "osD^vPX<>"


def speedups(data: Speeds, axes: Axes, theme: Theme) -> None:
    count = len(data.methods)
    positions = np.arange(len(data.labels))
    height = 0.84 / count
    for number, (method, factors) in enumerate(data.methods.items()):
        at = positions - 0.42 + height * (number + 0.5)
        bars = axes.barh(at, factors, height * 0.92, color=theme.method(method), label=method)
        axes.bar_label(bars, fmt="{:.2f}", fontsize=7, color=theme.foreground, padding=2)
    axes.axvline(1, color=theme.foreground, linewidth=1)
    axes.set_yticks(positions, data.labels)
    axes.set_ylim(len(positions) - 0.45, -0.55)
    axes.grid(False, axis="y")
    baseline = f"plain decoding ({PLAIN_METHOD})" if data.baseline == PLAIN_METHOD else data.baseline
    axes.set_xlabel(f"times the tokens per second of {baseline}")
    axes.margins(x=0.08)
    _legend(axes, min(4, count))


def durations(data: Durations, axes: Axes, theme: Theme) -> None:
    for method, marker in zip(data.answers, cycle(METHOD_MARKERS), strict=False):
        tokens, seconds, _ = zip(*data.answers[method], strict=True)
        _, each = data.rates(method)
        label = method if each is None else f"{method}, {1e3 * each:.2f} ms a token"
        axes.plot(
            tokens, seconds, marker, color=theme.method(method), alpha=0.7, markersize=5, markeredgewidth=0, label=label
        )
    axes.set(xlabel="tokens of the answer", ylabel="seconds", xlim=(0, None), ylim=(0, None))
    _legend(axes, 2)


def temperatures(data: Speeds, axes: Axes, theme: Theme) -> None:
    for (method, speeds), marker in zip(data.methods.items(), cycle(METHOD_MARKERS), strict=False):
        axes.plot(data.labels, speeds, marker + "-", color=theme.method(method), label=method)
    axes.set_xticks(data.labels)
    axes.set(xlabel="temperature", ylabel="tokens per second", ylim=(0, None))
    _legend(axes, min(4, len(data.methods)))


def shares(data: SourceShares, axes: Axes, theme: Theme) -> None:
    """Draw three bars per source, in percent: steps with a draft, steps with an accepted token, and accepted tokens.

    The percentages refer to all steps, to the steps with a draft, and to the drafted tokens.
    """
    names = list(data.sources)
    positions = np.arange(len(names))
    colours = [theme.source(name) for name in names]
    drafts = [100 * share.hits / data.steps if data.steps else 0 for share in data.sources.values()]
    wins = [100 * share.win_rate for share in data.sources.values()]
    accepted = [100 * share.acceptance_rate for share in data.sources.values()]
    looks: Sequence[tuple[list[float], dict[str, Any], str]] = (
        (drafts, {"fill": False}, "steps in which it drafts"),
        (wins, {"fill": False, "hatch": "////"}, "of these, with a token accepted"),
        (accepted, {}, "of its tokens, accepted"),
    )
    for number, (values, look, label) in enumerate(looks):
        bars = axes.bar(positions + 0.27 * (number - 1), values, 0.24, color=colours, edgecolor=colours, **look)
        axes.bar_label(bars, fmt="%.0f", fontsize=9, color=theme.foreground, padding=2)
        axes.bar(0, 0, color=theme.foreground, edgecolor=theme.foreground, label=label, **look)
    axes.set_xticks(positions, names)
    axes.grid(False, axis="x")
    axes.set(ylabel="percent", ylim=(0, 108))
    _legend(axes, 2)


def _legend(axes: Axes, columns: int) -> None:
    """Draw the legend above the axes, so that it covers no data."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=columns, borderaxespad=0, columnspacing=1.2)
