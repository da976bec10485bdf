"""Tools: functions that a model may call, described as in OpenAI's API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hdtool.data.errors import PromptError
from hdtool.data.formats.row import RowError, decoded
from hdtool.data.inputs import faults_named

EXAMPLE = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'


def read_tools(path: Path) -> tuple[dict[str, Any], ...]:
    """The tools in a JSON file: a list of them, or an object with a list ``tools``."""
    with faults_named(path, PromptError):
        data = path.read_bytes()
    try:
        found = json.loads(decoded(data))
    except (RowError, ValueError, RecursionError) as fault:
        raise PromptError(f"{path} is not a JSON file ({fault}): give a list of tools as {EXAMPLE}") from None
    tools = tools_of(found.get("tools") if isinstance(found, dict) else found, str(path))
    if not tools:
        raise PromptError(f"{path} holds no tools: give a list of them as {EXAMPLE}")
    return tools


def tools_of(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """The tools of a JSON value; none for null."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(map(_is_tool, value)):
        raise PromptError(f"{where}: `tools` must be a list of {EXAMPLE}")
    return tuple(value)


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
