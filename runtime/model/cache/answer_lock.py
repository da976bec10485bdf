"""The lock of a target: one step of one answer at a time, and no answer after another one has used the cache."""

from __future__ import annotations

import threading

from hdtool.data.errors import ModelError


class AnswerLock:
    """Held during a step, as the context of a ``with`` statement after ``enter``."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._answer: object = None
        """The owner of the keys and values in the cache."""

    def enter(self, answer: object, *, is_first: bool) -> None:
        """Lock; raise if the lock is held, or if another answer started since the first step of this one."""
        if not self._busy.acquire(blocking=False):
            raise ModelError("two threads use one model at once: let them take turns, or load the model for each")
        if is_first:
            self._answer = answer
        elif self._answer is not answer:
            self._busy.release()
            raise ModelError(
                "another conversation began on this model before this one ended: finish one before the next, "
                "answer both by decode_batch, or load the model for each"
            )

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        self._busy.release()
