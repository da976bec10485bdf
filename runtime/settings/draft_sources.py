"""Registry of the built-in and plug-in draft sources, with their numbers, names, letters and colors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib.metadata import entry_points
from typing import Self

from hdtool.data.errors import OptionError

ENTRY_POINTS = "hdtool.sources"
"""Entry point group by which installed packages register a ``Source``."""

Evidence = Callable[[Sequence[int]], Mapping[int, float]]
"""Maps a context to the tokens that may follow it, each with its probability or count."""


@dataclass(frozen=True)
class Source:
    """How a source is shown to users and, for a plug-in, the function that it drafts with."""

    name: str
    letter: str = ""
    """One-letter name by which ``--sources`` selects the source; empty if it cannot be selected."""
    terminal: int | str | None = "38;5;142"
    """Terminal color of the source's tokens: an ANSI code such as 96, ``38;5;N`` for one of 256 colors, or None."""
    light: str = "#118822"
    """CSS color of the source's tokens on light pages."""
    dark: str = "#11bb00"
    """CSS color of the source's tokens on dark pages."""
    evidence: Evidence | None = None
    """Function of a plug-in, called in each step for the context and for each extension of the context by the
    function's own argmax tokens. Values that add up to more than 1 are counts, other values are probabilities."""


class SourceId(IntEnum):
    """Numeric id of the source that drafted a node of a draft tree; ``str`` gives the name that users see.

    Charts show sources in this order, statistics in the order of the numbers.
    """

    built_in: Source | None

    NONE = 0, Source("none", "", None, "#b0b6be", "#556070")
    CONTEXT = 1, Source("context", "C", "38;5;28", "#008888", "#22ffdd")
    HISTORY = 12, Source("history", "H", "38;5;94", "#997700", "#ffffaa")
    PREDICTION = 13, Source("prediction", "P", "38;5;25", "#0011cc", "#5588ff")
    MODEL = 2, Source("model", "M", "38;5;111", "#0077ee", "#22bbdd")
    CORPUS = 3, Source("corpus", "S", "38;5;138", "#bb1166", "#ff4488")
    LOOKAHEAD = 4, Source("lookahead", "", "38;5;30", "#666677", "#778877")
    RECYCLED = 5, Source("recycled", "R", "38;5;208", "#773300", "#cc9911")
    LAST = 7, Source("last", "L", "38;5;160", "#ee2222", "#ff2200")
    HEADS = 8, Source("heads", "A", "38;5;207", "#aa44ff", "#bb44ff")
    DRAFTER = 15, Source("drafter", "D", "38;5;63", "#00bb00", "#00ff00")
    GRAMMAR = 14, Source("grammar", "", "38;5;126", "#440011", "#eeaa99")
    PLUGIN_1 = 6
    PLUGIN_2 = 9
    PLUGIN_3 = 10
    PLUGIN_4 = 11

    def __new__(cls, number: int, built_in: Source | None = None) -> Self:
        member = int.__new__(cls, number)
        member._value_, member.built_in = number, built_in
        return member

    def __str__(self) -> str:
        source = _SOURCES.get(self)
        return source.name if source else self.name.lower()


PLUGINS = (SourceId.PLUGIN_1, SourceId.PLUGIN_2, SourceId.PLUGIN_3, SourceId.PLUGIN_4)
"""Numbers of plug-ins, assigned in the order in which they register."""
_SOURCES = {number: number.built_in for number in SourceId if number.built_in}
_INSTALLED: set[str] = set()
"""Sources of installed packages that are registered, as their entry points name them."""


def register(source: Source) -> SourceId:
    """Register a plug-in source, which ``--sources`` can then select by name or letter; return the source's number.

    Raise OptionError if the name or letter is missing or taken, ``evidence`` is missing, or all ``PLUGINS`` are in use.
    """
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


def unregister(number: SourceId) -> None:
    """Remove a plug-in source; do nothing if ``number`` is that of a built-in source."""
    if number in PLUGINS:
        _SOURCES.pop(number, None)


def registered() -> Mapping[SourceId, Source]:
    """Return all sources, keyed by number; those of installed packages are missing until ``plugins`` is called."""
    return _SOURCES


def plugins() -> dict[SourceId, Source]:
    """Return the plug-in sources, keyed by number, after registering those of installed packages; see ``register``."""
    _register_installed()
    return {number: _SOURCES[number] for number in PLUGINS if number in _SOURCES}


def source_of(name: str) -> SourceId:
    """Return the number of the source with this name or letter; raise OptionError if there is none."""
    for number, source in _SOURCES.items():
        if name and name in (source.name, source.letter):
            return number
    raise OptionError(f"there is no source {name!r}: the sources are {', '.join(map(str, _SOURCES))}")


SOURCE_LETTERS = "CMS"
"""Letters of the context table, the model store and the corpus index."""
LOGIT_LETTERS = "LR"
"""Letters of the sources that read the model's logits: last-token logits and recycled rankings."""
HISTORY_LETTER = "H"
STORE_LETTERS = "CHMS"
"""Letters of the sources that draft from tokens alone."""
SOURCE_NAMES = {letter: str(source_of(letter)) for letter in STORE_LETTERS + LOGIT_LETTERS} | {"L": "last-logits"}
"""Names that options accept instead of letters."""
ALL_LETTERS = "".join(SOURCE_NAMES)


@cache
def _register_installed() -> None:
    """Register the sources of installed packages, sorted by name so that they get the same numbers in every process.

    After an error, a further call goes on with the source that raised it.
    """
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        if entry.value not in _INSTALLED:
            register(entry.load())
            _INSTALLED.add(entry.value)
