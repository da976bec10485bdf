"""What the general rules do not know about single types."""

from __future__ import annotations

from typing import Any

SPECIAL: dict[str, dict[str, Any]] = {}


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with changes, also of those of their parts."""
    found = dict(settings)
    for name, value in changes.items():
        is_part = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = merged(found[name], value) if is_part else value
    return found
