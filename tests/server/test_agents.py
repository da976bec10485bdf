"""Two requests of coding agents, of which the second goes on from the answer to the first.

``LIMIT`` is the tests' own: some agents send no limit of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hdtool.runtime.integrations.server.messages_api import MessagesPrompt
from tests.server.agents import (
    AIDER,
    CACHED,
    CHAT,
    CLAUDE_CODE,
    CLINE,
    CODEX,
    CONTINUE,
    MESSAGES,
    NEXT,
    OPENCODE,
    QUESTION,
    RESPONSES,
    Row,
    codex_function,
    codex_item,
    schema,
    text,
)
from tests.support.server import RunningServer

LIMIT = 12


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
        request = MessagesPrompt.of({"messages": turns, "context_management": {"edits": list(edits)}})
        return [message.reasoning_content for message in request.chat().messages if message.role == "assistant"]

    edit: Row = {"type": "clear_thinking_20251015"}
    one, two = (edit | {"keep": {"type": "thinking_turns", "value": value}} for value in (1, 2))
    assert thinking() == thinking(edit | {"keep": "all"}) == thinking(two) == ["One.", "Two."]
    assert thinking(edit) == thinking(one) == [None, "Two."]
