"""Checked access to the fields of a manifest, which may be damaged or hostile; faults are a ``ValueError``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from hdtool.data.unicode import lone_surrogate

T = TypeVar("T")

LARGEST = 2**63 - 1
LONGEST_NAME = 64


def mapping_of(row: Any, name: str) -> dict[str, Any]:
    """The JSON object in a field."""
    return _typed(row, name, dict, "an object")


def list_of(row: Any, name: str) -> list[Any]:
    """The JSON array in a field."""
    return _typed(row, name, list, "a list")


def flag_of(row: Any, name: str) -> bool:
    """The boolean in a field."""
    return _typed(row, name, bool, "true or false")


def text_of(row: Any, name: str) -> str:
    """The text in a field; it must be valid Unicode."""
    text = _typed(row, name, str, "a text")
    if lone_surrogate(text):
        raise ValueError(f"{name} is not valid Unicode")
    return text


def check_name(name: str) -> None:
    """Raise unless the name of a field is a short identifier."""
    if not name.isidentifier() or len(name) > LONGEST_NAME:
        raise ValueError(f"{ascii(name)[:LONGEST_NAME]} is no name of a field")


def number_of(row: Any, name: str, least: int = 0, most: int = LARGEST) -> int:
    """The integer in a field, from ``least`` to ``most``."""
    number = _typed(row, name, int, "an integer")
    if not least <= number <= most:
        raise ValueError(f"{name} is out of range")
    return number


def _typed(row: Any, name: str, kind: type[T], needed: str) -> T:
    if not isinstance(row, Mapping):
        raise ValueError(f"the place of {name} holds no object")
    if name not in row:
        raise ValueError(f"{name} is missing")
    if type(row[name]) is not kind:  # a bool is an int by inheritance
        raise ValueError(f"{name} is not {needed}")
    found: T = row[name]
    return found
