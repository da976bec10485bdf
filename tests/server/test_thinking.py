"""What a model thinks before its answer, split from it however the text is cut, with tools and without."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedTokenizerBase

from hdtool.data.chat import encode_text
from hdtool.data.prompts import Grammar
from hdtool.runtime.answering.answer_plan import AnswerPlan
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.step import Finish, Stats, Step
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.generation.text_stream import TextStream
from hdtool.runtime.integrations.server.answer_sections import Sections
from hdtool.runtime.integrations.server.choice_stream import AnswerText
from hdtool.runtime.integrations.server.messages_api import MessagesFormat
from hdtool.runtime.integrations.server.openai_formats import ChatFormat, Delta, TokenLogprobs, usage_of
from hdtool.runtime.integrations.server.openai_requests import NO_TOOLS, ToolChoice
from hdtool.runtime.integrations.server.request_preparation import PreparedChoice, PreparedPrompt
from hdtool.runtime.integrations.server.responses_api import ResponsesFormat, ResponsesRequest
from hdtool.runtime.integrations.server.tool_calls import ThinkingReader
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import load_tokenizer

OPEN_PROMPT, PROMPT = "user: Hi\nassistant: <think>\n", "user: Hi\nassistant: "
CASES: dict[str, tuple[str, str, str, str]] = {
    "Qwen": (PROMPT, "<think>\nWell.\n\nSo.\n</think>\n\nHello.\n", "Hello.\n", "Well.\n\nSo."),
    "DeepSeek": (OPEN_PROMPT, "Well.\n</think>\n\nHello.", "Hello.", "Well."),
    "on one line": (PROMPT, "<think>Well.</think>Hello.", "Hello.", "Well."),
    "after lines": (PROMPT, "\n\n<think>Well.</think>Hello.", "Hello.", "Well."),
    "empty": (PROMPT, "<think>\n\n</think>\n\nHello.", "Hello.", ""),
    "none": (PROMPT, "\nHello.\n\n", "\nHello.\n\n", ""),
    "none, closed by the prompt": (f"{PROMPT}<think>\n\n</think>\n\n", "<think> is a tag.", "<think> is a tag.", ""),
    "a tag in the answer": (PROMPT, "It is <think>so</think>.", "It is <think>so</think>.", ""),
    "a second tag": (PROMPT, "<think>a<think>b</think>c</think>", "c</think>", "a<think>b"),
    "broken off": (PROMPT, "<think>\nWell, </thi\n", "", "Well, </thi\n"),
    "broken off in the tag": (PROMPT, " <thi", " <thi", ""),
    "a text like a tag": (PROMPT, "<thin>", "<thin>", ""),
    "nothing": (PROMPT, "", "", ""),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@given(cuts=st.lists(st.integers(0, 50), max_size=8))
def test_thinking_is_split_however_the_text_is_cut(case: tuple[str, str, str, str], cuts: list[int]) -> None:
    prompt, text, plain, reasoning = case
    reader = ThinkingReader(prompt)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [reader.add(text[start:end]) for start, end in pairwise(places)] + [reader.add("", is_last=True)]
    assert "".join(part[0] for part in parts) == plain
    assert "".join(part[1] for part in parts) == reasoning


@settings(max_examples=200)
@given(pieces=st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "\n", "a", " b"]), max_size=9))
def test_no_text_is_lost_but_tags_and_the_line_ends_beside_them(pieces: list[str]) -> None:
    for prompt in (PROMPT, OPEN_PROMPT):
        reader = ThinkingReader(prompt)
        parts = [reader.add(piece) for piece in pieces] + [reader.add("", is_last=True)]
        found = "".join(part[1] for part in parts) + "".join(part[0] for part in parts)
        assert _without_tags(found) == _without_tags("".join(pieces))


def _without_tags(text: str) -> str:
    """Tags and line ends are left out, wherever they are."""
    return text.replace("</think>", "").replace("<think>", "").replace("\n", "")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    found = load_tokenizer(ModelConfig())
    found.chat_template = "{{ '<think>' }} </think> <tool_call>"
    return found


TOOLS = ToolChoice(({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},))
OWN = {
    "start_anchor": "assistant: ",
    "fields": {"thinking": {"open": "<|think|>", "close": "<|answer|>", "content": "text"}, "content": {}},
}


def answer(tokenizer: PreTrainedTokenizerBase, said: str, **prompt: Any) -> list[Delta]:
    """What the steps of an answer with this text add, a token each."""
    ids = encode_text(tokenizer, said, special=False)
    fields: dict[str, Any] = {"tools": NO_TOOLS, "rendered": PROMPT} | prompt
    prepared = PreparedPrompt([1], 99, **fields)
    readers, plan = prepared.readers(tokenizer), AnswerPlan([1], Sampler(SamplingConfig(), [1]), 99)
    text = TextStream(tokenizer, skip_special_tokens=not readers.is_marked)
    reader = AnswerText(PreparedChoice(prepared, plan, text, readers, None))
    last = len(ids) - 1
    return [reader.add(_step([token], Finish.STOP if place == last else None)) for place, token in enumerate(ids)]


def _step(tokens: list[int], finish: Finish | None) -> Step:
    return Step(tokens, DraftTree.of(0, [], []), [], 0.0, 0.0, 0.0, finish)


def whole(deltas: Sequence[Delta]) -> Delta:
    made = Delta()
    for delta in deltas:
        made.add(delta)
    return made


def test_without_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    found = whole(answer(tokenizer, "<think>\nWell.\n</think>\n\nHello."))
    assert (found.reasoning, found.text, found.finish) == ("Well.", "Hello.", "stop")


def test_with_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    text = '<think>\nCall <tool_call>?\n</think>\n\nYes.<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = whole(answer(tokenizer, text, tools=TOOLS))
    assert (found.reasoning, found.text) == ("Call <tool_call>?", "Yes.")
    assert [call.name for call in found.calls] == ["f"]


def test_a_template_without_tags_and_a_text_completion_keep_them(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "<think>Well.</think>Hello."
    assert whole(answer(tokenizer, text, rendered="")).text == text
    tokenizer.chat_template = "{{ messages }}"
    assert whole(answer(tokenizer, text)).text == text


def test_an_answer_that_must_match_a_grammar_is_no_thinking(tokenizer: PreTrainedTokenizerBase) -> None:
    found = whole(answer(tokenizer, "[1]", rendered=OPEN_PROMPT, grammar=Grammar.json_schema({"type": "array"})))
    assert (found.reasoning, found.text) == ("", "[1]")


@pytest.mark.parametrize("tools", [NO_TOOLS, TOOLS], ids=["without tools", "with tools"])
def test_the_template_of_the_tokenizer_comes_first(tokenizer: PreTrainedTokenizerBase, tools: ToolChoice) -> None:
    own: Any = tokenizer
    own.response_template = OWN
    found = whole(answer(tokenizer, "<|think|>Well, <think>.<|answer|>Hello, </think>.", tools=tools))
    assert (found.reasoning, found.text) == ("Well, <think>.", "Hello, </think>.")


def test_an_answer_unlike_the_template_stays_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """The parser of the library raises where a call is no JSON."""
    own: Any = tokenizer
    calls = {"open": "<|call|>", "close": "<|end|>", "content": "json", "repeats": True}
    own.response_template = OWN | {"fields": {"tool_calls": calls, "content": {}}}
    for text, expected in {"A<|call|>{b<|end|>c": "A{b<|end|>c", "A<|call|>{b": "A{b"}.items():
        found = whole(answer(tokenizer, text, tools=TOOLS))
        assert (found.text.replace("<|end|>", ""), found.calls) == (expected.replace("<|end|>", ""), [])
    assert [call.name for call in whole(answer(tokenizer, 'A<|call|>{"name": "f"}<|end|>', tools=TOOLS)).calls] == ["f"]


def test_log_probabilities_of_thinking_are_not_those_of_the_text() -> None:
    of_thinking, of_text = TokenLogprobs(1, -0.5, []), TokenLogprobs(2, -0.1, [])
    sections = Sections()
    for delta in (Delta(reasoning="Well", logprobs=[of_thinking]), Delta(text="So", logprobs=[of_text])):
        assert list(sections.add(delta))
    assert [list(section.logprobs) for section in sections.all] == [[], [of_text]]


def test_all_apis_name_it(tokenizer: PreTrainedTokenizerBase) -> None:
    deltas = answer(tokenizer, "<think>\nWell.\n</think>\n\nHello.")
    usage = usage_of(1, Stats())
    chat = ChatFormat("demo", tokenizer, 1, with_usage=False).whole([whole(deltas)], usage)
    message = chat["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Well.", "Hello.")
    blocks = MessagesFormat("demo", shows_thinking=True).whole([whole(deltas)], usage)["content"]
    assert [(block["type"], block.get("thinking") or block["text"]) for block in blocks] == [
        ("thinking", "Well."),
        ("text", "Hello."),
    ]
    form = ResponsesFormat("demo", tokenizer, ResponsesRequest.of({"input": "Hi"}))
    events = [event for delta in deltas for event in form.added(0, delta)] + [*form.closing(usage)]
    streamed = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    response = events[-1]["response"]
    assert "".join(streamed) == "Well."
    assert [(item["type"], item["content"][0]["text"]) for item in response["output"]] == [
        ("reasoning", "Well."),
        ("message", "Hello."),
    ]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
