"""Tools of the Responses API as functions that a chat template knows.

A custom tool, whose input is text, becomes a function with this text as its only parameter. The names of functions in a
namespace begin with the name of the namespace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hdtool.runtime.integrations.server.openai_formats import JsonDict, RequestError
from hdtool.runtime.integrations.server.tool_calls import json_text

FUNCTION, CUSTOM, NAMESPACE = "function", "custom", "namespace"
BUILT_IN_TOOLS = ("web_search", "web_search_preview", "image_generation")
"""Tools that OpenAI's servers run and that agents offer in every request; they are ignored."""
INPUT_FIELD = "input"
NAMESPACE_SEPARATOR = "__"


@dataclass(frozen=True)
class ResponseTool:
    type: str
    name: str
    namespace: str | None
    function: JsonDict
    """Description of the function for the chat template."""


class ResponseTools:
    """The tools of one request to the Responses API, converted to functions."""

    def __init__(self, tools: Sequence[JsonDict] | None) -> None:
        """Raise RequestError for a tool that the model cannot call, or if there are only built-in tools."""
        given = list(tools or ())
        left_out = [tool for tool in given if tool.get("type") in BUILT_IN_TOOLS]
        self.presented: list[JsonDict] = [tool for tool in given if tool not in left_out]
        """Tools as in the request, without the built-in ones."""
        if left_out and not self.presented:
            raise _not_run(left_out[0], f"tools.{given.index(left_out[0])}")
        self._by_name: dict[str, ResponseTool] = {}
        for index, tool in enumerate(given):
            if tool in self.presented:
                for response_tool in _tools_of(tool, f"tools.{index}"):
                    self._by_name[response_tool.function["name"]] = response_tool

    @property
    def functions(self) -> list[JsonDict] | None:
        return [{"type": FUNCTION, "function": tool.function} for tool in self._by_name.values()] or None

    def choice(self, choice: Any) -> Any:
        """Convert a ``tool_choice`` to the form that chat requests use."""
        if isinstance(choice, dict) and choice.get("type") in (FUNCTION, CUSTOM):
            return {"type": FUNCTION, "function": {"name": function_name(choice.get("name"), choice.get(NAMESPACE))}}
        return choice

    def is_custom(self, function: str) -> bool:
        return function in self._by_name and self._by_name[function].type == CUSTOM

    def called(self, function: str, arguments: str) -> JsonDict:
        """Return the fields of a call's output item that depend on the type and namespace of the tool."""
        tool = self._by_name.get(function)
        name = {"name": tool.name if tool else function}
        if tool and tool.namespace:
            name["namespace"] = tool.namespace
        if self.is_custom(function):
            return {"type": "custom_tool_call", **name, "input": input_of(arguments)}
        return {"type": "function_call", **name, "arguments": arguments}


def function_name(name: Any, namespace: Any = None) -> Any:
    """Return the name under which a tool is presented to the model."""
    return f"{namespace}{NAMESPACE_SEPARATOR}{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """Wrap a custom tool's input in the JSON arguments of the function that represents the tool."""
    return json_text({INPUT_FIELD: text})


def input_of(arguments: str) -> str:
    """Extract a custom tool's input from its function's ``arguments``; if they are malformed, return ``arguments``."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(INPUT_FIELD) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _tools_of(tool: JsonDict, where: str, namespace: JsonDict | None = None) -> Iterator[ResponseTool]:
    kind, name = tool.get("type"), tool.get("name")
    if kind in (FUNCTION, CUSTOM, NAMESPACE) and not isinstance(name, str):
        raise RequestError(
            f"{where}: a tool has its name beside its type, and a function its parameters", param=f"{where}.name"
        )
    if kind == NAMESPACE and namespace is None:
        members = tool.get("tools")
        if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
            raise RequestError(f"{where}: a namespace holds a list of tools", param=f"{where}.tools")
        for index, member in enumerate(members):
            yield from _tools_of(member, f"{where}.tools.{index}", tool)
        return
    if kind not in (FUNCTION, CUSTOM):
        raise _not_run(tool, where)
    group = namespace["name"] if namespace else None
    described = [namespace.get("description") if namespace else None, tool.get("description")]
    if kind == CUSTOM:
        parameters: Any = {"type": "object", "properties": {INPUT_FIELD: {"type": "string"}}, "required": [INPUT_FIELD]}
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
    """Return text that tells the model the grammar of a custom tool's input; None if there is no grammar."""
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return None
    return f"The input matches this {form.get('syntax', '')} grammar:\n{form.get('definition', '')}"


def _not_run(tool: JsonDict, where: str) -> RequestError:
    return RequestError(
        f"{where}: this server runs no tools, and this one is of type {str(tool.get('type'))[:40]!r}: send functions "
        "with a name and parameters, or custom tools",
        param=where,
    )
