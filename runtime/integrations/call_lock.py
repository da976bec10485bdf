"""A lock for objects that serve one call at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

from hdtool.data.errors import OptionError


class CallLock:
    """Serializes calls of several threads; raises on a nested call, which would deadlock."""

    def __init__(self, nested: str) -> None:
        """``nested`` is the message of that error."""
        self._nested = nested
        self._lock = Lock()
        self._thread: int | None = None

    def __reduce__(self) -> tuple[type[CallLock], tuple[str]]:
        """A copy is unlocked."""
        return CallLock, (self._nested,)

    @contextmanager
    def held(self) -> Iterator[None]:
        if self._thread == get_ident():
            raise OptionError(self._nested)
        with self._lock:
            self._thread = get_ident()
            try:
                yield
            finally:
                self._thread = None
