"""Checks of settings. A refused one is named as its command line option, with what was expected and found."""

from __future__ import annotations

from hdtool.data.errors import OptionError


def require(holds: bool, name: str, found: object, expected: str) -> None:
    if not holds:
        raise OptionError(f"--{name} must be {expected}, got {found}")
