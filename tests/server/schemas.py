"""JSON schemas that the tests of all APIs share."""

from __future__ import annotations

from typing import Any

CITY_AND_UNIT: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
"""The parameters of a function that tells the weather."""
NAMED: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}},
    "required": ["name"],
    "additionalProperties": False,
}
"""An object with a short name."""
