"""A base class that forbids copies of objects that hold addresses of their own memory."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class Pinned:
    """Raises on copy and pickle: compiled code would use addresses of the original, or of freed memory."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, as it holds addresses of its memory: make a new one"
        )
