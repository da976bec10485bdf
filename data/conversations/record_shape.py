"""A record of no known form in a few words: its keys with their types and shortened values, and no secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

KEYS_SHOWN = 6
LONGEST_TEXT = 20
SECRET_KEYS = re.compile(
    r"(api|access|private|auth)[\W_]?(key|token)|^key$|^token$|secret|passw|authori[sz]|cookie|credential|header|bearer",
    re.IGNORECASE,
)
SECRET_TEXTS = re.compile(r"(sk|pk|hf|gh[pousr]|xox[abp]|ey[Jj])[-_\w]{8}|bearer ", re.IGNORECASE)


def described(value: Mapping[Any, Any]) -> str:
    """A record as in ``id: 7, question_text: "What is a li...", api_key: hidden``."""
    shown = [f"{_key(key)}: {_value(str(key), held)}" for key, held in list(value.items())[:KEYS_SHOWN]]
    more = len(value) - len(shown)
    return (", ".join(shown) + (f" and {more} more" if more > 0 else "")) or "nothing"


def _key(key: Any) -> str:
    return " ".join(str(key).split())[:LONGEST_TEXT]


def _value(key: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"{value:g}" if abs(value) < 1e6 else "a number"
    if SECRET_KEYS.search(key):
        return "hidden"
    if isinstance(value, str):
        return _text(value)
    kind, unit = ("object", "keys") if isinstance(value, Mapping) else ("list", "items")
    return f"{kind} of {len(value)} {unit}" if isinstance(value, Mapping | list | tuple) else type(value).__name__


def _text(text: str) -> str:
    words = " ".join(text.split())
    # A long text without a space may be a key or a token.
    if SECRET_TEXTS.search(words) or (" " not in words[: 2 * LONGEST_TEXT] and len(words) > LONGEST_TEXT):
        return f"text of {len(text)} characters"
    return f'"{words[:LONGEST_TEXT]}..."' if len(words) > LONGEST_TEXT else f'"{words}"'
