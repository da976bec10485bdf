"""``tool_choice``: whether the model may, must or must not call a function, and which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hdtool.data.grammar import Grammar
from hdtool.runtime.integrations.server.protocol.errors import RequestError

EXPECTED = 'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True)
class ToolChoice:
    """The tools that are presented to the model, and the grammar of calls that it must make."""

    tools: tuple[dict[str, Any], ...] = ()
    grammar: Grammar | None = None
    """Of a JSON array of calls; None where the model decides by itself whether it calls a function."""

    @classmethod
    def of(cls, choice: Any, tools: Sequence[dict[str, Any]], *, parallel: bool) -> ToolChoice:
        """``parallel`` allows several calls in one answer."""
        if not tools:
            if choice not in (None, "none", "auto"):
                raise RequestError("tool_choice needs tools: send them, or leave it out", param="tool_choice")
            return cls()
        if choice == "none":
            return cls()
        if choice in (None, "auto"):
            return cls(tuple(tools))
        if choice == "required":
            return cls(tuple(tools), _calls_of(tools, most=None if parallel else 1))
        named = choice.get("function", {}) if isinstance(choice, dict) and choice.get("type") == "function" else None
        if not isinstance(named, dict):
            raise RequestError(EXPECTED, param="tool_choice")
        wanted = [tool for tool in tools if tool["function"]["name"] == named.get("name")]
        if not wanted:
            raise RequestError(f"tool_choice names no function of tools: {EXPECTED}", param="tool_choice")
        return cls(tuple(tools), _calls_of(wanted, most=1))


NO_TOOLS = ToolChoice()


def _calls_of(tools: Sequence[dict[str, Any]], most: int | None) -> Grammar:
    """JSON arrays of calls of these functions, at least one."""
    calls = []
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters") or {"type": "object"}
        properties = {"name": {"const": function["name"]}, "arguments": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    array = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
    return Grammar.json_schema(array | ({"maxItems": most} if most else {}))
