"""Where drafts come from: one file each."""

from __future__ import annotations

from enum import IntEnum


class SourceName(IntEnum):
    """Numbers for the nodes of a draft tree; the names are those that users see."""

    NONE = 0
    CONTEXT = 1
    MODEL = 2
    CORPUS = 3
    LOOKAHEAD = 4
    RECYCLED = 5
    COPIED = 6
    LAST = 7
    HEADS = 8

    def __str__(self) -> str:
        return self.name.lower()
