"""The history: answers of earlier conversations, and of others that are being answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdtool.data.stores.history_manifest import ANSWERS
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.stores.history.token_log import LARGEST, TokenLog

if TYPE_CHECKING:
    from hdtool.runtime.stores.history.history_store import HistoryStore


class History:
    """Answers of this process in memory and, if there is a store, on the disk; shared by all drafters of a model."""

    source = ANSWERS
    """The name under which the store keeps the answers."""

    def __init__(self, most: int = LARGEST, *, prompts: bool = False, store: HistoryStore | None = None) -> None:
        """At most ``most`` tokens are kept, the latest ones; with ``prompts``, those of prompts count too.

        An answer that is finished goes to the ``store``, and is matched there from then on.
        """
        self.answers = TokenLog(most)
        self.store = store
        self._prompts = prompts

    @property
    def stored_log(self) -> Ints | None:
        """The record of the store's log for compiled code; it stays at its address."""
        return self.store.log if self.store else None

    def start(self, lane: Ints, prompt: Sequence[int], new: int) -> None:
        """Begin an answer to a prompt, whose last ``new`` tokens are not of an earlier turn."""
        self.finish(lane)
        if self.store:
            self.store.refresh()
        if self._prompts and new:
            self.answers.start(lane, prompt[-new:], learned=True)
        else:
            self.answers.start(lane, prompt)

    def finish(self, lane: Ints) -> None:
        """End the answer of a lane."""
        owner = int(lane["owner"][0])
        before, tokens = self.answers.answer(lane) if self.store and owner else (lane[:0], lane[:0])
        self.answers.finish(lane)
        lane["owner"] = 0
        if self.store and len(tokens) and self.store.append(tokens, before, self.source):
            self.answers.discard(owner)

    def lane(self) -> Ints:
        return self.answers.lane()


def address_of(log: Ints | None) -> int:
    """The address of the record of a log, for compiled code; 0 is none."""
    return int(log.ctypes.data) if log is not None else 0
