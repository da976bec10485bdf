"""The life of a server: start, keys and tenants, limits, metrics, the end."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.errors import OptionError
from hdtool.runtime.integrations.server.endpoints import ApiKeys
from hdtool.runtime.integrations.server.request_log import RequestLog
from hdtool.runtime.integrations.server.start_server import ServerLaunch, _GracefulServer
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.settings.serving import ServerConfig
from tests.support.server import RunningServer

CHAT = "/v1/chat/completions"
STORES = ("--model-db", str(demo.MODEL_STORE), "--corpus-db", str(demo.CORPUS_INDEX))


COMPILING = """
import gc, json, os, signal, sys, threading, urllib.request
from numba.core.registry import CPUDispatcher
from hdtool.data import demo
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.serving import ServerConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.integrations.server.start_server import ServerLaunch

def found():
    return {f for f in gc.get_objects() if isinstance(f, CPUDispatcher)}

def ask(**options):
    body = {"messages": [{"role": "user", "content": "Count to ten, and again."}], "max_tokens": 24, **options}
    request = urllib.request.Request(launch.address + "/chat/completions", json.dumps(body).encode())
    urllib.request.urlopen(request).read()

def client():
    ask(temperature=0)
    ask(temperature=1)
    ask(temperature=0.8, top_p=0.9, top_k=20, presence_penalty=0.5)
    ask(temperature=0, regex="[a-z ]{5,40}")
    ask(temperature=1, regex="[a-z ]{5,40}", n=3)
    ask(temperature=0, prediction={"type": "content", "content": "one two three four five six"}, n=2)
    print(sorted(f.__name__ for f in known | found() if set(f.signatures) - before.get(f, set())), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

stores = StoresConfig(str(demo.MODEL_STORE), str(demo.CORPUS_INDEX))
decoding = DecodeConfig(draft_tokens=int(sys.argv[1]) or None, batch_size=4)
launch = ServerLaunch(ModelConfig(threads=1), decoding, SamplingConfig(), stores, ServerConfig(port=0))
known = found()  # a server that runs has frozen them, which hides them
before = {f: set(f.signatures) for f in known}
threading.Thread(target=client).start()
launch.run()
"""


@pytest.mark.long
@pytest.mark.parametrize("draft_tokens", [0, 16])
def test_no_answer_of_a_server_waits_for_the_compiler(draft_tokens: int) -> None:
    command = [sys.executable, "-c", COMPILING, str(draft_tokens)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def asked(question: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "max_tokens": 16, "temperature": 0, **options}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.long
def test_keys_tenants_limits_and_the_end_of_a_server(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("# ours\nacme one\nglobex two\n\nthree\n")
    options = (*STORES, "--api-key-file", str(keys), "--batch-size", "1", "--max-waiting", "2", "--history")
    with RunningServer(tmp_path / "log", *options, str(tmp_path / "history")) as server:
        assert server.ask("/health") == (200, {"status": "ok"})
        for wrong in ({}, bearer("four"), {"Authorization": "Basic one"}, bearer("")):
            status, body = server.ask(CHAT, asked("Hi"), headers=wrong)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        question = "What are the main differences between lists, tuples, dictionaries and sets in Python?"
        assert _cached(server, question, "one") == 0
        assert _cached(server, question, "two") == 0, "tenants share no contexts"
        assert _cached(server, question, "two") > 0
        status, body = server.ask(CHAT, asked("Hi", n=3), headers=bearer("three"))
        assert (
            status == 400 and "asks for 3 answers, and this server takes at most 2 at once" in body["error"]["message"]
        )
        status, metrics = server.ask("/metrics")
        assert status == 200
        assert 'hdtool_requests_total{path="/v1/chat/completions",status="401"} 4.0' in metrics
        assert "hdtool_generated_tokens_total" in metrics
        assert "hdtool_running_answers 0.0" in metrics
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", CHAT, json.dumps(asked("Tell me more.", max_tokens=200, stream=True)), bearer("one"))
        response = connection.getresponse()
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        assert response.read().endswith(b"data: [DONE]\n\n"), "an answer in progress is completed"
        connection.close()
        assert server.process.wait(60) == 0
    assert "Traceback" not in server.log
    assert sorted(folder.name for folder in (tmp_path / "history").iterdir() if folder.is_dir()) == ["acme", "globex"]
    assert run(["inspect", str(tmp_path / "history" / "acme")]) == 0


def _cached(server: RunningServer, question: str, key: str) -> int:
    status, body = server.ask(CHAT, asked(question), headers=bearer(key))
    assert status == 200, body
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.long
def test_a_server_stops_in_time_although_an_answer_goes_on(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "log", *STORES, "--shutdown-seconds", "1", "--max-new-tokens", "100000") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", CHAT, json.dumps(asked("Go on.", n=16, max_tokens=900, stream=True)))
        response = connection.getresponse()
        response.readline()
        assert server.stop() == 0
        assert response.read().rstrip().endswith(b"}}"), "the last event is an error"
        connection.close()
    assert "Traceback" not in server.log


def test_a_second_interrupt_ends_the_answers_at_once() -> None:
    ended: list[str] = []
    engine: Any = SimpleNamespace(stop=lambda: ended.append("stop"))
    server = _GracefulServer(uvicorn.Config(RequestLog), engine, 10**6)
    for _ in range(2):
        server.handle_exit(signal.SIGINT, None)
    assert server.should_exit and not server.force_exit, "clients get an error"
    asyncio.run(server._end_answers())
    assert ended == ["stop"]


@pytest.mark.long
def test_an_answer_that_nobody_reads_is_not_generated(tmp_path: Path) -> None:
    idle = {"hdtool_running_answers 0.0", "hdtool_waiting_answers 0.0"}
    with RunningServer(tmp_path / "log", *STORES) as server:
        for stream in (True, False):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("POST", CHAT, json.dumps(asked("Go on.", n=16, max_tokens=900, stream=stream)))
            while "hdtool_running_answers 0.0" in server.ask("/metrics")[1]:
                time.sleep(0.01)
            connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
            ended = time.monotonic() + 30
            while not idle <= set(server.ask("/metrics")[1].splitlines()):
                assert time.monotonic() < ended, "answers go on that nobody reads"


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "other"], "--engine must be hdtool or vllm, got other"),
        (["--port", "70000"], "--port must be between 0 and 65535"),
        (["--unknown"], "No such option"),
        (["--api-key-file", "missing.txt"], "missing.txt"),
    ],
)
def test_options_that_are_wrong(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *words]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "# nothing\n", "a b c\n", "one\none\n", "../up key\n"])
def test_files_of_keys_that_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(OptionError, match="keys"):
        ApiKeys.read(path, {})


def test_by_default_a_server_is_reached_from_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HDTOOL_API_KEY", raising=False)
    decoding, nowhere = DecodeConfig("ar"), StoresConfig(model_db="none", corpus_db="none")
    assert ServerConfig().host == "127.0.0.1" and ServerConfig().port == 8000

    def warned(host: str) -> bool:
        launch = ServerLaunch(ModelConfig(), decoding, SamplingConfig(), nowhere, ServerConfig(port=0, host=host))
        found = launch.warning
        launch._socket.close()
        return found is not None

    assert not warned("127.0.0.1") and warned("0.0.0.0")
    monkeypatch.setenv("HDTOOL_API_KEY", "secret")
    assert not warned("0.0.0.0")


def test_the_key_in_the_environment() -> None:
    keys = ApiKeys.read(None, {"HDTOOL_API_KEY": "secret"})
    assert keys.tenant("Bearer secret") == "" and keys.tenant("bearer secret") == ""
    assert keys.tenant("Bearer Secret") is None and keys.tenant(None) is None
    assert ApiKeys.read(None, {}).tenant(None) == ""
    sent = "Bearer ключ".encode().decode("latin-1")  # as servers read the bytes of a header
    assert ApiKeys.read(None, {"HDTOOL_API_KEY": "ключ"}).tenant(sent) == ""
