"""Several calls in one answer, in the streams of all three APIs: ids unique, order kept, arguments whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from hdtool.runtime.core.step import Stats
from hdtool.runtime.integrations.server.messages_api import MessagesFormat
from hdtool.runtime.integrations.server.openai_formats import ChatFormat, Delta, Format, usage_of
from hdtool.runtime.integrations.server.responses_api import ResponsesFormat, ResponsesRequest
from hdtool.runtime.integrations.server.tool_calls import ToolCall, ToolCallReader
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load_tokenizer

Row = dict[str, Any]
Call = tuple[str, str, Row]
"""Id, name and arguments."""
CUSTOM = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}}
ANSWER = (
    'First both.\n<tool_call>\n{"name": "read", "arguments": {"path": "a \\"b\\".py", "lines": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "read", "arguments": {"path": "ü.py"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+a = \\"b\\"\\n"}}\n</tool_call>'
)
EXPECTED = [
    ("read", {"path": 'a "b".py', "lines": [1, 2]}),
    ("read", {"path": "ü.py"}),
    ("patch", {"input": '*** Begin\n+a = "b"\n'}),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found = load_tokenizer(ModelConfig())
    found.chat_template = "<tool_call>"
    return found


def deltas(tokenizer: PreTrainedTokenizerBase, size: int) -> list[Delta]:
    """What steps add that bring this many characters each."""
    reader = ToolCallReader(tokenizer, [{"type": "function", "function": {"name": "read"}}], "")
    parts = [reader.add(ANSWER[start : start + size]) for start in range(0, len(ANSWER), size)] + [reader.end()]
    made = [Delta(text, reasoning, calls) for text, reasoning, calls in parts]
    return [*made, Delta(finish="tool_calls")]


def events(form: Format, added: Sequence[Delta]) -> list[Row]:
    found = [*form.opening(9)]
    for delta in added:
        if delta:
            found += form.added(0, delta)
    return [*found, *form.closing(usage_of(9, Stats()))]


def calls_of_chat(tokenizer: PreTrainedTokenizerBase, added: Sequence[Delta]) -> list[Call]:
    chunks = events(ChatFormat("demo", tokenizer, 1, with_usage=True), added)
    calls = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    return [(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def calls_of_message(tokenizer: PreTrainedTokenizerBase, added: Sequence[Delta]) -> list[Call]:
    found: list[Call] = []
    blocks: dict[int, Row] = {}
    arguments: dict[int, str] = {}
    for event in events(MessagesFormat("demo", shows_thinking=True), added):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks[event["index"]], arguments[event["index"]] = event["content_block"], ""
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            arguments[event["index"]] += event["delta"]["partial_json"]
        elif event["type"] == "content_block_stop" and (block := blocks[event["index"]])["type"] == "tool_use":
            assert block["input"] == {}
            found.append((block["id"], block["name"], json.loads(arguments[event["index"]])))
    return found


def calls_of_response(tokenizer: PreTrainedTokenizerBase, added: Sequence[Delta]) -> list[Call]:
    body = ResponsesRequest.of({"input": "Hi", "tools": [{"type": "function", "name": "read"}, CUSTOM]})
    found: list[Call] = []
    streamed: dict[str, str] = {}
    sent = events(ResponsesFormat("demo", tokenizer, body), added)
    for event in sent:
        if event["type"] in ("response.function_call_arguments.delta", "response.custom_tool_call_input.delta"):
            streamed[event["item_id"]] = streamed.get(event["item_id"], "") + event["delta"]
        elif event["type"] == "response.output_item.done" and "call_id" in (item := event["item"]):
            is_custom = item["type"] == "custom_tool_call"
            assert is_custom is (item["name"] == "patch")
            assert streamed[item["id"]] == (item["input"] if is_custom else item["arguments"])
            given = {"input": item["input"]} if is_custom else json.loads(item["arguments"])
            found.append((item["call_id"], item["name"], given))
    last = [item for item in sent[-1]["response"]["output"] if "call_id" in item]
    assert [item["call_id"] for item in last] == [call[0] for call in found]
    return found


@pytest.mark.parametrize("size", [1, 7, len(ANSWER)])
@pytest.mark.parametrize("calls", [calls_of_chat, calls_of_message, calls_of_response])
def test_calls_of_a_stream(
    tokenizer: PreTrainedTokenizerBase,
    calls: Callable[[PreTrainedTokenizerBase, Sequence[Delta]], list[Call]],
    size: int,
) -> None:
    found = calls(tokenizer, deltas(tokenizer, size))
    assert [(name, arguments) for _, name, arguments in found] == EXPECTED
    assert len({identity for identity, _, _ in found}) == len(EXPECTED)


def test_the_same_tool_twice_in_one_step(tokenizer: PreTrainedTokenizerBase) -> None:
    twice = [Delta("", "", [ToolCall("read", '{"path": "a"}'), ToolCall("read", '{"path": "a"}')], finish="tool_calls")]
    for calls in (calls_of_chat, calls_of_message, calls_of_response):
        found = calls(tokenizer, twice)
        assert [(name, arguments) for _, name, arguments in found] == [("read", {"path": "a"})] * 2
        assert len({identity for identity, _, _ in found}) == 2


def test_a_custom_tool_is_presented_as_a_function_with_a_text() -> None:
    call = {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "+b\n"}
    given = [call, {"type": "custom_tool_call_output", "call_id": "a", "output": "Done."}]
    choice = {"type": "custom", "name": "patch"}
    chat = ResponsesRequest.of({"input": given, "tools": [CUSTOM], "tool_choice": choice}).chat()
    (tool,) = chat.tools
    assert tool["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert "start: A" in tool["function"]["description"]
    assert chat.tool_choice == {"type": "function", "function": {"name": "patch"}}
    turn, result = chat.messages
    assert turn.tool_calls and json.loads(turn.tool_calls[0].function.arguments or "") == {"input": "+b\n"}
    assert (result.role, result.name, result.content) == ("tool", "patch", "Done.")
