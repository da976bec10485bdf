"""Tool calls in the text of answers, in the notations of several families, split anywhere."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from functools import cache
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st
from transformers import PreTrainedTokenizerBase

from hdtool.runtime.core.step import Stats
from hdtool.runtime.integrations.server.endpoints import _events, _whole
from hdtool.runtime.integrations.server.messages_api import MessagesFormat
from hdtool.runtime.integrations.server.openai_formats import ChatFormat, Delta, Format, usage_of
from hdtool.runtime.integrations.server.request_log import LogEntry
from hdtool.runtime.integrations.server.tool_calls import ToolCall, ToolCallReader, calls_of
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load_tokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = ToolCall("f", '{"a": 1}')
BARE = '{"name": "f", "arguments": {"a": 1}}'
BLOCK = f"\n\n```json\n{BARE}"
MARKED = f"<tool_call>\n{BARE}\n</tool_call>"
NESTED = "[" * 700 + "]" * 700
CASES: dict[str, tuple[str, str, str, list[ToolCall]]] = {
    "hermes": (
        "<tool_call>",
        'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        "Well.",
        [CALL, CALL],
    ),
    "qwen coder": (
        "<tool_call> <function=",
        "Well.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "Well.",
        [CALL],
    ),
    "mistral": ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [CALL]),
    "llama": ("<|python_tag|>", '{"name": "f", "parameters": {"a": 1}}', "", [CALL]),
    "a block": ("<tool_call>", 'Well:\n```json\n{\n  "name": "f",\n  "arguments": {"a": 1}\n}\n```', "Well:", [CALL]),
    "no marks": ("<tool_call>", '{"name": "f", "arguments": {"a": 1}}', "", [CALL]),
    "other JSON": ("<tool_call>", 'A ```json\n{"name": "g"}\n```', 'A ```json\n{"name": "g"}\n```', []),
    "broken JSON": ("<tool_call>", '{"name": "f", "arguments": {"a"', '{"name": "f", "arguments": {"a"', []),
    "a block closed on its line": ("<tool_call>", f"So:{BLOCK}```\nDone.", "So:Done.", [CALL]),
    "blocks": ("<tool_call>", f"So:{BLOCK}\n```\nAnd{BLOCK}\n```{BLOCK}\n```", "So:And", [CALL] * 3),
    "an open block": ("<tool_call>", f"So:{BLOCK}\n", "So:", [CALL]),
    "a block cut in its call": ("<tool_call>", f"So:{BLOCK[:-3]}", f"So:{BLOCK[:-3]}", []),
    "a block cut in its fence": ("<tool_call>", "So:\n\n```js", "So:\n\n```js", []),
    "a block of two": ("<tool_call>", f"So:{BLOCK}\n{BARE}\n```\nEnd", f"So:{BLOCK}\n{BARE}\n```\nEnd", []),
    "a sentence": ("<tool_call>", f"So:\n{BARE} and it runs. {BARE}", f"So:\n{BARE} and it runs. {BARE}", []),
    "a sentence and a call": ("<tool_call>", f"So:\n{BARE} is it.\n{MARKED}", f"So:\n{BARE} is it.", [CALL]),
    "infinite": (
        "<tool_call>",
        BLOCK.replace("1", "-Infinity") + "\n```",
        BLOCK.replace("1", "-Infinity") + "\n```",
        [],
    ),
    "deep": ("<tool_call>", BARE.replace("1", "[" * 9**5), BARE.replace("1", "[" * 9**5), []),
    "nested": ("<tool_call>", f"<tool_call>{NESTED}</tool_call>", f"<tool_call>{NESTED}", []),
    "no call": ("<tool_call>", "Nothing <tool here.", "Nothing <tool here.", []),
    "broken off": ("<tool_call>", 'A <tool_call>{"name": "f", "argu', 'A<tool_call>{"name": "f", "argu', []),
    "no JSON": ("<tool_call>", "A <tool_call>later</tool_call>", "A<tool_call>later", []),
    "no notation": ("", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
}


@cache
def tokenizer_of_demo() -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig())


def reader(marker: str) -> ToolCallReader:
    tokenizer = tokenizer_of_demo()
    tokenizer.chat_template = marker
    return ToolCallReader(tokenizer, [TOOL], "")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@given(cuts=st.lists(st.integers(0, 150), max_size=6))
def test_calls_are_found_however_the_text_is_split(case: tuple[str, str, str, list[ToolCall]], cuts: list[int]) -> None:
    marker, text, expected, calls = case
    found = reader(marker)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [found.add(text[start:end]) for start, end in pairwise(places)] + [found.end()]
    assert "".join(part[0] for part in parts) == expected
    assert [call for part in parts for call in part[2]] == calls


SENTENCE = f"So:\n{BARE} and"
WRONG = '\n{"name": "f", "arguments": a dictionary'


@pytest.mark.parametrize("text", [SENTENCE, WRONG, f"{BLOCK}\n{{"])
def test_text_is_shown_as_soon_as_it_cannot_be_a_call(text: str) -> None:
    found = reader("<tool_call>")
    assert "".join(found.add(character)[0] for character in text) == text
    assert found.add(" more") == (" more", "", [])


def test_a_block_is_a_call_once_it_is_followed_by_text() -> None:
    found = reader("<tool_call>")
    assert found.add(f"{BLOCK}\n```") == ("", "", [])
    assert found.add("\nD") == ("D", "", [CALL])
    assert found.add("one.") == ("one.", "", [])


NO_CALLS: list[Any] = [
    None,
    3,
    "f",
    {},
    {"name": 3},
    {"function": []},
    [[]],
    {"name": "f", "arguments": {"a": math.inf}},
    {"name": "f", "arguments": "hello"},
    {"name": "f", "arguments": "[1]"},
    {"name": "f", "arguments": [1]},
]


@pytest.mark.parametrize("value", NO_CALLS)
def test_values_that_are_no_calls(value: Any) -> None:
    assert calls_of(value) == []


def test_arguments_are_json() -> None:
    assert json.loads(calls_of({"function": {"name": "f", "arguments": {"ü": [1]}}})[0].arguments) == {"ü": [1]}


class OneCall:
    """An answer that is the call of a tool."""

    prompt_tokens = 1
    usage = usage_of(1, Stats())

    def __init__(self, arguments: Any) -> None:
        self._calls = calls_of({"name": "f", "arguments": arguments})

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        yield 0, Delta(calls=self._calls, finish="tool_calls")

    def cancel(self) -> None:
        pass


def responses(arguments: Any, *, messages: bool) -> tuple[str, str]:
    """The response with a call, whole and as a stream."""
    answer: Any = OneCall(arguments)

    def form() -> Format:
        return (
            MessagesFormat("m", shows_thinking=True)
            if messages
            else ChatFormat("m", cast(Any, None), 1, with_usage=False)
        )

    async def sent() -> tuple[str, str]:
        whole = await _whole(answer, 1, form())
        return bytes(whole.body).decode(), "".join([event async for event in _events(answer, LogEntry(), form())])

    return asyncio.run(sent())


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("arguments", [{"a": "x\ud83d"}, '{"a": "x\ud83d"}'])
def test_half_a_character_in_arguments_is_replaced(arguments: Any, messages: bool) -> None:
    for response in responses(arguments, messages=messages):
        assert "x\ufffd" in response
        response.encode()


def test_half_a_character_as_an_escape_is_replaced_in_messages() -> None:
    assert all("x\ufffd" in response for response in responses(r'{"a": "x\ud83d"}', messages=True))


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_lacks_leave_arguments_a_text(number: str) -> None:
    whole, stream = responses(f'{{"a": {number}}}', messages=True)
    assert json.loads(whole)["content"][0]["input"] == {"arguments": f'{{"a": {number}}}'}
    assert "error" not in stream and number in stream
