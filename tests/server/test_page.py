"""The chat page without a browser: its headers, what it may load, and the state and sources that it is given."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from hdtool.runtime.integrations.server.chat_page import chat_page
from hdtool.runtime.integrations.server.endpoints import ApiKeys, Server
from hdtool.runtime.settings.serving import ServerConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded
from tests.server.plain import plain_text
from tests.support.server import RunningServer

CHAT = "/v1/chat/completions"
QUESTION = "What are the main differences between lists, tuples, dictionaries and sets in Python?"
MARKUP = "<img src=x onerror=alert(1)>"


def got(server: RunningServer, method: str, path: str) -> tuple[http.client.HTTPResponse, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request(method, path)
        response = connection.getresponse()
        return response, response.read().decode()


def test_the_page_and_its_headers(server: RunningServer) -> None:
    response, text = got(server, "GET", "/")
    assert (response.status, response.getheader("content-type")) == (200, "text/html; charset=utf-8")
    assert text == chat_page()
    assert response.getheader("x-content-type-options") == "nosniff"
    assert response.getheader("referrer-policy") == "no-referrer"
    head, nothing = got(server, "HEAD", "/")
    assert head.status == 200 and not nothing
    assert head.getheader("content-security-policy") == response.getheader("content-security-policy")
    status, refused = server.ask("/", {})
    assert status == 405 and "/ does not take POST" in refused["error"]["message"]
    assert set(got(server, "POST", "/")[0].getheader("allow", "").split(", ")) == {"GET", "HEAD"}
    assert 'hdtool_requests_total{path="/",status="200"}' in server.ask("/metrics")[1]


def test_the_policy_admits_the_script_and_the_style_of_the_page_and_nothing_else(server: RunningServer) -> None:
    response, text = got(server, "GET", "/")
    header = response.getheader("content-security-policy") or ""
    policy = dict(rule.split(" ", 1) for rule in header.split("; "))
    for element in ("script", "style"):
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    assert policy["connect-src"] == "'self'"
    for forbidden in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        assert policy[forbidden] == "'none'"
    assert "unsafe" not in header


def test_the_page_names_no_other_host_and_sets_text_only() -> None:
    page = chat_page()
    assert not re.search(r"https?:|\bsrc=|@import|url\(|//[a-z]", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage|cookie\b", page)
    assert not re.search(r"<[^>]* on[a-z]+=", page) and 'style="' not in page
    requested = re.findall(r'\b(?:fetch|request)\(("[^"]*"|path)', page)
    assert sorted(requested) == ['"/v1/chat/completions"', '"/v1/status"', "path", "path"]


def test_each_token_names_its_source(server: RunningServer, loaded: Loaded) -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48, "temperature": 0}
    status, answer = server.ask(CHAT, asked | {"hdtool": {"sources": True}})
    assert status == 200, answer
    (choice,) = answer["choices"]
    tokens = choice["hdtool"]["tokens"]
    assert "".join(token.get("text", "") for token in tokens) == choice["message"]["content"]
    assert choice["message"]["content"] == plain_text(loaded, QUESTION, 48)
    assert len(tokens) == answer["usage"]["completion_tokens"]
    drafted = sum(token["source"] != "none" for token in tokens)
    assert drafted and choice["hdtool"]["steps"] == len(tokens) - drafted


def test_a_stream_names_the_tokens_of_each_step(server: RunningServer) -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48, "temperature": 0}
    whole = server.ask(CHAT, asked | {"hdtool": {"sources": True}})[1]["choices"][0]
    stream = server.ask(CHAT, asked | {"hdtool": {"sources": True}, "stream": True})[1]
    rows = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    steps = [row["choices"][0] for row in rows if "hdtool" in row["choices"][0]]
    assert all(step["hdtool"]["steps"] == 1 for step in steps)
    for step in steps:
        shown = "".join(token.get("text", "") for token in step["hdtool"]["tokens"])
        assert shown == step["delta"].get("content", "")
    text = "".join(token.get("text", "") for step in steps for token in step["hdtool"]["tokens"])
    assert text == whole["message"]["content"]


def test_an_answer_without_drafts_is_the_same(server: RunningServer) -> None:
    for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 5}):
        asked: dict[str, Any] = {"prompt": "A list in Python is", "max_tokens": 40, **sampling}
        drafted, plain = (
            server.ask("/v1/completions", asked | {"hdtool": {"drafts": drafts, "sources": True}})[1]["choices"][0]
            for drafts in (True, False)
        )
        assert plain["text"] == drafted["text"]
        assert {token["source"] for token in plain["hdtool"]["tokens"]} == {"none"}
        assert plain["hdtool"]["steps"] == len(plain["hdtool"]["tokens"])


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        ({"draft": False}, "hdtool.draft: this server does not know the field: leave it out"),
        ({"drafts": 0}, "hdtool.drafts: Input should be a valid boolean"),
        ([], "hdtool: Input should be an object"),
    ],
)
def test_extensions_that_are_refused(server: RunningServer, extension: Any, message: str) -> None:
    status, body = server.ask(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "hdtool": extension})
    assert (status, body["error"]["message"]) == (400, message)


def test_the_state_of_the_server(server: RunningServer) -> None:
    server.ask(CHAT, {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8})
    status, state = server.ask("/v1/status")
    assert (status, state["model"]) == (200, "demo")
    assert state["answers"] == {"running": 0, "waiting": 0, "max_running": 4}
    assert 0 <= state["cache"]["bytes"] <= state["cache"]["max_bytes"] == 2**30
    assert state["cache"]["slot_tokens"] > 8
    assert [store["kind"] for store in state["stores"]] == ["model", "corpus", "history"]
    assert state["stores"][1] == {"kind": "corpus", "name": "corpus", "inputs": ["documents.jsonl"], "tokens": 599984}
    assert state["sources"]["context"] == {"light": "#008888", "dark": "#22ffdd"}


def client(
    loaded: Loaded, keys: ApiKeys, config: ServerConfig, name: str = "demo", stores: StoreSet | None = None
) -> TestClient:
    """Return a client of a server that generates nothing; all tenants share the stores."""
    store_set = stores or StoreSet()
    counts = {"running": 0, "waiting": 0, "max_running": 8, "cached_tokens": 0}
    engine: Any = SimpleNamespace(**counts, prefixes=None, stores=lambda tenant: store_set)
    preparer: Any = SimpleNamespace()
    return TestClient(Server(loaded, engine, preparer, keys, config, name).app())


def test_a_server_with_keys_shows_the_page_to_all_and_its_state_to_who_has_one(loaded: Loaded) -> None:
    browser = client(loaded, ApiKeys({"one": "acme"}), ServerConfig(log_requests=False), "secret-model")
    assert browser.get("/").text == chat_page() and "secret-model" not in chat_page()
    for headers in ({}, {"Authorization": "Bearer two"}):
        assert browser.get("/v1/status", headers=headers).status_code == 401
    state = browser.get("/v1/status", headers={"Authorization": "Bearer one"}).json()
    assert state["model"] == "secret-model" and state["stores"] == [] and state["cache"] == {"slot_tokens": 0}


def test_the_page_can_be_switched_off(loaded: Loaded) -> None:
    browser = client(loaded, ApiKeys({}), ServerConfig(page=False, log_requests=False))
    assert browser.get("/").status_code == 404
    message = browser.get("/").json()["error"]["message"]
    assert message.startswith("there is no / here: the paths are /v1/chat/completions, ")
    assert message.endswith(", /metrics")


@pytest.mark.parametrize(("tenant", "shown"), [("", {"inputs": ["letters.jsonl"]}), ("acme", {})])
def test_no_input_of_a_store_is_named_to_one_of_several_tenants(
    loaded: Loaded, tenant: str, shown: dict[str, Any]
) -> None:
    manifest = SimpleNamespace(kind="corpus", sources=[SimpleNamespace(name="a/letters.jsonl")], counts={"tokens": 9})
    corpus: Any = SimpleNamespace(manifest=manifest, folder=Path("b/shared"))
    keys = ApiKeys({"one": tenant, "two": ""})
    browser = client(loaded, keys, ServerConfig(log_requests=False), stores=StoreSet(corpus=corpus))
    for key in keys.tenant_of_key:
        state = browser.get("/v1/status", headers={"Authorization": f"Bearer {key}"}).json()
        assert state["stores"] == [{"kind": "corpus", "name": "shared", "tokens": 9} | shown]


def test_markup_in_a_name_stays_text(loaded: Loaded) -> None:
    browser = client(loaded, ApiKeys({}), ServerConfig(log_requests=False), MARKUP)
    response = browser.get("/v1/status")
    assert response.json()["model"] == MARKUP
    assert response.headers["content-type"] == "application/json", "no browser shows it as a page"
    assert MARKUP not in browser.get("/").text
