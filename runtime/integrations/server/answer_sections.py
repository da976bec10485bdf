"""Splits an answer into sections of reasoning, text and calls, as the APIs of agents present it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from hdtool.runtime.integrations.server.openai_formats import Delta, TokenLogprobs


class SectionKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Change(Enum):
    OPENED = "opened"
    ADDED = "added"
    CLOSED = "closed"


@dataclass(eq=False)
class Section:
    kind: SectionKind
    index: int
    """Index of the section in the answer."""
    name: str = ""
    """Name of the function if the section is a call."""
    text: str = ""
    """Text so far; for a call, its arguments."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Event(NamedTuple):
    change: Change
    section: Section
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()


class Sections:
    """The sections of an answer, of which at most the last is open; reports what opens, extends or closes one."""

    def __init__(self) -> None:
        self.all: list[Section] = []
        self._open: Section | None = None
        self._logprobs: list[TokenLogprobs] = []

    def add(self, delta: Delta) -> Iterator[Event]:
        self._logprobs += delta.logprobs
        if delta.reasoning:
            yield from self._extend(SectionKind.REASONING, delta.reasoning)
            if not delta.text:
                self._logprobs = []  # those of reasoning are not reported
        if delta.text:
            yield from self._extend(SectionKind.TEXT, delta.text)
        for call in delta.calls:
            yield from self.close()
            yield self._open_section(SectionKind.CALL, call.name)
            yield from self._extend(SectionKind.CALL, call.arguments)
            yield from self.close()

    def close(self) -> Iterator[Event]:
        """Close the open section, if there is one, and yield the event."""
        if self._open:
            section, self._open = self._open, None
            yield Event(Change.CLOSED, section)

    def _extend(self, kind: SectionKind, text: str) -> Iterator[Event]:
        if self._open is None or self._open.kind is not kind:
            yield from self.close()
            yield self._open_section(kind)
        assert self._open
        section, logprobs = self._open, self._logprobs
        section.text += text
        if kind is SectionKind.TEXT:
            section.logprobs += logprobs
            self._logprobs = []
        yield Event(Change.ADDED, section, text, logprobs if kind is SectionKind.TEXT else ())

    def _open_section(self, kind: SectionKind, name: str = "") -> Event:
        self._open = Section(kind, len(self.all), name)
        self.all.append(self._open)
        return Event(Change.OPENED, self._open)


def sections_of(answer: Delta) -> list[Section]:
    """Split a whole answer into sections."""
    sections = Sections()
    for _ in sections.add(answer):
        pass
    return sections.all
