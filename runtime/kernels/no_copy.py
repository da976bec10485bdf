"""Objects that hold addresses of their own memory, which no copy of them would have."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class Pinned:
    """Cannot be copied or pickled: compiled code would read and write at addresses of the original, or of nothing."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, as it holds addresses of its memory: make a new one"
        )
