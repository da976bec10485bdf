"""What chats quote is drafted from in the forms in which an answer repeats it, in all three APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hdtool.builders.evaluation.recording import RecordedTurn, RecordingEngine
from hdtool.data.chat import encode_text
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.core.step import Stats
from hdtool.runtime.drafters.drafter_factory import drafter_for
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.integrations.server.messages_api import MessagesRequest
from hdtool.runtime.integrations.server.openai_formats import usage_of
from hdtool.runtime.integrations.server.openai_requests import ChatRequest
from hdtool.runtime.integrations.server.quoted_files import Quotes, quoted_forms, without_line_numbers
from hdtool.runtime.integrations.server.request_preparation import PreparedPrompt, Preparer
from hdtool.runtime.integrations.server.responses_api import ResponsesRequest
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded
from tests.support.server import RunningServer

CHAT = "/v1/chat/completions"
FILE = 'def area(side):\n    """The area of a square."""\n    return side * side\n\n\nprint(area(3))'
NUMBERED = "\n".join(f"{number:6}→{line}" for number, line in enumerate(FILE.split("\n"), 1))
ESCAPED = json.dumps(FILE)[1:-1]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION = {"name": "read", "description": "Read a file.", "parameters": SCHEMA}


def chat(content: str, *, tools: bool = True, **fields: Any) -> ChatRequest:
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
    messages = [
        {"role": "user", "content": "Change a.py."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": content},
    ]
    given = {"tools": [{"type": "function", "function": FUNCTION}]} if tools else {}
    return ChatRequest.read(json.dumps({"messages": messages, **given, **fields}).encode())


def message(content: str) -> ChatRequest:
    messages = [
        {"role": "user", "content": "Change a.py."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "read", "input": {"path": "a.py"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": content}]},
    ]
    tool = {"name": "read", "description": "Read a file.", "input_schema": SCHEMA}
    return MessagesRequest.read(json.dumps({"messages": messages, "tools": [tool], "max_tokens": 9}).encode()).chat()


def response(content: str) -> ChatRequest:
    items = [
        {"role": "user", "content": "Change a.py."},
        {"type": "function_call", "call_id": "1", "name": "read", "arguments": '{"path": "a.py"}'},
        {"type": "function_call_output", "call_id": "1", "output": content},
    ]
    tool = {"type": "function", "strict": False, **FUNCTION}
    return ResponsesRequest.read(json.dumps({"input": items, "tools": [tool]}).encode()).chat()


def prepared(loaded: Loaded, body: ChatRequest, method: str = "hd") -> PreparedPrompt:
    preparer = Preparer(loaded, DecodeConfig(method=method), SamplingConfig())
    (choice,) = preparer.chat(body, "")
    return choice.prompt


def quoted(loaded: Loaded, body: ChatRequest, method: str = "hd") -> str:
    return text_of(loaded.tokenizer, list(prepared(loaded, body, method).quotes))


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        (NUMBERED, FILE),
        ("Here is a.py:\n" + NUMBERED + "\n<note>1 file</note>", "Here is a.py:\n" + FILE + "\n<note>1 file</note>"),
        ("9\ta\n10\t  b\n11\tc", "a\n  b\nc"),
        ("1 | a\n2 | \n3 | c", "a\n\nc"),
        ("L1: a\nL2:   b\nL3: c", "a\n  b\nc"),
        ("1\ta\n2\tb", "1\ta\n2\tb"),
        ("1: a\n3: b\n7: c", "1: a\n3: b\n7: c"),
        (FILE, FILE),
        ("", ""),
    ],
)
def test_line_numbers_are_left_out_of_listings(text: str, bare: str) -> None:
    assert without_line_numbers(text) == bare


def test_an_answer_repeats_a_listing_bare_and_escaped() -> None:
    assert list(quoted_forms(NUMBERED, in_json=True)) == [FILE, ESCAPED]
    assert list(quoted_forms(NUMBERED, in_json=False)) == [FILE]
    assert list(quoted_forms(FILE, in_json=True)) == [ESCAPED]
    assert not list(quoted_forms(FILE, in_json=False))
    assert not list(quoted_forms('{"a": "b"}', in_json=True))


@pytest.mark.parametrize("of", [chat, message, response])
def test_results_of_tools_are_quoted_in_each_api(loaded: Loaded, of: Any) -> None:
    assert quoted(loaded, of(FILE)) == f"\n{ESCAPED}"
    assert quoted(loaded, of(NUMBERED)) == f"\n{FILE}\n{ESCAPED}"


def test_chats_without_tools_quote_listings_alone(loaded: Loaded) -> None:
    assert not quoted(loaded, chat(FILE, tools=False))
    assert quoted(loaded, chat(NUMBERED, tools=False)) == f"\n{FILE}"
    formatted = chat(FILE, tools=False, response_format={"type": "json_object"})
    assert quoted(loaded, formatted) == f"\n{ESCAPED}"


def test_nothing_is_quoted_beside_a_prediction_or_without_a_method_that_uses_it(loaded: Loaded) -> None:
    assert not quoted(loaded, chat(NUMBERED, prediction={"type": "content", "content": "Done."}))
    assert not quoted(loaded, chat(NUMBERED), method="pld")


def test_a_message_is_encoded_once_for_each_owner(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []

    def encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
        encoded.append(text)
        return encode_text(tokenizer, text, special=special)

    monkeypatch.setattr("hdtool.runtime.integrations.server.quoted_files.encode_text", encode)
    quotes = Quotes(loaded.tokenizer, max_characters=3 * len(FILE))
    messages = [{"role": "tool", "content": FILE}]
    first = quotes.tokens(messages, "one", in_json=True)
    assert quotes.tokens(messages, "one", in_json=True) == first and len(encoded) == 1
    assert quotes.tokens(messages, "two", in_json=True) == first and len(encoded) == 2
    quotes.tokens([{"role": "tool", "content": text} for text in (FILE + "\n1", FILE + "\n2")], "one", in_json=True)
    quotes.tokens(messages, "one", in_json=True)
    assert len(encoded) == 5, "what was used longest ago is dropped"


def test_quotes_save_steps_of_a_call_that_repeats_a_file(loaded: Loaded) -> None:
    prompt = prepared(loaded, chat(NUMBERED))
    text = '{"name": "write", "arguments": {"path": "a.py", "content": "' + ESCAPED.replace("square", "tile") + '"}}'
    answer = encode_text(loaded.tokenizer, text, special=False)
    assert steps_of(loaded, prompt.tokens, answer, prompt.quotes) < 0.7 * steps_of(loaded, prompt.tokens, answer, ())


def steps_of(loaded: Loaded, prompt: list[int], answer: list[int], prediction: Any) -> int:
    engine = RecordingEngine()
    engine.answer(RecordedTurn("", "", 0, prompt, answer))
    drafter = drafter_for(DecodeConfig(draft_tokens=16), loaded.target, StoreSet())
    sampler = Sampler(SamplingConfig(), prompt)
    return len(
        list(decode(engine, prompt, sampler, max_new_tokens=len(answer), drafter=drafter, prediction=prediction))
    )


def test_answers_are_those_with_any_prediction(server: RunningServer) -> None:
    asked = [{"role": "user", "content": f"Answer with this file.\n{NUMBERED}"}]
    for structure in ({}, {"response_format": {"type": "json_object"}}):
        body = {"model": "demo", "max_tokens": 24, "temperature": 0, "messages": asked, **structure}
        status, found = server.ask(CHAT, body)
        assert status == 200, found
        status, predicted = server.ask(CHAT, {**body, "prediction": {"type": "content", "content": "No."}})
        assert status == 200, predicted
        assert predicted["choices"] == found["choices"]


def test_usage_counts_predictions_of_requests_alone() -> None:
    stats = Stats()
    stats.drafted[SourceId.PREDICTION], stats.accepted[SourceId.PREDICTION] = 5, 3
    for is_predicted, expected in ((True, (3, 2)), (False, (0, 0))):
        counted = usage_of(1, stats, is_predicted=is_predicted)["completion_tokens_details"]
        assert (counted["accepted_prediction_tokens"], counted["rejected_prediction_tokens"]) == expected
