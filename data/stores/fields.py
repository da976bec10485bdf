"""Read typed fields of JSON objects that may be damaged, such as manifests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from hdtool.data.errors import lone_surrogate

T = TypeVar("T")

TYPES_IN_WORDS = {dict: "an object", list: "a list", bool: "true or false", str: "a text", int: "an integer"}
MAX_NUMBER = 2**63 - 1
MAX_FIELD_NAME = 64


def field_of(row: Any, name: str, kind: type[T]) -> T:
    """Return a field's value; raise ValueError if it is missing or of another type, or if a text is not Unicode."""
    if not isinstance(row, Mapping):
        raise ValueError(f"the place of {name} holds no object")
    if name not in row:
        raise ValueError(f"{name} is missing")
    value: T = row[name]
    if type(value) is not kind:  # isinstance would accept a bool as an int
        raise ValueError(f"{name} is not {TYPES_IN_WORDS[kind]}")
    if isinstance(value, str) and lone_surrogate(value):
        raise ValueError(f"{name} is not valid Unicode")
    return value


def number_of(row: Any, name: str, minimum: int = 0, maximum: int = MAX_NUMBER) -> int:
    """Return the integer in a field; raise ValueError unless there is one from ``minimum`` to ``maximum``."""
    number = field_of(row, name, int)
    if not minimum <= number <= maximum:
        raise ValueError(f"{name} is out of range")
    return number


def check_name(name: str) -> None:
    """Raise ValueError unless the name of a field is a short identifier."""
    if not name.isidentifier() or len(name) > MAX_FIELD_NAME:
        raise ValueError(f"{ascii(name)[:MAX_FIELD_NAME]} is no name of a field")
