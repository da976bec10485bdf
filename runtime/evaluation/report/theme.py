"""How figures look: colours for light and dark pages, sizes, and saving them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from hdtool.data.files.ownership import PNG_METADATA

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 5.4
"""Inches: on the screen of a telephone the letters are still as large as those of a footnote."""
DOTS = 200
"""To the inch."""


@dataclass(frozen=True)
class Theme:
    """A page's colours. The hues of Okabe and Ito, which colour-blind readers tell apart, as bright as it needs."""

    name: str
    paper: str
    ink: str
    faint: str
    databases: dict[str, str]
    """Green, blue and magenta, as in the terminal."""
    methods: dict[str, str]

    def database(self, name: str) -> str:
        return self.databases.get(name, self.ink)

    def method(self, name: str) -> str:
        return self.methods.get(name, self.ink)


LIGHT = Theme(
    name="light",
    paper="#ffffff",
    ink="#1d2229",
    faint="#d5d9df",
    databases={
        "context": "#00856a",
        "model": "#0067b1",
        "corpus": "#b8428c",
        "lookahead": "#2b95c9",
        "recycled": "#b57700",
        "copied": "#dfa23c",
        "last": "#c44e1a",
        "heads": "#7e57c2",
        "none": "#8a929d",
    },
    methods={
        "generate": "#9aa2ad",
        "generate-pld": "#5f6873",
        "generate-assisted": "#7d6a55",
        "ar": "#c6c4a4",
        "pld": "#56b4e9",
        "lade": "#0072b2",
        "rest": "#b8428c",
        "hd-paper": "#e69f00",
        "logitspec": "#74c69d",
        "medusa": "#b9a5e2",
        "amphista": "#7e57c2",
        "hd": "#d55e00",
        "hd+logitspec": "#1b7f5a",
        "hd+amphista": "#4a2a8c",
    },
)
DARK = Theme(
    name="dark",
    paper="#14181d",
    ink="#e4e8ee",
    faint="#3a424d",
    databases={
        "context": "#2ec4a0",
        "model": "#5ab0f2",
        "corpus": "#ea8cc5",
        "lookahead": "#8fd8fa",
        "recycled": "#e8b04a",
        "copied": "#f5d08a",
        "last": "#ff9a66",
        "heads": "#a888ea",
        "none": "#7f8894",
    },
    methods={
        "generate": "#6d7681",
        "generate-pld": "#a9b2bd",
        "generate-assisted": "#b39b80",
        "ar": "#8f8d6a",
        "pld": "#8fd0f5",
        "lade": "#3f95d6",
        "rest": "#ea8cc5",
        "hd-paper": "#f0b429",
        "logitspec": "#a5e3c4",
        "medusa": "#d3c4f5",
        "amphista": "#a888ea",
        "hd": "#ff7f2a",
        "hd+logitspec": "#2fb587",
        "hd+amphista": "#7a4fe0",
    },
)
THEMES = (LIGHT, DARK)

Draw = Callable[["Axes", Theme], None]


def picture(draw: Draw, theme: Theme, height: float) -> bytes:
    """A PNG of one pair of axes, so many inches high."""
    from matplotlib import style
    from matplotlib.figure import Figure

    # From the library's defaults: the settings of whoever runs this are for other pictures.
    with style.context(["default", _settings(theme)]):
        figure = Figure((WIDTH, height), dpi=DOTS, layout="constrained")
        draw(figure.add_subplot(), theme)
        out = BytesIO()
        # This entry replaces matplotlib's own, which holds its version: the same figures give the same file.
        figure.savefig(out, format="png", metadata=PNG_METADATA)
    return out.getvalue()


def _settings(theme: Theme) -> dict[Any, Any]:
    """Of matplotlib, for one figure."""
    return {
        "figure.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "text.color": theme.ink,
        "axes.edgecolor": theme.ink,
        "axes.labelcolor": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "grid.color": theme.faint,
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
