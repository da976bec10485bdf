"""The lookahead branch of Lookahead Decoding (Fu et al., 2024).

Lookahead Decoding solves for many tokens at once by Jacobi iteration: from guesses at the next tokens
the target computes the tokens after them, which are the guesses of the next iteration. A row holds the
``width`` guesses of one iteration, and each row was computed from the one above it::

    row 0    root ── a1 ── a2 ── a3      guesses at the next tokens, a chain below the root
              │      │     │     │
    row 1     b0     b1    b2    b3      the target's arg-max after each of them
              │      │     │     │
    row 2     c0     c1    c2    c3      the arg-max after those, an iteration later

The arg-max after the newest row completes the n-gram of a column: ``a1 b1 c1`` and that token. The branch is
a part of the draft tree below the root, so a correct guess in it is accepted like any draft token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.tree import ROOT


class Lookahead:
    """A window of ``width`` columns that completes n-grams of ``length`` tokens, the head of the column included.

    It starts with row 0 alone, which is wide enough to lose one column per step until all rows exist.
    """

    def __init__(self, width: int, length: int) -> None:
        self._width = width
        self._most_rows = length - 1
        self._rows: list[Ints] = []
        # Indexed by the number of rows.
        self._parents = [_parents(rows, width + self._most_rows - rows) for rows in range(self._most_rows + 1)]

    @property
    def most(self) -> int:
        """The largest number of nodes of the branch."""
        return max(map(len, self._parents))

    def begin(self, prompt: Sequence[int]) -> None:
        """Initialize the guesses with tokens of the prompt, chosen by a seed that depends on its length."""
        guesses = np.random.default_rng(len(prompt)).integers(len(prompt), size=self._width + self._most_rows - 2)
        self._rows = [np.array([prompt[place] for place in guesses], np.int64)]

    def nodes(self) -> tuple[Ints, Ints]:
        """Tokens and parents of the branch."""
        return np.concatenate(self._rows), self._parents[len(self._rows)]

    @property
    def is_full(self) -> bool:
        return len(self._rows) == self._most_rows

    @property
    def num_observed(self) -> int:
        """The number of nodes at the end of the branch; ``observe`` needs their arg-max."""
        return self._width if self.is_full else len(self._rows[0])

    def observe(self, root: int, argmax: Ints) -> Ints:
        """Advance by the arg-max after the last nodes; return the completed n-grams, one row each."""
        rows = self._rows
        if not self.is_full:
            # The head of the first column is the new root, which was not guessed: the column is dropped.
            self._rows = [*(row[1:] for row in rows), argmax]
            return np.empty((0, self._most_rows + 1), np.int64)
        completed = np.empty((self._width, self._most_rows + 1), np.int64)
        completed[0, 0], completed[1:, 0] = root, rows[0]
        for row, guesses in enumerate([*rows[1:], argmax], start=1):
            completed[:, row] = guesses
        self._rows = [rows[1][1:], *rows[2:], argmax]
        return completed


def _parents(rows: int, width: int) -> Ints:
    """Row 0 is a chain with the root as its first column; nodes of other rows have the node above as parent."""
    below = np.arange(max(rows - 1, 0) * width) + ROOT
    return np.concatenate([np.arange(width - 1) + ROOT, below]).astype(np.int32)
