"""Tool calls in the text of answers, in the notations of several families, split anywhere."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st
from transformers import PreTrainedTokenizerBase

from hdtool.runtime.config import ModelConfig
from hdtool.runtime.integrations.server.tool_calls import ToolCall, ToolCallReader, calls_of
from hdtool.runtime.model.load import load_tokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = ToolCall("f", '{"a": 1}')
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


@pytest.mark.parametrize("value", [None, 3, "f", {}, {"name": 3}, {"function": []}, [[]]])
def test_values_that_are_no_calls(value: Any) -> None:
    assert calls_of(value) == []


def test_arguments_are_json() -> None:
    assert json.loads(calls_of({"function": {"name": "f", "arguments": {"ü": [1]}}})[0].arguments) == {"ü": [1]}
