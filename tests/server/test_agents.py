"""Requests as coding agents send them: recorded between them and the server, with other words and fewer tools.

Claude Code 2.1.197, Codex 0.171.0, OpenCode 1.18.33, Cline 3.0.65, Continue 1.5.47, Aider 0.86.2; the second request of
each goes on from the answer to the first. ``LIMIT`` is the tests' own: some send no limit of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hdtool.runtime.integrations.server.messages_api import TokenCountRequest
from tests.support.server import RunningServer

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LIMIT = 12
INSTRUCTIONS = "You work on the code of this folder. Read files before you change them."
QUESTION, NEXT = "What is a list comprehension?", "And what is a generator?"
Row = dict[str, Any]


def schema(*required: str, **properties: Any) -> Row:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, WHOLE = {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 9007199254740991}
DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
CACHED: Row = {"cache_control": {"type": "ephemeral"}}


def text(content: str, kind: str = "text", **more: Any) -> Row:
    return {"type": kind, "text": content, **more}


CLAUDE_CODE: Row = {
    "model": "demo",
    "messages": [
        {"role": "user", "content": [text("Today is Monday."), text(QUESTION, **CACHED)]},
        {"role": "system", "content": "Agents that can be started: explorer."},
    ],
    "system": [
        text("x-anthropic-billing-header: cc_version=2.1.197.ab8; cc_entrypoint=sdk-cli;"),
        text("You are an agent.", **CACHED),
        text(INSTRUCTIONS, **CACHED),
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Read a file.",
            "input_schema": DRAFT | schema("file_path", file_path=TEXT, offset=WHOLE, pages=TEXT),
        },
        {
            "name": "TaskUpdate",
            "description": "Change a task.",
            "input_schema": DRAFT
            | schema(
                "taskId",
                taskId=TEXT,
                status={"anyOf": [{"type": "string", "enum": ["pending", "completed"]}, {"const": "deleted"}]},
                metadata={"type": "object", "propertyNames": TEXT, "additionalProperties": {}},
            ),
        },
    ],
    "metadata": {"user_id": '{"device_id":"0"}'},
    "max_tokens": 400,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def codex_item(role: str, *texts: str) -> Row:
    parts = [text(content, "input_text") for content in texts]
    return {"type": "message", "id": "msg_01a2", "role": role, "content": parts}


def codex_function(name: str, parameters: Row) -> Row:
    return {"type": "function", "name": name, "description": "Do it.", "strict": False, "parameters": parameters}


CODEX: Row = {
    "model": "demo",
    "stream": True,
    "input": [
        codex_item("developer", INSTRUCTIONS),
        codex_item("developer", "There are no skills.", "Files are read only."),
        codex_item("user", "The folder is /src."),
        codex_item("user", QUESTION),
    ],
    "tools": [
        codex_function("exec_command", schema("cmd", cmd=TEXT, login={"type": "boolean"}, yield_time_ms=WHOLE)),
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Agents below this one.",
            "tools": [codex_function("close_agent", schema("target", target=TEXT))],
        },
        codex_function("get_goal", schema()),
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "client_metadata": {"session_id": "01a2", "x-codex-turn-metadata": '{"request_kind":"turn"}'},
}


def chat(*functions: tuple[str, Row], **more: Any) -> Row:
    described = [
        {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": parameters}}
        for name, parameters in functions
    ]
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}]
    streamed = {"model": "demo", "messages": messages, "stream": True}
    return streamed | ({"tools": described, "stream_options": {"include_usage": True}} if functions else {}) | more


OPENCODE = chat(
    ("bash", DRAFT | schema("command", command=TEXT, timeout={"exclusiveMinimum": 0, "type": "integer"})),
    ("read", DRAFT | schema("filePath", filePath=TEXT, offset=WHOLE, limit=WHOLE)),
    tool_choice="auto",
    max_tokens=400,
)
CLINE = chat(
    ("search_codebase", schema("queries", queries={"type": "array", "items": TEXT})),
    ("read_files", schema("files", files={"type": "array", "items": schema("path", path=TEXT, line=WHOLE)})),
    tool_choice="auto",
)
CONTINUE = chat(("Read", schema("filepath", filepath=TEXT)), ("List", schema("dirpath", dirpath=TEXT)), max_tokens=400)
AIDER = chat(temperature=0) | {
    "messages": [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": "Rename the function."},
        {"role": "assistant", "content": "Ok, it is renamed."},
        {"role": "user", "content": QUESTION},
    ]
}


@dataclass(frozen=True)
class Turn:
    """What an agent reads in a stream."""

    answer: str
    prompt_tokens: int
    cached_tokens: int


def read_chat(events: list[Row]) -> Turn:
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert choices[-1]["finish_reason"] in ("stop", "length")
    none: Row = {"prompt_tokens": 0, "prompt_tokens_details": {}}
    usage: Row = none if events[-1]["choices"] else events[-1]["usage"]
    answer = "".join(choice["delta"].get("content") or "" for choice in choices)
    return Turn(answer, usage["prompt_tokens"], usage["prompt_tokens_details"].get("cached_tokens", 0))


def read_message(events: list[Row]) -> Turn:
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    answer = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    usage = events[-2]["usage"]
    cached = usage["cache_read_input_tokens"]
    return Turn(answer, usage["input_tokens"] + cached, cached)


def read_response(events: list[Row]) -> Turn:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert response["status"] in ("completed", "incomplete")
    answer = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert answer == "".join(part["text"] for item in response["output"] for part in item["content"])
    usage = response["usage"]
    return Turn(answer, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])


def after_message(first: Row, answer: str) -> Row:
    """The marks for the cache move on to the last message."""
    question, system = first["messages"]
    made = [
        {"role": "user", "content": [text(part["text"]) for part in question["content"]]},
        system,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a.py"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "content": "No such file.", "is_error": True, "tool_use_id": "toolu_1"}
            ],
        },
        {"role": "assistant", "content": [text(answer, citations=None)]},
        {"role": "user", "content": [text(NEXT, **CACHED)]},
    ]
    return first | {"messages": made}


def after_response(first: Row, answer: str) -> Row:
    call = {"type": "function_call", "status": "completed", "id": "fc_1", "call_id": "call_1", "name": "close_agent"}
    part = text(answer, "output_text", annotations=[], logprobs=[])
    added = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
        call | {"namespace": "multi_agent_v1", "arguments": '{"target": "a"}'},
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "No such agent."},
        {"type": "message", "status": "completed", "id": "msg_1", "role": "assistant", "content": [part]},
        codex_item("user", NEXT),
    ]
    return first | {"input": [*first["input"], *added]}


def after_chat(first: Row, answer: str) -> Row:
    function = {"name": first["tools"][0]["function"]["name"], "arguments": '{"path":"a.py"}'}
    added = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "No such file."},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": NEXT},
    ]
    return first | {"messages": [*first["messages"], *added]}


def after_aider(first: Row, answer: str) -> Row:
    added = [{"role": "assistant", "content": answer}, {"role": "user", "content": NEXT}]
    return first | {"messages": [*first["messages"], *added], "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Agent:
    path: str
    limit: str
    """The field of the limit of tokens."""
    first: Row
    read: Callable[[list[Row]], Turn]
    second: Callable[[Row, str], Row]


AGENTS = {
    "Claude Code": Agent(f"{MESSAGES}?beta=true", "max_tokens", CLAUDE_CODE, read_message, after_message),
    "Codex": Agent(RESPONSES, "max_output_tokens", CODEX, read_response, after_response),
    "OpenCode": Agent(CHAT, "max_tokens", OPENCODE, read_chat, after_chat),
    "Cline": Agent(CHAT, "max_tokens", CLINE, read_chat, after_chat),
    "Continue": Agent(CHAT, "max_tokens", CONTINUE, read_chat, after_chat),
    "Aider": Agent(CHAT, "max_tokens", AIDER, read_chat, after_aider),
}


def turn(server: RunningServer, agent: Agent, body: Row) -> Turn:
    status, found = server.ask(agent.path, body | {agent.limit: LIMIT})
    assert status == 200, found
    data = [line.removeprefix("data: ") for line in found.splitlines() if line.startswith("data: ")]
    return agent.read([json.loads(event) for event in data if event != "[DONE]"])


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_the_second_turn_is_read_from_the_cache(server: RunningServer, agent: Agent) -> None:
    first = turn(server, agent, agent.first)
    assert first.answer
    second = turn(server, agent, agent.second(agent.first, first.answer))
    assert second.answer
    assert second.cached_tokens >= (first.prompt_tokens or 40) - 2  # Aider asks for no usage
    assert second.prompt_tokens > second.cached_tokens


def test_a_new_conversation_of_claude_code_shares_the_prompt_of_the_system(server: RunningServer) -> None:
    """Its first words are a number for Anthropic's accounts that differs between conversations."""
    agent = AGENTS["Claude Code"]
    first = turn(server, agent, CLAUDE_CODE)
    header = text("x-anthropic-billing-header: cc_version=2.1.197.476; cc_entrypoint=sdk-cli;")
    other = turn(server, agent, CLAUDE_CODE | {"system": [header, *CLAUDE_CODE["system"][1:]]})
    assert other.prompt_tokens == first.prompt_tokens
    assert other.cached_tokens >= first.prompt_tokens - 8


