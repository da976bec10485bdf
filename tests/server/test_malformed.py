"""Requests that are refused: each gets a 4xx in OpenAI's form, and a stream beside them is not disturbed."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast
from unittest.mock import Mock

import h11
import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from hdtool.runtime.integrations.server.app import HEADER_SECONDS, TimedProtocol
from hdtool.runtime.target.load import Loaded
from tests.server.plain import plain_text
from tests.support.server import RunningServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
DEEP: Any = {"type": "object"}
for _ in range(400):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


def form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


BODIES: dict[str, Any] = {
    "empty": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "a list": [],
    "a text": b'"hello"',
    "null": b"null",
    "a number": b"17",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "NaN": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "huge number": b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e400}',
    "no messages": {},
    "messages empty": {"messages": []},
    "messages a text": {"messages": "Hi"},
    "messages an object": {"messages": {"role": "user", "content": "Hi"}},
    "message a text": {"messages": ["Hi"]},
    "message null": {"messages": [None]},
    "no role": {"messages": [{"content": "Hi"}]},
    "unknown role": {"messages": [{"role": "robot", "content": "Hi"}]},
    "no content": {"messages": [{"role": "user"}]},
    "content a number": {"messages": [{"role": "user", "content": 5}]},
    "content null": {"messages": [{"role": "user", "content": None}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
    "a part without text": {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    "half a character": b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
    "unknown model": {"messages": HI, "model": "gpt-9"},
    "model a number": {"messages": HI, "model": 3},
    "max_tokens 0": {"messages": HI, "max_tokens": 0},
    "max_tokens negative": {"messages": HI, "max_tokens": -4},
    "max_tokens a text": {"messages": HI, "max_tokens": "8"},
    "max_tokens a fraction": {"messages": HI, "max_tokens": 1.5},
    "max_completion_tokens a list": {"messages": HI, "max_completion_tokens": [1]},
    "temperature a text": {"messages": HI, "temperature": "warm"},
    "temperature negative": {"messages": HI, "temperature": -0.1},
    "temperature too high": {"messages": HI, "temperature": 2.5},
    "top_p 0": {"messages": HI, "top_p": 0},
    "top_p above 1": {"messages": HI, "top_p": 1.01},
    "top_k a text": {"messages": HI, "top_k": "4"},
    "n 0": {"messages": HI, "n": 0},
    "n too large": {"messages": HI, "n": 1000},
    "n a bool": {"messages": HI, "n": True},
    "seed a text": {"messages": HI, "seed": "1"},
    "seed too large": {"messages": HI, "seed": 2**70},
    "stop a number": {"messages": HI, "stop": 3},
    "stop empty": {"messages": HI, "stop": ""},
    "too many stops": {"messages": HI, "stop": [str(number) for number in range(100)]},
    "stop too long": {"messages": HI, "stop": "a" * 2000},
    "stream a text": {"messages": HI, "stream": "yes"},
    "stream_options a list": {"messages": HI, "stream": True, "stream_options": []},
    "logprobs a number": {"messages": HI, "logprobs": 3},
    "top_logprobs too many": {"messages": HI, "logprobs": True, "top_logprobs": 99},
    "logit_bias a list": {"messages": HI, "logit_bias": [1]},
    "logit_bias of a word": {"messages": HI, "logit_bias": {"hello": 1}},
    "logit_bias of no token": {"messages": HI, "logit_bias": {"99999999": 1}},
    "logit_bias too large": {"messages": HI, "logit_bias": {"5": 1000}},
    "presence_penalty too large": {"messages": HI, "presence_penalty": 3},
    "frequency_penalty a text": {"messages": HI, "frequency_penalty": "1"},
    "response_format a text": {"messages": HI, "response_format": "json"},
    "response_format unknown": {"messages": HI, "response_format": {"type": "xml"}},
    "response_format without schema": {"messages": HI, "response_format": {"type": "json_schema"}},
    "schema a number": {"messages": HI, **form(5)},
    "schema of an unknown type": {"messages": HI, **form({"type": "person"})},
    "schema that nothing matches": {"messages": HI, **form(False)},
    "schema with an endless reference": {
        "messages": HI,
        **form({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    },
    "schema with a reference to nothing": {"messages": HI, **form({"$ref": "#/$defs/a"})},
    "schema of another place": {"messages": HI, **form({"$ref": "https://example.com/schema"})},
    "schema of endless items": {"messages": HI, **form({"type": "array", "minItems": 10**9, "items": {"const": 1}})},
    "schema of endless properties": {
        "messages": HI,
        **form({"type": "object", "required": [f"p{number}" for number in range(100_000)]}),
    },
    "regex broken": {"messages": HI, "regex": "("},
    "regex bomb": {"messages": HI, "regex": "(a{1000}){1000}{1000}"},
    "grammar broken": {"messages": HI, "grammar": "start: ("},
    "grammar and regex": {"messages": HI, "grammar": 'start: "a"', "regex": "a"},
    "tools an object": {"messages": HI, "tools": {}},
    "tool without a name": {"messages": HI, "tools": [{"type": "function", "function": {}}]},
    "tool_choice without tools": {"messages": HI, "tool_choice": "required"},
    "tool_choice unknown": {
        "messages": HI,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function", "function": {"name": "g"}},
    },
    **{
        f"template variable {name}": {"messages": HI, "chat_template_kwargs": {name: []}}
        for name in ("self", "messages", "conversations", "tools", "raise_exception")
    },
    "functions": {"messages": HI, "functions": [{"name": "f"}]},
    "audio": {"messages": HI, "modalities": ["audio"], "audio": {"voice": "a"}},
    "prediction empty": {"messages": HI, "prediction": {"type": "content", "content": ""}},
    "prediction a number": {"messages": HI, "prediction": 3},
    "arguments that are no JSON": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]
    },
    "100,000 tokens": {"messages": [{"role": "user", "content": "one two three " * 34_000}]},
    "a body of 9 MiB": b'{"messages": [{"role": "user", "content": "' + b"a" * 9 * 2**20 + b'"}]}',
}
COMPLETION_BODIES: dict[str, Any] = {
    "no prompt": {},
    "prompt null": {"prompt": None},
    "prompt a number": {"prompt": 4},
    "prompt empty": {"prompt": []},
    "prompt of no tokens": {"prompt": [[]]},
    "token that does not exist": {"prompt": [10**9]},
    "token negative": {"prompt": [-1]},
    "texts and tokens": {"prompt": ["a", 1]},
    "too many prompts": {"prompt": ["a"] * 1000},
    "half a character": b'{"prompt": "\\udc00"}',
    "best_of": {"prompt": "a", "best_of": 4},
    "suffix": {"prompt": "a", "suffix": "b"},
    "logprobs a bool": {"prompt": "a", "logprobs": True},
    "echo and logprobs": {"prompt": "a", "echo": True, "logprobs": 0},
    "echo a text": {"prompt": "a", "echo": "yes"},
}


def assert_refused(status: int, body: Any, *statuses: int) -> None:
    assert status in (statuses or (400, 404, 413)), body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and "\n" not in body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_chat_requests(server: RunningServer, body: Any) -> None:
    assert_refused(*server.ask(CHAT, body))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
        {"type": "file", "file": {"file_data": "aGk="}},
        {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}},
    ],
    ids=lambda part: str(part["type"]),
)
def test_parts_that_are_no_text_are_named(server: RunningServer, part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "What is this?"}, part]
    status, found = server.ask(CHAT, {"messages": [*HI, {"role": "user", "content": content}]})
    assert_refused(status, found, 400)
    assert found["error"]["message"] == (
        f"this server answers text only, and part 2 of messages.1 is of type '{part['type']}': leave it out, or "
        "describe it in a part of type 'text'"
    )
    assert found["error"]["param"] == "messages.1.content.1.type" and found["error"]["code"] == "unsupported_content"


@pytest.mark.parametrize(
    "asked", [{"modalities": ["text", "audio"], "audio": {"voice": "a"}}, {"audio": {"voice": "a"}}]
)
def test_sound_is_not_answered(server: RunningServer, asked: dict[str, Any]) -> None:
    status, found = server.ask(CHAT, {"messages": HI, **asked})
    assert_refused(status, found, 400)
    assert found["error"]["message"].startswith("this server answers text only, and the request asks for 'audio'")


@pytest.mark.parametrize("body", COMPLETION_BODIES.values(), ids=COMPLETION_BODIES)
def test_completion_requests(server: RunningServer, body: Any) -> None:
    assert_refused(*server.ask(COMPLETIONS, body))


def test_paths_and_methods(server: RunningServer) -> None:
    assert_refused(*server.ask("/v1/nothing"), 404)
    assert_refused(*server.ask("/"), 404)
    assert_refused(*server.ask(CHAT), 405)
    assert "does not take GET: use POST" in server.ask(CHAT)[1]["error"]["message"]
    assert_refused(*server.ask("/v1/models", {}), 405)
    assert_refused(*server.ask("/v1/models/" + "a" * 5000), 404)


def test_a_stream_beside_refused_requests_is_the_one_given_alone(server: RunningServer, loaded: Loaded) -> None:
    expected = plain_text(loaded, "What is a tuple?", 120)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    asked = {"messages": [{"role": "user", "content": "What is a tuple?"}], "max_tokens": 120, "temperature": 0}
    connection.request("POST", CHAT, json.dumps({**asked, "stream": True}))
    response = connection.getresponse()
    refused = iter((*BODIES.values(), None))
    text = ""
    while line := response.readline():
        if line.startswith(b"data: {"):
            text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            if (body := next(refused, None)) is not None:
                assert server.ask(CHAT, body)[0] >= 400
    connection.close()
    assert text == expected


@pytest.mark.parametrize(("path", "status"), [(CHAT, 413), ("/v1/nothing", 404), ("/v1/models", 405)])
def test_a_client_that_closes_the_connection_reads_why_its_large_body_is_refused(
    server: RunningServer, path: str, status: int
) -> None:
    """As ``urllib`` does; the server must not close a connection with unread data, which resets it."""
    body = cast(bytes, BODIES["a body of 9 MiB"])
    assert_refused(*server.ask(path, body, headers={"Connection": "close"}), status)


def test_a_client_that_asks_first_need_not_send_a_large_body(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(60)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: {9 * 2**20}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_arrive(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{{".encode())
        slow.settimeout(60)
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"a" * 100_000,
    ],
)
def test_what_is_no_http(server: RunningServer, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(60)
        connection.sendall(sent)
        assert connection.recv(12).startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("answered", range(3))
def test_a_request_that_does_not_arrive_on_an_open_connection(answered: int) -> None:
    timers: list[Callable[[], None]] = []

    class Loop:
        @staticmethod
        def call_later(seconds: float, call: Callable[..., None], *given: Any) -> Mock:
            if seconds == HEADER_SECONDS:
                timers.append(partial(call, *given))
            return Mock()

        @staticmethod
        def create_task(answer: Coroutine[Any, Any, None]) -> Mock:
            answer.close()
            return Mock()

    transport = Mock(**{"is_closing.return_value": False, "get_extra_info.return_value": None})
    protocol = TimedProtocol(Config(Mock()), ServerState(), {}, _loop=cast(Any, Loop))
    protocol.connection_made(transport)
    for _ in range(answered):
        protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert len(protocol.tasks) == 1
        timers.pop()()
        transport.close.assert_not_called()
        protocol.tasks.clear()
        for event in (h11.Response(status_code=204, headers=[]), h11.EndOfMessage()):
            protocol.conn.send(event)
        protocol.on_response_complete()
    protocol.data_received(b"GET / HTTP/1.1\r\nHo")
    timers.pop()()
    transport.close.assert_called_once()
