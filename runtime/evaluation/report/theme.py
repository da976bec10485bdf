"""How figures look: colours for light and dark pages, sizes, and rendering to PNG."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from hdtool.data.files.ownership import PNG_METADATA
from hdtool.runtime.source_names import registered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 5.4
"""Inches: on the screen of a phone the text is still readable."""
DOTS = 200
"""Dots per inch."""

METHOD_COLOURS = {
    "generate": ("#9aa2ad", "#6d7681"),
    "generate-pld": ("#5f6873", "#a9b2bd"),
    "generate-assisted": ("#7d6a55", "#b39b80"),
    "llama.cpp": ("#a23b3b", "#d46a6a"),
    "llama.cpp-pld": ("#d99a9a", "#eebcbc"),
    "llama.cpp-file": ("#6e1f2f", "#b9576a"),
    "ar": ("#c6c4a4", "#8f8d6a"),
    "pld": ("#56b4e9", "#8fd0f5"),
    "lade": ("#0072b2", "#3f95d6"),
    "sam": ("#3f6f8c", "#7fa9c2"),
    "suffix": ("#8c3f5d", "#c27f9b"),
    "rest": ("#b8428c", "#ea8cc5"),
    "hd-paper": ("#e69f00", "#f0b429"),
    "logitspec": ("#74c69d", "#a5e3c4"),
    "medusa": ("#b9a5e2", "#d3c4f5"),
    "amphista": ("#7e57c2", "#a888ea"),
    "hd": ("#d55e00", "#ff7f2a"),
    "tr": ("#a8a32a", "#d1cc5e"),
    "racer": ("#6b8f2a", "#a3c75e"),
    "hd+logitspec": ("#1b7f5a", "#2fb587"),
    "hd+amphista": ("#4a2a8c", "#7a4fe0"),
}
"""On light and on dark pages. These and the colours of the sources are the hues of Okabe and Ito, which colour-blind
readers can distinguish."""


@dataclass(frozen=True)
class Theme:
    """The colours of a page."""

    name: str
    background: str
    foreground: str
    muted: str

    @property
    def sources(self) -> dict[str, str]:
        """The colours of all registered sources by name, with that of bonus tokens last."""
        known = sorted(registered().items(), key=lambda entry: not entry[0])
        return {source.name: source.light if self.name == "light" else source.dark for _, source in known}

    def source(self, name: str) -> str:
        return self.sources.get(name, self.foreground)

    def method(self, name: str) -> str:
        light, dark = METHOD_COLOURS.get(name, (self.foreground, self.foreground))
        return light if self.name == "light" else dark


LIGHT = Theme("light", background="#ffffff", foreground="#1d2229", muted="#d5d9df")
DARK = Theme("dark", background="#14181d", foreground="#e4e8ee", muted="#3a424d")
THEMES = (LIGHT, DARK)

Draw = Callable[["Axes", Theme], None]


def render_png(draw: Draw, theme: Theme, height: float) -> bytes:
    """A PNG of one pair of axes, ``height`` inches high."""
    from matplotlib import style
    from matplotlib.figure import Figure

    # From matplotlib's defaults: a user's own style must not change the figures.
    with style.context(["default", _settings(theme)]):
        figure = Figure((WIDTH, height), dpi=DOTS, layout="constrained")
        draw(figure.add_subplot(), theme)
        out = BytesIO()
        # This entry replaces matplotlib's own, which holds its version: the same figures give the same file.
        figure.savefig(out, format="png", metadata=PNG_METADATA)
    return out.getvalue()


def _settings(theme: Theme) -> dict[Any, Any]:
    """The settings of matplotlib for one figure."""
    background, foreground = theme.background, theme.foreground
    return {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), background),
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), foreground),
        "grid.color": theme.muted,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 10,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "lines.linewidth": 2,
        "lines.markersize": 5,
    }
