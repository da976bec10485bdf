"""Plays recorded agents with the official clients against ``hdtool serve``, and checks each tool call in the answers.

    pip install jsonschema
    python -m tests.benchmarks.agent_tools [--model smollm2] [--sessions 10] [--minutes 10] [-- OPTIONS OF SERVE]

A session asks as Claude Code, Codex, OpenCode, Cline or Continue did, in turn: it sends the recorded first request, and
then what follows from each answer, which is the result of every call or the user's next question. Every other request
requires a call, and two of three requests are streamed. Arguments are checked against the JSON schema of their tool.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai

from tests.benchmarks.laboratory import parser_of
from tests.server.agents import CHAT, CLAUDE_CODE, CLINE, CODEX, CONTINUE, MESSAGES, NEXT, OPENCODE, RESPONSES
from tests.support.server import RunningServer

Row = dict[str, Any]
AGENTS = {"Claude Code": CLAUDE_CODE, "Codex": CODEX, "OpenCode": OPENCODE, "Cline": CLINE, "Continue": CONTINUE}
RESULT = "1\tdef add(a, b):\n2\t    return a + b\n3\tprint(add(1, 2))"
TURNS = 5
"""Number of requests in a conversation; the next request begins a new one."""


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: Any


class ChatAgent:
    """Client of OpenAI's Chat Completions API."""

    history = "messages"

    def __init__(self, server: RunningServer) -> None:
        self._client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=3600)

    def schemas(self, body: Row) -> dict[str, Row]:
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}

    def must_call(self, body: Row) -> Row:
        return body | {"tool_choice": "required"}

    def ask(self, body: Row, tokens: int) -> tuple[str, list[Call]]:
        create: Any = self._client.chat.completions.create
        got = create(**body | {"max_tokens": tokens})
        if not body["stream"]:
            message = got.choices[0].message
            calls = [Call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
            return message.content or "", [_parsed(call) for call in calls]
        deltas = [chunk.choices[0].delta for chunk in got if chunk.choices]
        parts = [part for delta in deltas for part in delta.tool_calls or ()]
        calls = []
        for part in parts:
            if part.index == len(calls):
                calls.append(Call(part.id, part.function.name, ""))
            last = calls[part.index]
            calls[part.index] = Call(last.id, last.name, last.arguments + part.function.arguments)
        return "".join(delta.content or "" for delta in deltas), [_parsed(call) for call in calls]

    def follow(self, text: str, calls: list[Call]) -> Iterator[Row]:
        called = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in calls
        ]
        yield {"role": "assistant", "content": text} | ({"tool_calls": called} if called else {})
        yield from ({"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in calls)
        if not calls:
            yield {"role": "user", "content": NEXT}


class MessagesAgent:
    """Client of Anthropic's Messages API."""

    history = "messages"

    def __init__(self, server: RunningServer) -> None:
        url = server.url.removesuffix("/v1")
        self._client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=3600)

    def schemas(self, body: Row) -> dict[str, Row]:
        return {tool["name"]: tool["input_schema"] for tool in body["tools"]}

    def must_call(self, body: Row) -> Row:
        return body | {"tool_choice": {"type": "any"}}

    def ask(self, body: Row, tokens: int) -> tuple[str, list[Call]]:
        own = {name: body[name] for name in ("model", "messages", "system", "tools", "tool_choice") if name in body}
        others = {name: body[name] for name in ("metadata", "thinking", "context_management")}
        given: Any = {**own, "max_tokens": tokens, "extra_body": others}
        if body["stream"]:
            with self._client.messages.stream(**given) as events:
                message = events.get_final_message()
        else:
            message = self._client.messages.create(**given)
        calls = [Call(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"]
        return "".join(block.text for block in message.content if block.type == "text"), calls

    def follow(self, text: str, calls: list[Call]) -> Iterator[Row]:
        used = [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in calls]
        yield {"role": "assistant", "content": [{"type": "text", "text": text}] * bool(text) + used}
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls]
        yield {"role": "user", "content": results or NEXT}


class ResponsesAgent(ChatAgent):
    """Client of OpenAI's Responses API."""

    history = "input"

    def schemas(self, body: Row) -> dict[str, Row]:
        groups = [tool.get("tools", [tool]) for tool in body["tools"] if tool["type"] != "web_search"]
        return {tool["name"]: tool["parameters"] for group in groups for tool in group}

    def ask(self, body: Row, tokens: int) -> tuple[str, list[Call]]:
        create: Any = self._client.responses.create
        own = {name: value for name, value in body.items() if name != "client_metadata"}
        got = create(**own, max_output_tokens=tokens, extra_body={"client_metadata": body["client_metadata"]})
        response = [*got][-1].response if body["stream"] else got
        items = [item for item in response.output if item.type == "function_call"]
        self._items = [item.model_dump(exclude_none=True) for item in items]
        return response.output_text, [_parsed(Call(item.call_id, item.name, item.arguments)) for item in items]

    def follow(self, text: str, calls: list[Call]) -> Iterator[Row]:
        if text:
            yield {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        yield from self._items
        yield from ({"type": "function_call_output", "call_id": call.id, "output": RESULT} for call in calls)
        if not calls:
            yield {"type": "message", "role": "user", "content": [{"type": "input_text", "text": NEXT}]}


CLIENTS = {CHAT: ChatAgent, MESSAGES: MessagesAgent, RESPONSES: ResponsesAgent}
PATHS = {"Claude Code": MESSAGES, "Codex": RESPONSES}


def _parsed(call: Call) -> Call:
    return Call(call.id, call.name, json.loads(call.arguments))


def play(server: RunningServer, options: argparse.Namespace, session: int, is_over: Callable[[], bool]) -> Counter[str]:
    """Play one session until the time is over; return the number of requests, calls and errors by kind."""
    name = [*AGENTS][session % len(AGENTS)]
    agent: Any = CLIENTS[PATHS.get(name, CHAT)](server)
    counts: Counter[str] = Counter()
    first = AGENTS[name] | {"model": options.model}
    body = first
    for number in takewhile(lambda _: not is_over(), count()):
        if number % TURNS == 0:
            body = first
        is_free = number % 2 == 0
        asked = (body if is_free else agent.must_call(body)) | {"stream": (number + session) % 3 > 0}
        counts["requests"] += 1
        try:
            text, calls = agent.ask(asked, options.tokens)
        except (openai.OpenAIError, anthropic.AnthropicError, ValueError) as error:
            print(f"{name}: {error}", flush=True)
            counts["errors"] += 1
            body = first
            continue
        counts["calls of choice" if is_free else "required calls"] += len(calls)
        counts["cut off before a call"] += not is_free and not calls
        counts["answers in text"] += is_free and not calls
        for call in calls:
            counts["valid arguments" if _is_valid(call, agent.schemas(body)) else "invalid arguments"] += 1
        body = body | {agent.history: [*body[agent.history], *agent.follow(text, calls)]}
    return counts


def _is_valid(call: Call, schemas: dict[str, Row]) -> bool:
    try:
        jsonschema.validate(call.arguments, schemas[call.name])
    except (KeyError, jsonschema.ValidationError) as error:
        print(f"{call}: {error}", flush=True)
        return False
    return True


def main() -> None:
    parser = parser_of(__doc__, model="smollm2", sessions=10, minutes=10.0, tokens=96)
    parser.add_argument("serve", nargs="*", help="options of hdtool serve, after --")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningServer(Path(folder) / "log", options.model, *options.serve) as server,
        ThreadPoolExecutor(options.sessions) as pool,
    ):
        end = time.monotonic() + 60 * options.minutes
        options.model = server.ask("/v1/models")[1]["data"][0]["id"]
        played = [
            pool.submit(play, server, options, session, lambda: time.monotonic() > end)
            for session in range(options.sessions)
        ]
        counts = sum((session.result() for session in played), Counter[str]())
        assert "Traceback" not in server.log, server.log[-3000:]
        assert server.stop() == 0
    print(f"{options.sessions} sessions, {options.minutes:g} minutes, {options.model}: ", end="")
    print(", ".join(f"{number:,} {name}" for name, number in sorted(counts.items())) + f", {counts['errors']} errors")


if __name__ == "__main__":
    main()
