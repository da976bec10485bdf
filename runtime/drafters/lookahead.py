"""The lookahead branch: the target guesses ahead of itself, in the forward pass that checks the drafts.

Lookahead Decoding solves for many tokens at once by Jacobi iteration: from guesses at the next tokens
it computes what would follow each of them, takes that for better guesses, and so on. A row holds the
guesses of one iteration. ``width`` of them stand side by side, and each row was computed from the one
above it::

    row 0    root ── a1 ── a2 ── a3      guesses at the next tokens, a chain below the root
              │      │     │     │
    row 1     b0     b1    b2    b3      what the target said after each of them
              │      │     │     │
    row 2     c0     c1    c2    c3      what it said after those, an iteration later

What the target says after the newest row closes a column: ``a1 b1 c1`` and that token are words of its
own that it might say soon. All of it hangs together as a tree below the root, so the branch is a part
of the draft tree like any other, and a guess that happens to be right is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.runtime.tree import ROOT

Ints = npt.NDArray[Any]


class Lookahead:
    """A window of ``width`` columns that closes sequences of ``length`` tokens, the column's head included.

    It starts with row 0 alone, wide enough to lose a column in each step until all rows are there.
    """

    def __init__(self, width: int, length: int) -> None:
        self._width = width
        self._most_rows = length - 1
        self._rows: list[Ints] = []
        # By the number of rows that are there.
        self._parents = [_parents(rows, width + self._most_rows - rows) for rows in range(self._most_rows + 1)]

    @property
    def most(self) -> int:
        """Nodes that the branch never exceeds."""
        return max(map(len, self._parents))

    def begin(self, prompt: Sequence[int]) -> None:
        """Guess at tokens of the prompt, the same ones for the same prompt."""
        guesses = np.random.default_rng(len(prompt)).integers(len(prompt), size=self._width + self._most_rows - 2)
        self._rows = [np.array([prompt[place] for place in guesses], np.int64)]

    def nodes(self) -> tuple[Ints, Ints]:
        """Tokens and parents of the branch."""
        return np.concatenate(self._rows), self._parents[len(self._rows)]

    @property
    def is_full(self) -> bool:
        return len(self._rows) == self._most_rows

    @property
    def asked(self) -> int:
        """The last nodes of the branch, as many as there are answers that ``observe`` needs."""
        return self._width if self.is_full else len(self._rows[0])

    def observe(self, root: int, said: Ints) -> Ints:
        """Move on by what the target said after the nodes asked; the sequences that this closes, a row each."""
        rows = self._rows
        if not self.is_full:
            # The head of the first column is the new root, which nobody guessed: the column goes.
            self._rows = [*(row[1:] for row in rows), said]
            return np.empty((0, self._most_rows + 1), np.int64)
        closed = np.empty((self._width, self._most_rows + 1), np.int64)
        closed[0, 0], closed[1:, 0] = root, rows[0]
        for row, guesses in enumerate([*rows[1:], said], start=1):
            closed[:, row] = guesses
        self._rows = [rows[1][1:], *rows[2:], said]
        return closed


def _parents(rows: int, width: int) -> Ints:
    """Row 0 is a chain whose first column is the root; below it, each node stands under its column."""
    below = np.arange(max(rows - 1, 0) * width) + ROOT
    return np.concatenate([np.arange(width - 1) + ROOT, below]).astype(np.int32)
