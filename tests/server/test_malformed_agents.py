"""Requests to the Messages and the Responses API that are refused: each gets a 4xx in the form of its API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server import RunningServer

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ROME: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
BYTES: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{",
    "half a body": b'{"model": "demo", "max_tokens": 4, "mess',
    "not UTF-8": b'{"max_tokens": 4, "messages": [{"role": "user", "content": "\xff\xfe"}], "input": "\xff"}',
    "a list": b"[]",
    "a text": b'"hello"',
    "null": b"null",
    "a number": b"17",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "a body of 9 MiB": b'{"input": "' + b"a" * 9 * 2**20 + b'"}',
}


def wrong(**fields: Any) -> dict[str, Any]:
    return fields


SHARED: dict[str, dict[str, Any]] = {
    "unknown model": wrong(model="gpt-9"),
    "model a number": wrong(model=3),
    "model a list": wrong(model=["demo"]),
    "temperature a text": wrong(temperature="warm"),
    "temperature negative": wrong(temperature=-0.1),
    "temperature too high": wrong(temperature=2.5),
    "top_p 0": wrong(top_p=0),
    "top_p above 1": wrong(top_p=1.01),
    "top_p a list": wrong(top_p=[0.5]),
    "seed a text": wrong(seed="1"),
    "seed too large": wrong(seed=2**70),
    "stream a text": wrong(stream="yes"),
    "stream a number": wrong(stream=1),
    "metadata a text": wrong(metadata="a"),
    "tools an object": wrong(tools={}),
    "tools of numbers": wrong(tools=[1]),
    "tool without a name": wrong(tools=[{"type": "function", "input_schema": ROME}]),
    "tool_choice without tools": wrong(tool_choice={"type": "tool", "name": "f"}),
    "an unknown field": wrong(messages_of_others=[]),
    "n": wrong(n=2),
    "logit_bias": wrong(logit_bias={"5": 1}),
    "service_tier": wrong(service_tier="flex"),
    "container": wrong(container="c"),
    "mcp_servers": wrong(mcp_servers=[{"type": "url", "url": "https://example.com"}]),
    "context_management": wrong(context_management={"edits": []}),
}


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


HI = {"model": "demo", "max_tokens": 4, **said("Hi")}
TOOL = {"name": "f", "input_schema": ROME}
MESSAGE_BODIES: dict[str, Any] = {
    **BYTES,
    **{name: HI | fields for name, fields in SHARED.items()},
    "nothing": {},
    "no messages": {"max_tokens": 4},
    "no max_tokens": {"messages": HI["messages"]},
    "max_tokens 0": HI | wrong(max_tokens=0),
    "max_tokens negative": HI | wrong(max_tokens=-4),
    "max_tokens a text": HI | wrong(max_tokens="8"),
    "max_tokens a fraction": HI | wrong(max_tokens=1.5),
    "max_tokens null": HI | wrong(max_tokens=None),
    "messages empty": HI | wrong(messages=[]),
    "messages a text": HI | wrong(messages="Hi"),
    "messages an object": HI | wrong(messages={"role": "user", "content": "Hi"}),
    "message a text": HI | wrong(messages=["Hi"]),
    "message null": HI | wrong(messages=[None]),
    "no role": HI | wrong(messages=[{"content": "Hi"}]),
    "unknown role": HI | said("Hi", "robot"),
    "role of OpenAI": HI | said("Hi", "tool"),
    "no content": HI | wrong(messages=[{"role": "user"}]),
    "content null": HI | said(None),
    "content a number": HI | said(5),
    "content of numbers": HI | said([1]),
    "a part without a type": HI | said([{"text": "Hi"}]),
    "a part without text": HI | said([{"type": "text"}]),
    "an image": HI | said([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}]),
    "a document": HI
    | said([{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}]),
    "an image in a result": HI | said([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}]),
    "a result of numbers": HI | said([{"type": "tool_result", "tool_use_id": "a", "content": [3]}]),
    "half a character": b'{"max_tokens": 4, "messages": [{"role": "user", "content": "\\ud83d"}]}',
    "a turn to be continued": HI | said("The answer is", "assistant"),
    "a call without a name": HI
    | wrong(messages=[{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, *HI["messages"]]),
    "a call whose input is a text": HI
    | wrong(
        messages=[
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "b"}]},
            *HI["messages"],
        ]
    ),
    "system a number": HI | wrong(system=4),
    "system an image": HI | wrong(system=[{"type": "image"}]),
    "stop_sequences a text": HI | wrong(stop_sequences="a"),
    "stop_sequences of an empty text": HI | wrong(stop_sequences=[""]),
    "stop_sequences too many": HI | wrong(stop_sequences=[str(number) for number in range(100)]),
    "stop_sequences too long": HI | wrong(stop_sequences=["a" * 2000]),
    "temperature above 1": HI | wrong(temperature=1.5),
    "top_k a text": HI | wrong(top_k="4"),
    "top_k negative": HI | wrong(top_k=-1),
    "a tool of the makers": HI | wrong(tools=[{"type": "bash_20250124", "name": "bash"}]),
    "a tool without input_schema": HI | wrong(tools=[{"name": "f"}]),
    "a tool whose schema is a text": HI | wrong(tools=[{"name": "f", "input_schema": "a"}]),
    "tool_choice a text": HI | wrong(tools=[TOOL], tool_choice="auto"),
    "tool_choice unknown": HI | wrong(tools=[TOOL], tool_choice={"type": "required"}),
    "tool_choice of no tool": HI | wrong(tools=[TOOL], tool_choice={"type": "tool", "name": "g"}),
    "tool_choice any and a schema": HI
    | wrong(
        tools=[TOOL],
        tool_choice={"type": "any"},
        output_config={"format": {"type": "json_schema", "schema": ROME}},
    ),
    "thinking a bool": HI | wrong(thinking=True),
    "thinking unknown": HI | wrong(thinking={"type": "deep"}),
    "thinking without budget": HI | wrong(thinking={"type": "enabled", "budget_tokens": 0}),
    "output_config unknown": HI | wrong(output_config={"style": "plain"}),
    "schema without a type": HI | wrong(output_config={"format": {"schema": ROME}}),
    "schema that nothing matches": HI
    | wrong(output_config={"format": {"type": "json_schema", "schema": {"enum": []}}}),
    "schema broken": HI | wrong(output_config={"format": {"type": "json_schema", "schema": {"type": "person"}}}),
    "100,000 tokens": HI | said("one two three " * 34_000),
}

ASKED = {"model": "demo", "input": "Hi"}
FUNCTION = {"type": "function", "name": "f", "parameters": ROME}


def item(**fields: Any) -> dict[str, Any]:
    return ASKED | {"input": [fields]}


def form(schema: Any) -> dict[str, Any]:
    return ASKED | {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}


RESPONSE_BODIES: dict[str, Any] = {
    **BYTES,
    **{name: ASKED | fields for name, fields in SHARED.items()},
    "nothing": {},
    "no input": {"model": "demo"},
    "input null": {"input": None},
    "input a number": {"input": 4},
    "input empty": {"input": []},
    "input of texts": {"input": ["Hi"]},
    "an item null": {"input": [None]},
    "half a character": b'{"input": "\\udc00"}',
    "no role": item(content="Hi"),
    "unknown role": item(role="robot", content="Hi"),
    "role of a chat": item(role="tool", content="Hi"),
    "content a number": item(role="user", content=4),
    "a part without a type": item(role="user", content=[{"text": "Hi"}]),
    "a part without text": item(role="user", content=[{"type": "input_text"}]),
    "an image": item(role="user", content=[{"type": "input_image", "image_url": "https://example.com/a"}]),
    "a file": item(role="user", content=[{"type": "input_file", "file_data": "aGk="}]),
    "an item of another type": item(type="web_search_call", id="a"),
    "a reference": item(type="item_reference", id="a"),
    "a call without a name": item(type="function_call", call_id="a", arguments="{}"),
    "a call without an id": item(type="function_call", name="f", arguments="{}"),
    "a call whose arguments are no JSON": item(type="function_call", call_id="a", name="f", arguments="{"),
    "a call whose arguments are an object": item(type="function_call", call_id="a", name="f", arguments={}),
    "an output without an id": item(type="function_call_output", output="a"),
    "an output that is an image": item(
        type="function_call_output", call_id="a", output=[{"type": "input_image", "image_url": "a"}]
    ),
    "instructions a list": ASKED | wrong(instructions=["a"]),
    "max_output_tokens 0": ASKED | wrong(max_output_tokens=0),
    "max_output_tokens a text": ASKED | wrong(max_output_tokens="8"),
    "max_tokens of a chat": ASKED | wrong(max_tokens=8),
    "top_logprobs too many": ASKED | wrong(top_logprobs=99),
    "include unknown": ASKED | wrong(include=["file_search_call.results"]),
    "include a text": ASKED | wrong(include="reasoning.encrypted_content"),
    "store": ASKED | wrong(store=True),
    "background": ASKED | wrong(background=True),
    "previous_response_id": ASKED | wrong(previous_response_id="resp_1"),
    "conversation": ASKED | wrong(conversation={"id": "conv_1"}),
    "prompt": ASKED | wrong(prompt={"id": "pmpt_1"}),
    "truncation": ASKED | wrong(truncation="auto"),
    "verbosity": ASKED | wrong(text={"verbosity": "low"}),
    "reasoning a text": ASKED | wrong(reasoning="high"),
    "reasoning unknown": ASKED | wrong(reasoning={"mode": "pro"}),
    "stream_options unknown": ASKED | wrong(stream_options={"include_usage": True}),
    "a tool of the makers": ASKED | wrong(tools=[{"type": "file_search", "vector_store_ids": ["a"]}]),
    "a free-form tool": ASKED | wrong(tools=[{"type": "custom", "name": "patch"}]),
    "a function in the form of chats": ASKED | wrong(tools=[{"type": "function", "function": {"name": "f"}}]),
    "tool_choice unknown": ASKED | wrong(tools=[FUNCTION], tool_choice="any"),
    "tool_choice of no tool": ASKED | wrong(tools=[FUNCTION], tool_choice={"type": "function", "name": "g"}),
    "tool_choice of the makers": ASKED | wrong(tools=[FUNCTION], tool_choice={"type": "file_search"}),
    "tool_choice and a schema": form(ROME) | wrong(tools=[FUNCTION], tool_choice="required"),
    "format unknown": ASKED | wrong(text={"format": {"type": "xml"}}),
    "format without schema": ASKED | wrong(text={"format": {"type": "json_schema", "name": "a"}}),
    "schema broken": form({"type": "person"}),
    "schema that nothing matches": form({"enum": []}),
    "100,000 tokens": {"input": "one two three " * 34_000},
}


@pytest.mark.parametrize("body", MESSAGE_BODIES.values(), ids=MESSAGE_BODIES)
def test_messages(server: RunningServer, body: Any) -> None:
    status, found = server.ask(MESSAGES, body)
    assert status in (400, 404, 413), found
    assert (set(found), found["type"], set(found["error"])) == ({"type", "error"}, "error", {"type", "message"})
    assert found["error"]["type"] in ("invalid_request_error", "not_found_error", "request_too_large")
    assert found["error"]["message"] and "\n" not in found["error"]["message"]


@pytest.mark.parametrize("body", RESPONSE_BODIES.values(), ids=RESPONSE_BODIES)
def test_responses(server: RunningServer, body: Any) -> None:
    status, found = server.ask(RESPONSES, body)
    assert status in (400, 404, 413), found
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["message"] and "\n" not in found["error"]["message"]


def test_the_fault_of_an_item_is_named(server: RunningServer) -> None:
    assert server.ask(RESPONSES, item(role="robot", content="Hi"))[1]["error"]["param"] == "input.0.role"
    assert server.ask(MESSAGES, HI | said([1]))[1]["error"]["message"].startswith("messages.0.content.0: ")


def test_both_lists_are_long() -> None:
    assert min(len(MESSAGE_BODIES), len(RESPONSE_BODIES)) >= 80
