"""Grammars that restrict tool calls to the tools of a request, with arguments valid under their JSON schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hdtool.data.prompts import Grammar
from hdtool.runtime.generation.grammar import JSON_LAYOUT
from hdtool.runtime.integrations.server.openai_formats import RequestError
from hdtool.runtime.integrations.server.tool_calls import CALL_CLOSING, CALL_OPENING, json_text, unmarked_call

MAX_CALLS = 8
"""Maximum number of calls in one answer, because a small model may repeat a call without end."""
COMBINING_KEYWORDS = {"allOf", "anyOf", "oneOf", "$ref"}
"""Schema keywords that may add properties to those that the schema lists itself."""
_IGNORING_UNKNOWN_KEYWORDS = {"x-guidance": {**JSON_LAYOUT, "lenient": True}}


def array_of_calls(tools: Sequence[dict[str, Any]], max_calls: int | None) -> Grammar:
    """Return the grammar of a JSON array with one to ``max_calls`` calls; None stands for ``MAX_CALLS``."""
    further = _repeated('", " call', max_calls)
    return _grammar([f'start: "[" call {further} "]"'], tools)


def marked_calls(
    tools: Sequence[dict[str, Any]], max_calls: int | None, *, is_required: bool, is_thinking: bool
) -> Grammar:
    """Return the grammar of answers that are plain text, or end with marked calls or a single unmarked call.

    A marked call stands between ``CALL_OPENING`` and ``CALL_CLOSING``; None for ``max_calls`` stands for ``MAX_CALLS``.
    With ``is_required``, an answer is marked calls only. With ``is_thinking``, it begins with a thought up to
    ``</think>``.
    """
    names = [tool["function"]["name"] for tool in tools]
    unmarked = [f"unmarked_{index}" for index in range(len(names))]
    further = _repeated(f'"\\n{CALL_OPENING}" marked', max_calls)
    beginnings = [f"opening marked {further}"]
    beginnings += [f'{name} " "? arguments_{index} END' for index, name in enumerate(unmarked)]
    rules = [
        f"start: {'thought ' * is_thinking}answer",
        f'answer: "{CALL_OPENING}" marked {further}' if is_required else f"answer: TEXT | {' | '.join(beginnings)}",
        f'opening[lazy]: TEXT "{CALL_OPENING}"',
        f'marked: "\\n" call "\\n{CALL_CLOSING}"',
        *(f"{rule}[lazy]: /(?s:.*){unmarked_call([name])}/" for rule, name in zip(unmarked, names, strict=True)),
        r"END: /\s{0,9}\}(\s{0,9}\n```)?/",
        f"TEXT: /(?s:.*)/ & ~/(?s:.*)({CALL_OPENING}|{unmarked_call(names)})(?s:.*)/",
        r"thought[lazy]: /(?s:.*)<\/think>/",
    ]
    return _grammar(rules, tools)


def arguments_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments; raise RequestError if the tool's ``parameters`` are no object.

    The type defaults to object. Unlisted properties are forbidden unless the schema requires or allows some. Keywords
    that the grammar compiler doesn't support are ignored.
    """
    function = tool["function"]
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise RequestError(f"tools: the parameters of {function['name']!r} must be a JSON schema", param="tools")
    closing = {"additionalProperties": False} if _is_complete(parameters) else {}
    return {"type": "object", **closing, **parameters, **_IGNORING_UNKNOWN_KEYWORDS}


def _is_complete(parameters: dict[str, Any]) -> bool:
    """Return True if the schema lists properties, including all required ones, and no keyword can add others."""
    listed, required = parameters.get("properties"), parameters.get("required", [])
    if not (listed and isinstance(listed, dict) and isinstance(required, list)):
        return False
    return all(str(name) in listed for name in required) and not COMBINING_KEYWORDS & parameters.keys()


def _grammar(rules: list[str], tools: Sequence[dict[str, Any]]) -> Grammar:
    """Return the grammar of ``rules`` and the rule ``call``, an object with the name of a tool and its arguments.

    Each tool's schema is a separate document, so that references in it resolve to its own definitions.
    """
    openings = [f'{{"name": {json_text(tool["function"]["name"])}, "arguments": ' for tool in tools]
    calls = [f'{json_text(opening)} arguments_{index} "}}"' for index, opening in enumerate(openings)]
    schemas = [f"arguments_{index}: %json {json_text(arguments_schema(tool))}" for index, tool in enumerate(tools)]
    return Grammar.of("\n".join([*rules, f"call: {' | '.join(calls)}", *schemas]))


def _repeated(further: str, max_calls: int | None) -> str:
    return "" if max_calls == 1 else f"({further}){{0,{(max_calls or MAX_CALLS) - 1}}}"
