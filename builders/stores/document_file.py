"""Documents on their way into a store: streamed to disk as tokens, and counted by source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hdtool.data.stores.documents import Source, Tokens, token_type
from hdtool.data.stores.store import InputShare, shares_of


class DocumentFile:
    """A file of documents, each with an end token after it; empty ones are left out."""

    def __init__(self, path: Path, end: int, sources: Sequence[Source]) -> None:
        self.width = token_type(end)
        self.size = 0
        """Tokens and ends so far."""
        self.documents = 0
        self.longest = 0
        self._end = self.width.type(end)
        self._sources = sources
        self._counted = np.zeros((len(sources), 2), np.int64)
        self._stream = open(path, "wb")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> DocumentFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    def add(self, ids: Sequence[int] | Tokens, source: int) -> None:
        length = len(ids)
        if not length:
            return
        closed = np.empty(length + 1, self.width)
        closed[:length], closed[length] = ids, self._end
        self._stream.write(closed.data)
        self.size += length + 1
        self.documents += 1
        self.longest = max(self.longest, length)
        self._counted[source] += (1, length)

    def shares(self) -> tuple[InputShare, ...]:
        return shares_of(self._sources, self._counted)
