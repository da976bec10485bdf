"""The registry of sources: numbers, names, letters and colors, of the built-in ones and of plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib.metadata import entry_points

from hdtool.data.errors import OptionError

ENTRY_POINTS = "hdtool.sources"
"""An installed package registers a ``Source`` by an entry point of this group."""

Evidence = Callable[[Sequence[int]], Mapping[int, float]]
"""From a context to the tokens that may follow it, each with its probability or count."""


class SourceName(IntEnum):
    """The number that a node of a draft tree carries; ``str`` gives the name that users see."""

    NONE = 0
    CONTEXT = 1
    MODEL = 2
    CORPUS = 3
    LOOKAHEAD = 4
    RECYCLED = 5
    PLUGIN_1 = 6
    LAST = 7
    HEADS = 8
    PLUGIN_2 = 9
    PLUGIN_3 = 10
    PLUGIN_4 = 11
    HISTORY = 12
    PREDICTION = 13
    GRAMMAR = 14

    def __str__(self) -> str:
        source = _SOURCES.get(self)
        return source.name if source else self.name.lower()


@dataclass(frozen=True)
class Source:
    """A source as users see it, and the evidence of one that is registered from outside the package."""

    name: str
    letter: str = ""
    """Short for the name, where sources are selected."""
    terminal: int | None = 96
    """The color of its tokens in a terminal, by its ANSI number."""
    light: str = "#6b7f2a"
    """Its color on a light page."""
    dark: str = "#b9cf6a"
    """Its color on a dark page."""
    evidence: Evidence | None = None
    """Called in each step for the context and for the chain of its own arg-max tokens after it. Values that add up
    to more than 1 are counts, others are probabilities."""


PLUGINS = (SourceName.PLUGIN_1, SourceName.PLUGIN_2, SourceName.PLUGIN_3, SourceName.PLUGIN_4)
"""The numbers that plug-ins get, in the order of their registration."""
_SOURCES = {
    SourceName.NONE: Source("none", "", None, "#8a929d", "#7f8894"),
    SourceName.CONTEXT: Source("context", "C", 32, "#00856a", "#2ec4a0"),
    SourceName.HISTORY: Source("history", "H", 92, "#3f7d20", "#8ed968"),
    SourceName.PREDICTION: Source("prediction", "P", 94, "#5b5bd6", "#a3a3ff"),
    SourceName.MODEL: Source("model", "M", 34, "#0067b1", "#5ab0f2"),
    SourceName.CORPUS: Source("corpus", "S", 35, "#b8428c", "#ea8cc5"),
    SourceName.LOOKAHEAD: Source("lookahead", "", 36, "#2b95c9", "#8fd8fa"),
    SourceName.RECYCLED: Source("recycled", "R", 33, "#b57700", "#e8b04a"),
    SourceName.LAST: Source("last", "L", 31, "#c44e1a", "#ff9a66"),
    SourceName.HEADS: Source("heads", "A", 95, "#7e57c2", "#a888ea"),
    SourceName.GRAMMAR: Source("grammar", "", 37, "#6d6875", "#b8b3c2"),
}


def register(source: Source) -> SourceName:
    """Add a source from outside the package; returns its number. ``--sources`` selects it, by its name or letter."""
    taken = {part for known in _SOURCES.values() for part in (known.name, known.letter) if part}
    if len(source.letter) != 1 or not source.name or {source.name, source.letter} & taken:
        raise OptionError(f"source {source.name!r} needs a name and a letter of its own, not one of {sorted(taken)}")
    if not source.evidence:
        raise OptionError(f"source {source.name!r} has no evidence: give it a function of the context")
    free = [number for number in PLUGINS if number not in _SOURCES]
    if not free:
        raise OptionError(f"{len(PLUGINS)} sources are registered already, which is the most: remove one")
    _SOURCES[free[0]] = source
    return free[0]


def unregister(number: SourceName) -> None:
    """Remove a source that was registered."""
    if number in PLUGINS:
        _SOURCES.pop(number, None)


def registered() -> Mapping[SourceName, Source]:
    """All sources by their numbers; those of installed packages once one of them was selected."""
    return _SOURCES


def plugins() -> dict[SourceName, Source]:
    """The sources from outside the package, those of installed packages included."""
    _register_installed()
    return {number: _SOURCES[number] for number in PLUGINS if number in _SOURCES}


def source_of(letter: str) -> SourceName:
    """The number of a source, by its letter."""
    return next(number for number, source in _SOURCES.items() if source.letter == letter)


def source_named(name: str) -> SourceName:
    """The number of a source, by its name."""
    for number, source in _SOURCES.items():
        if source.name == name:
            return number
    raise OptionError(f"there is no source {name!r}: the sources are {', '.join(map(str, _SOURCES))}")


@cache
def _register_installed() -> None:
    """In the order of their names, so that every process gives them the same numbers."""
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        register(entry.load())
