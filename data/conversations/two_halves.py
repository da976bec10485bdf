"""Requests and answers in separate rows, of one file or of two: batches of APIs, Spec-Bench's questions and answers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from hdtool.data.conversations.conversation import ANSWERS, Conversation, answered


class Holder(Protocol):
    """What holds a conversation."""

    @property
    def conversation(self) -> Conversation: ...


T = TypeVar("T", bound=Holder)


class Halves(Generic[T]):
    """Halves that wait for the other one, by their key, in their order."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[bool, str], deque[T]] = defaultdict(deque)

    def joined(self, half: Conversation) -> Conversation | None:
        """A conversation that is whole, or becomes so; None for a half that must wait."""
        if not half.key:
            return half
        others = self._waiting[half.kind != ANSWERS, half.key]
        if not others:
            return None
        other = others.popleft().conversation
        return answered(other, half) if half.kind == ANSWERS else answered(half, other)

    def keep(self, holder: T) -> None:
        half = holder.conversation
        self._waiting[half.kind == ANSWERS, half.key].append(holder)

    @property
    def left(self) -> Iterator[T]:
        """The halves whose other half did not come."""
        for holders in self._waiting.values():
            yield from holders
