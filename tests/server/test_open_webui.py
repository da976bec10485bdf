"""Requests as Open WebUI 0.12.4 sends them: recorded between it and the server, with other words in the messages."""

from __future__ import annotations

import json
from typing import Any

from hdtool.runtime.target.load import Loaded
from tests.server.plain import plain_text
from tests.support.server import RunningServer

QUESTION = "What is a list comprehension?"
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": "Bearer none",
    "Accept": "*/*",
    "Accept-Encoding": "gzip, deflate, br",
    "User-Agent": "Python/3.11 aiohttp/3.14.5",
}
CHAT = {
    "stream": True,
    "model": "demo",
    "messages": [{"role": "user", "content": QUESTION}],
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "max_tokens": 24,
    "stop": ["\n\n\n"],
    "frequency_penalty": 0.0,
}
TASK = {"model": "demo", "messages": [{"role": "user", "content": "### Task:\nName the chat."}], "stream": False}
"""Titles, tags and follow-up questions: no settings, and no limit of tokens."""
BUILTIN = [
    {
        "type": "function",
        "function": {
            "name": "get_current_timestamp",
            "description": "Get the time in seconds.",
            "parameters": {"properties": {}, "type": "object"},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search_chats",
            "description": "Search the titles and messages of earlier chats.",
            "parameters": {
                "properties": {
                    "query": {"description": "What to find.", "type": "string"},
                    "count": {"default": 5, "description": "Most results.", "type": "integer"},
                    "start": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
                },
                "required": ["query"],
                "type": "object",
            },
        },
    },
]


def events(text: str) -> list[Any]:
    found = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


def text_of_events(text: str) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events(text) if event["choices"])


def test_the_list_of_models(server: RunningServer) -> None:
    status, found = server.ask("/v1/models", headers=HEADERS)
    assert (status, [model["id"] for model in found["data"]]) == (200, ["demo"])


def test_a_chat(server: RunningServer, loaded: Loaded) -> None:
    status, found = server.ask("/v1/chat/completions", CHAT, headers=HEADERS)
    assert status == 200
    assert text_of_events(found) == plain_text(loaded, QUESTION, 24, temperature=0.5, top_p=0.9, seed=3)
    assert events(found)[-1]["usage"]["completion_tokens"] > 0


def test_a_task(server: RunningServer) -> None:
    status, found = server.ask("/v1/chat/completions", TASK, headers=HEADERS)
    assert status == 200
    assert found["choices"][0]["message"]["content"]


def test_its_tools_reach_the_prompt(server: RunningServer) -> None:
    def tokens_of_prompt(**more: Any) -> int:
        status, found = server.ask("/v1/chat/completions", CHAT | more, headers=HEADERS)
        assert status == 200, found
        return int(events(found)[-1]["usage"]["prompt_tokens"])

    assert tokens_of_prompt(tools=BUILTIN) > tokens_of_prompt() + 50
