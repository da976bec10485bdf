"""The history: what the model said in earlier conversations, and in others that are being answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from hdtool.runtime.stores.token_log import LARGEST, TokenLog

Ints = npt.NDArray[Any]


class History:
    """Answers of this process in memory, shared by all drafters of a model."""

    def __init__(self, most: int = LARGEST, *, prompts: bool = False) -> None:
        """At most ``most`` tokens are kept, the latest ones; with ``prompts``, those of prompts count too."""
        self.answers = TokenLog(most)
        self._prompts = prompts

    def start(self, lane: Ints, prompt: Sequence[int], new: int) -> None:
        """Begin an answer to a prompt, whose last ``new`` tokens are not of an earlier turn."""
        self.answers.finish(lane)
        if self._prompts and new:
            self.answers.start(lane, prompt[-new:], learned=True)
        else:
            self.answers.start(lane, prompt)

    def finish(self, lane: Ints) -> None:
        """End the answer of a lane."""
        self.answers.finish(lane)
        lane["owner"] = 0

    def lane(self) -> Ints:
        return self.answers.lane()


def address_of(log: TokenLog | None) -> int:
    """The address of a log for compiled code; 0 is none."""
    return int(log.memory.ctypes.data) if log is not None else 0
