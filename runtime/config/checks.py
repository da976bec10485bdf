"""Settings that cannot be are refused in a line that says what can."""

from __future__ import annotations

from hdtool.data.errors import OptionError


def require_letters(name: str, found: str, known: str) -> None:
    letters = set(found)
    fits = bool(letters) and letters <= set(known) and len(letters) == len(found)
    require(fits, name, found or "empty", f"letters of {known}, each at most once")


def require(holds: bool, name: str, found: object, expected: str) -> None:
    if not holds:
        raise OptionError(f"{name} is {found}: it must be {expected}")
