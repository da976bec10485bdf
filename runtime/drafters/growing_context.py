"""The context as an array for compiled code, extended in place: copying a long one in each step is slow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hdtool.runtime.kernels.compiled import Ints


class GrowingContext:
    def __init__(self) -> None:
        self._tokens = np.empty(0, np.int64)
        self._size = 0

    def restart(self, prompt: Sequence[int]) -> None:
        self._size = 0
        self.grown(prompt)

    def grown(self, context: Sequence[int]) -> Ints:
        """The tokens of ``context``, which must begin with the contexts given since the last restart."""
        if len(context) > len(self._tokens):
            larger = np.empty(2 * len(context), np.int64)
            larger[: self._size] = self._tokens[: self._size]
            self._tokens = larger
        self._tokens[self._size : len(context)] = context[self._size :]
        self._size = len(context)
        return self._tokens[: self._size]
