"""The line for each finished request: its figures, the status of failures, and nothing that was said."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from hdtool.data.errors import OptionError
from hdtool.runtime.integrations.server.endpoints import ApiKeys, Server
from hdtool.runtime.integrations.server.request_log import RequestLog
from hdtool.runtime.settings.serving import ServerConfig
from hdtool.runtime.target.load import Loaded
from tests.support.server import ALWAYS_DRAFTS, RunningServer

CHAT = "/v1/chat/completions"
TIMEOUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that no other test asks, so that each line of its log belongs to a request from here."""
    log = tmp_path_factory.mktemp("logged") / "log"
    with RunningServer(log, str(model), "--served-model-name", "demo", *ALWAYS_DRAFTS) as running:
        yield running


def logged(server: RunningServer, ask: Callable[[], Any]) -> dict[str, str]:
    """The fields of the line that a request adds to the log."""
    before = len(server.log)
    ask()
    ends = time.monotonic() + TIMEOUT_SECONDS
    while not (lines := re.findall(r"^\S+Z (?:GET|POST) .*\n", server.log[before:], re.MULTILINE)):
        assert time.monotonic() < ends, server.log[before:]
        time.sleep(0.05)
    assert len(lines) == 1, lines
    _, method, path, status, *named = lines[0].split()
    return {"method": method, "path": path, "status": status, **dict(word.split("=") for word in named)}


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 20, "temperature": 0, **more}


def left_early(server: RunningServer, **more: Any) -> None:
    """Ask for a long answer and close the connection while it is made."""
    long = {"max_tokens": 4000, "n": 8, "logit_bias": {"0": -100}}
    asked = json.dumps(body("Count up to a million.") | long | more).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(asked)}\r\n\r\n".encode() + asked)
        if more.get("stream"):
            assert client.recv(20).startswith(b"HTTP/1.1 200")
        else:
            time.sleep(0.2)  # the eight answers take seconds


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_logged_with_its_figures(server: RunningServer, stream: bool) -> None:
    secret = f"Xylophone {stream}"
    usage: dict[str, Any] = {}

    def ask() -> None:
        nonlocal usage
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        headers = {"Authorization": "Bearer key-of-a-client"}
        status, answer = server.ask(CHAT + "?key=key-of-a-client", body(secret, **more), headers=headers)
        assert status == 200
        usage = json.loads(answer.split("data: ")[-2])["usage"] if stream else answer["usage"]

    found = logged(server, ask)
    assert (found["method"], found["path"], found["status"], found["model"]) == ("POST", CHAT, "200", "demo")
    assert int(found["prompt_tokens"]) == usage["prompt_tokens"]
    assert int(found["completion_tokens"]) == usage["completion_tokens"]
    assert int(found["cached_tokens"]) == usage["prompt_tokens_details"]["cached_tokens"]
    assert float(found["tokens_per_step"]) >= 1 and float(found["tokens_per_second"]) > 0
    assert "error" not in found and "tenant" not in found
    assert "Xylophone" not in server.log and "key-of-a-client" not in server.log


def test_a_prompt_that_was_read_before_has_tokens_from_the_prefix(server: RunningServer) -> None:
    question = body("What is the prefix of a prompt that a server has read before, for another request?")
    logged(server, lambda: server.ask(CHAT, question))
    assert int(logged(server, lambda: server.ask(CHAT, question))["cached_tokens"]) > 0


@pytest.mark.parametrize(
    ("path", "asked", "status", "error"),
    [
        (CHAT, b"{", "400", "invalid_request_error"),
        (CHAT, body("Hi", model="Xylophone"), "404", "model_not_found"),
        (CHAT, body("Xylophone " * 40_000), "400", "context_length_exceeded"),
        ("/v1/embeddings", {}, "404", "invalid_request_error"),
        ("/v1/a%0Ab%20c", {}, "404", "invalid_request_error"),
    ],
)
def test_failures_are_logged_by_status_and_code(
    server: RunningServer, path: str, asked: Any, status: str, error: str
) -> None:
    found = logged(server, lambda: server.ask(path, asked))
    assert (found["path"], found["status"], found["error"]) == (path, status, error)
    assert "prompt_tokens" not in found
    assert "Xylophone" not in server.log


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_logged(server: RunningServer, stream: bool) -> None:
    found = logged(server, lambda: left_early(server, **({"stream": True} if stream else {})))
    assert found["status"] == "499" and found["model"] == "demo"
    assert int(found["completion_tokens"]) < 8 * 900


def test_a_client_that_leaves_while_it_asks(server: RunningServer) -> None:
    def ask() -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{{".encode())

    assert logged(server, ask)["status"] == "499"


def test_polls_are_not_logged(server: RunningServer) -> None:
    before = len(server.log)
    assert server.ask("/health")[0] == server.ask("/metrics")[0] == 200
    server.ask("/v1/models")
    time.sleep(0.2)
    lines = server.log[before:].splitlines()
    assert len(lines) == 1 and " GET /v1/models 200 seconds=" in lines[0]


def finished(capsys: pytest.CaptureFixture[str], *, shown: bool = True, form: str = "text", fails: bool = False) -> str:
    """What the log prints for one request to an application of two lines."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if fails:
            raise RuntimeError("Xylophone")
        await send({"type": "http.response.start", "status": 204})

    async def send(message: Any) -> None: ...

    scope = {"type": "http", "method": "GET", "path": "/v1/models\n", "headers": []}
    try:
        asyncio.run(RequestLog(app, shown=shown, form=form)(scope, None, send))  # type: ignore[arg-type]
    except RuntimeError:
        assert fails
    return capsys.readouterr().err


def test_the_log_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    row = json.loads(finished(capsys, form="json"))
    assert list(row) == ["time", "method", "path", "status", "seconds"]
    assert (row["method"], row["path"], row["status"]) == ("GET", "/v1/models%0A", 204)


def test_a_log_that_is_turned_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert finished(capsys, shown=False) == ""
    assert finished(capsys).count("\n") == 1


def test_a_fault_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    printed = finished(capsys, fails=True)
    assert " GET /v1/models%0A 500 " in printed and "Xylophone" not in printed


def test_forms_of_the_log() -> None:
    with pytest.raises(OptionError, match="--log-format must be one of text, json, got xml"):
        ServerConfig(log_format="xml")


def test_a_failure_of_the_server_is_counted(loaded: Loaded) -> None:
    nothing: Any = SimpleNamespace(running=0, waiting=0, prefixes=None)
    served = Server(loaded, nothing, nothing, ApiKeys({}), ServerConfig(log_requests=False), "demo")
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(body("Hi")).encode(), "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    with pytest.raises(AttributeError):
        asyncio.run(served.app()(scope, receive, send))
    assert sent[0]["status"] == 500
    assert f'hdtool_requests_total{{path="{CHAT}",status="500"}} 1.0' in served._metrics.text().decode()
