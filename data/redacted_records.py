"""Excerpts of records for messages, without what may be secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MAX_KEYS_SHOWN = 6
MAX_TEXT_SHOWN = 20
SECRET_KEYS = re.compile(
    r"(api|access|private|auth)[\W_]?(key|token)|^key$|^token$|secret|passw|authori[sz]|cookie|credential|header|bearer",
    re.IGNORECASE,
)
SECRET_TEXTS = re.compile(r"(sk|pk|hf|gh[pousr]|xox[abp]|ey[Jj])[-_\w]{8}|bearer ", re.IGNORECASE)


def redacted_record(value: Mapping[Any, Any]) -> str:
    """Describe a record without its secrets, as in ``id: 7, question_text: "What is a li...", api_key: hidden``."""
    fields = [f"{_key(key)}: {_value(str(key), held)}" for key, held in list(value.items())[:MAX_KEYS_SHOWN]]
    more = len(value) - len(fields)
    return (", ".join(fields) + (f" and {more} more" if more > 0 else "")) or "nothing"


def _key(key: Any) -> str:
    return " ".join(str(key).split())[:MAX_TEXT_SHOWN]


def _value(key: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"{value:g}" if abs(value) < 1e6 else "a number"
    if SECRET_KEYS.search(key):
        return "hidden"
    if isinstance(value, str):
        return _text_excerpt(value)
    kind, unit = ("object", "keys") if isinstance(value, Mapping) else ("list", "items")
    return f"{kind} of {len(value)} {unit}" if isinstance(value, Mapping | list | tuple) else type(value).__name__


def _text_excerpt(text: str) -> str:
    words = " ".join(text.split())
    # A long text without spaces may be an API key or an access token.
    if SECRET_TEXTS.search(words) or (" " not in words[: 2 * MAX_TEXT_SHOWN] and len(words) > MAX_TEXT_SHOWN):
        return f"text of {len(text)} characters"
    return f'"{words[:MAX_TEXT_SHOWN]}..."' if len(words) > MAX_TEXT_SHOWN else f'"{words}"'
