"""Answers as blocks of reasoning, text or one tool call each, as the Messages and the Responses API have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from hdtool.runtime.integrations.server.formats import Delta, TokenLogprobs


class Kind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Change(Enum):
    OPENED = "opened"
    ADDED = "added"
    CLOSED = "closed"


@dataclass(eq=False)
class Block:
    kind: Kind
    index: int
    """Its place among the blocks of the answer."""
    name: str = ""
    """The name of the function, of a call."""
    text: str = ""
    """The arguments, of a call."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Event(NamedTuple):
    change: Change
    block: Block
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()


class Blocks:
    """Turns what steps add to an answer into blocks that are opened, extended and closed, one after the other."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._logprobs: list[TokenLogprobs] = []

    def add(self, delta: Delta) -> Iterator[Event]:
        self._logprobs += delta.logprobs
        if delta.reasoning:
            yield from self._extend(Kind.REASONING, delta.reasoning)
        if delta.text:
            yield from self._extend(Kind.TEXT, delta.text)
        for call in delta.calls:
            yield from self.close()
            yield self._opened(Kind.CALL, call.name)
            yield from self._extend(Kind.CALL, call.arguments)
            yield from self.close()

    def close(self) -> Iterator[Event]:
        """Close the block that is open."""
        if self._open:
            block, self._open = self._open, None
            yield Event(Change.CLOSED, block)

    def _extend(self, kind: Kind, text: str) -> Iterator[Event]:
        if self._open is None or self._open.kind is not kind:
            yield from self.close()
            yield self._opened(kind)
        assert self._open
        block, logprobs = self._open, self._logprobs
        block.text += text
        if kind is Kind.TEXT:
            block.logprobs += logprobs
            self._logprobs = []
        yield Event(Change.ADDED, block, text, logprobs if kind is Kind.TEXT else ())

    def _opened(self, kind: Kind, name: str = "") -> Event:
        self._open = Block(kind, len(self.all), name)
        self.all.append(self._open)
        return Event(Change.OPENED, self._open)


def blocks_of(answer: Delta) -> list[Block]:
    """The blocks of a whole answer."""
    blocks = Blocks()
    for _ in blocks.add(answer):
        pass
    return blocks.all
