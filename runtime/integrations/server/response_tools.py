"""Tools of the Responses API as functions of a chat, and calls of these functions as its items.

A custom tool, whose input is a text, becomes a function with that text as its one parameter. The functions of a
namespace are named after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hdtool.runtime.integrations.server.formats import RequestError, Row

FUNCTION, CUSTOM, NAMESPACE = "function", "custom", "namespace"
OFFERED_BY_AGENTS = ("web_search", "web_search_preview", "image_generation")
"""Tools that OpenAI's servers run, and that agents offer in every request; the model does without them."""
INPUT = "input"
BETWEEN_NAMES = "__"


@dataclass(frozen=True)
class ResponseTool:
    type: str
    name: str
    namespace: str | None
    function: Row
    """As the chat template presents it."""


class ResponseTools:
    """The tools of one request."""

    def __init__(self, tools: Sequence[Row] | None) -> None:
        """Raises if one of them is none that the model can call."""
        given = list(tools or ())
        left_out = [tool for tool in given if tool.get("type") in OFFERED_BY_AGENTS]
        self.presented: list[Row] = [tool for tool in given if tool not in left_out]
        """As the request has them."""
        if left_out and not self.presented:
            raise _not_run(left_out[0], f"tools.{given.index(left_out[0])}")
        self._by_name: dict[str, ResponseTool] = {}
        for place, tool in enumerate(given):
            if tool in self.presented:
                for found in _tools_of(tool, f"tools.{place}"):
                    self._by_name[found.function["name"]] = found

    @property
    def functions(self) -> list[Row] | None:
        return [{"type": FUNCTION, "function": tool.function} for tool in self._by_name.values()] or None

    def choice(self, choice: Any) -> Any:
        """A ``tool_choice`` as chats have it."""
        if isinstance(choice, dict) and choice.get("type") in (FUNCTION, CUSTOM):
            return {"type": FUNCTION, "function": {"name": function_name(choice.get("name"), choice.get(NAMESPACE))}}
        return choice

    def is_custom(self, function: str) -> bool:
        return function in self._by_name and self._by_name[function].type == CUSTOM

    def called(self, function: str, arguments: str) -> Row:
        """The fields of the item of a call that depend on its tool."""
        tool = self._by_name.get(function)
        name = {"name": tool.name if tool else function}
        if tool and tool.namespace:
            name["namespace"] = tool.namespace
        if self.is_custom(function):
            return {"type": "custom_tool_call", **name, "input": input_of(arguments)}
        return {"type": "function_call", **name, "arguments": arguments}


def function_name(name: Any, namespace: Any = None) -> Any:
    """The name under which a tool is presented."""
    return f"{namespace}{BETWEEN_NAMES}{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """The arguments of the function that presents a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """The input of a custom tool in the arguments of its function; all of them where the model wrote others."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def _tools_of(tool: Row, where: str, namespace: Row | None = None) -> Iterator[ResponseTool]:
    kind, name = tool.get("type"), tool.get("name")
    if kind in (FUNCTION, CUSTOM, NAMESPACE) and not isinstance(name, str):
        raise RequestError(
            f"{where}: a tool has its name beside its type, and a function its parameters", param=f"{where}.name"
        )
    if kind == NAMESPACE and namespace is None:
        members = tool.get("tools")
        if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
            raise RequestError(f"{where}: a namespace holds a list of tools", param=f"{where}.tools")
        for place, member in enumerate(members):
            yield from _tools_of(member, f"{where}.tools.{place}", tool)
        return
    if kind not in (FUNCTION, CUSTOM):
        raise _not_run(tool, where)
    group = namespace["name"] if namespace else None
    described = [namespace.get("description") if namespace else None, tool.get("description")]
    if kind == CUSTOM:
        parameters: Any = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        described.append(_form(tool.get("format")))
    else:
        parameters = tool.get("parameters")
    function = {
        "name": function_name(name, group),
        "description": "\n\n".join(text for text in described if isinstance(text, str) and text),
        "parameters": parameters,
        "strict": tool.get("strict"),
    }
    shown = {key: value for key, value in function.items() if value not in (None, "")}
    yield ResponseTool(str(kind), str(name), group, shown)


def _form(form: Any) -> str | None:
    """The form of the input of a custom tool, in words for the model."""
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return None
    return f"The input matches this {form.get('syntax', '')} grammar:\n{form.get('definition', '')}"


def _not_run(tool: Row, where: str) -> RequestError:
    return RequestError(
        f"{where}: this server runs no tools, and this one is of type {str(tool.get('type'))[:40]!r}: send functions "
        "with a name and parameters, or custom tools",
        param=where,
    )
