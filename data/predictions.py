"""Predicted outputs: what an answer will probably look like, from a file or a JSON value of OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hdtool.data.errors import PromptError
from hdtool.data.inputs import text_in
from hdtool.data.unicode import lone_surrogate

CONTENT, PART = "content", "text"
"""The types of a prediction and of its parts in OpenAI's API."""


def read_prediction(path: Path) -> str:
    """The text of a file; raises unless it holds some."""
    text = text_in(path, "a prediction is UTF-8 text")
    if not text.strip():
        raise PromptError(f"{path} is empty: put the text in it that the answer will probably have, or leave it out")
    return text


def prediction_of(value: Any, where: str) -> str:
    """The text of a JSON value: a text, OpenAI's object with a text or a list of text parts, or null."""
    if value is None:
        return ""
    if isinstance(value, dict) and value.get("type") == CONTENT:
        value = value.get(CONTENT)
        if isinstance(value, list) and all(_is_part(part) for part in value):
            value = "".join(part[PART] for part in value)
    if not isinstance(value, str):
        raise PromptError(
            f'{where}: `prediction` must be a text or {{"type": "content", "content": ...}} with a text or text parts'
        )
    if not value.strip():
        raise PromptError(f"{where}: `prediction` is empty: leave it out")
    if fault := lone_surrogate(value):
        raise PromptError(f"{where}: `prediction` is not valid Unicode ({fault}): give it as UTF-8 text")
    return value


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == PART and isinstance(part.get(PART), str)
