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

from hdtool.runtime.integrations.server.endpoints import HEADER_SECONDS, TimedProtocol
from hdtool.runtime.target.load import Loaded
from tests.server.malformed_bodies import (
    BYTES,
    CHAT_BODIES,
    COMPLETION_BODIES,
    HI,
    MESSAGE_BODIES,
    RESPONSE_BODIES,
    item,
    said,
)
from tests.server.plain import plain_text
from tests.support.server import RunningServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def assert_refused(status: int, body: Any, *statuses: int) -> None:
    assert status in (statuses or (400, 404, 413)), body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and "\n" not in body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", CHAT_BODIES.values(), ids=CHAT_BODIES)
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
    status, found = server.ask(CHAT, {"messages": [*HI["messages"], {"role": "user", "content": content}]})
    assert_refused(status, found, 400)
    assert found["error"]["message"] == (
        f"messages.1.content.1: this server takes text only, and this part is of type '{part['type']}': leave it out, "
        "or describe it in a part of type 'text'"
    )
    assert found["error"]["param"] == "messages.1.content.1.type" and found["error"]["code"] == "unsupported_content"


@pytest.mark.parametrize(
    "asked", [{"modalities": ["text", "audio"], "audio": {"voice": "a"}}, {"audio": {"voice": "a"}}]
)
def test_sound_is_not_answered(server: RunningServer, asked: dict[str, Any]) -> None:
    status, found = server.ask(CHAT, {**said("Hi"), **asked})
    assert_refused(status, found, 400)
    assert found["error"]["message"].startswith("this server answers text only, and the request asks for 'audio'")


@pytest.mark.parametrize("body", COMPLETION_BODIES.values(), ids=COMPLETION_BODIES)
def test_openai_requests(server: RunningServer, body: Any) -> None:
    assert_refused(*server.ask(COMPLETIONS, body))


@pytest.mark.parametrize("body", MESSAGE_BODIES.values(), ids=MESSAGE_BODIES)
def test_messages(server: RunningServer, body: Any) -> None:
    status, found = server.ask(MESSAGES, body)
    assert status in (400, 404, 413), found
    assert (set(found), found["type"], set(found["error"])) == ({"type", "error"}, "error", {"type", "message"})
    assert found["error"]["type"] in ("invalid_request_error", "not_found_error", "request_too_large")
    assert found["error"]["message"] and "\n" not in found["error"]["message"]


@pytest.mark.parametrize("body", RESPONSE_BODIES.values(), ids=RESPONSE_BODIES)
def test_responses(server: RunningServer, body: Any) -> None:
    assert_refused(*server.ask(RESPONSES, body))


def test_the_fault_of_an_item_is_named(server: RunningServer) -> None:
    assert (
        server.ask(RESPONSES, {"model": "demo"} | item(role="robot", content="Hi"))[1]["error"]["param"]
        == "input.0.role"
    )
    assert server.ask(MESSAGES, HI | said([1]))[1]["error"]["message"].startswith("messages.0.content.0: ")


def test_paths_and_methods(server: RunningServer) -> None:
    assert_refused(*server.ask("/v1/nothing"), 404)
    assert_refused(*server.ask("/nothing"), 404)
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
    refused = iter((*CHAT_BODIES.values(), None))
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
    body = BYTES["a body of 9 MiB"]
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