def asked(server: RunningServer, path: str, body: Row) -> Row:
    status, found = server.ask(path, body | {"stream": False})
    assert status == 200, found
    answer: Row = found
    return answer


def test_a_function_in_a_namespace_is_called_by_both_names(server: RunningServer) -> None:
    choice = {"type": "function", "name": "close_agent", "namespace": "multi_agent_v1"}
    target = {"type": "string", "maxLength": 4}
    tools = [
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "tools": [codex_function("close_agent", schema("target", target=target))],
        }
    ]
    answer = asked(server, RESPONSES, CODEX | {"tools": tools, "tool_choice": choice, "max_output_tokens": 100})
    (call,) = answer["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "close_agent", "multi_agent_v1")
    assert set(json.loads(call["arguments"])) == {"target"}


def test_tools_that_the_makers_run_are_left_out_beside_functions(server: RunningServer) -> None:
    answer = asked(server, RESPONSES, CODEX | {"max_output_tokens": 1})
    assert [tool.get("name") for tool in answer["tools"]] == ["exec_command", "multi_agent_v1", "get_goal"]


def test_claude_code_is_told_how_much_too_long_a_prompt_is(server: RunningServer) -> None:
    """It compacts the conversation by the two numbers in this message."""
    status, found = server.ask(MESSAGES, CLAUDE_CODE | {"system": "one two three " * 3_000})
    assert status == 400
    numbers = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum: ", found["error"]["message"])
    assert numbers and int(numbers[1]) > 9_000 > int(numbers[2])
    status, found = server.ask(RESPONSES, CODEX | {"instructions": "one two three " * 3_000})
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")


def test_images_that_tools_return_are_replaced_by_a_note(server: RunningServer) -> None:
    """They stay in the conversation: a refusal would end it."""

    def messages(content: Any) -> int:
        call = {"type": "tool_use", "id": "a", "name": "Read", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": content}
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [call]}]
        body = {"model": "demo", "messages": [*turns, {"role": "user", "content": [result]}]}
        status, found = server.ask(f"{MESSAGES}/count_tokens", body)
        assert status == 200, found
        return int(found["input_tokens"])

    def responses(output: Any) -> int:
        call = {"type": "function_call", "call_id": "a", "name": "view_image", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "a", "output": output}
        status, found = server.ask(f"{RESPONSES}/input_tokens", {"model": "demo", "input": [call, result]})
        assert status == 200, found
        return int(found["input_tokens"])

    note = "[image: left out, because this model reads text only]"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    assert messages([image]) == messages(note)
    assert responses([{"type": "input_image", "image_url": "data:image/png;base64,aGk="}]) == responses(note)


def test_edits_of_the_context_take_thinking_out_of_earlier_turns() -> None:
    def thinking(*edits: Row) -> list[str | None]:
        turns = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "One.", "signature": ""}]},
            {"role": "user", "content": NEXT},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Two.", "signature": ""}]},
            {"role": "user", "content": QUESTION},
        ]
        request = TokenCountRequest.of({"messages": turns, "context_management": {"edits": list(edits)}})
        return [message.reasoning_content for message in request.chat().messages if message.role == "assistant"]

    edit: Row = {"type": "clear_thinking_20251015"}
    one, two = (edit | {"keep": {"type": "thinking_turns", "value": value}} for value in (1, 2))
    assert thinking() == thinking(edit | {"keep": "all"}) == thinking(two) == ["One.", "Two."]
    assert thinking(edit) == thinking(one) == [None, "Two."]
