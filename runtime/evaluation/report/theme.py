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
"""On light and on dark pages: no two are closer than 20 by CIEDE2000, which lines and bars side by side need."""


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
