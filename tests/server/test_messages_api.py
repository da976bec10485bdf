"""Anthropic's official client, through every parameter of the Messages API that the server has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from hdtool.runtime.target.load import Loaded
from tests.server.plain import plain_text, prompt_length
from tests.server.schemas import CITY_AND_UNIT, NAMED
from tests.support.server import RunningServer

if TYPE_CHECKING:  # imported by the worker that uses it, as that takes seconds
    import anthropic

QUESTION = "What is a list comprehension?"
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": CITY_AND_UNIT,
}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, question: Any = QUESTION, **options: Any) -> Any:
    settings = options.pop("extra_body", {})
    given = {"model": "demo", "max_tokens": 24, **options}
    create: Any = client.messages.create
    return create(
        messages=[{"role": "user", "content": question}], extra_body={"temperature": 0.0, **settings}, **given
    )


def stream(client: anthropic.Anthropic, **options: Any) -> tuple[list[str], Any]:
    """The kinds of the events of a stream, and the message that the client makes of them."""
    messages: Any = [{"role": "user", "content": QUESTION}]
    given: Any = {"model": "demo", "max_tokens": 24, **options}
    with client.messages.stream(messages=messages, extra_body={"temperature": 0.0}, **given) as events:
        return [event.type for event in events], events.get_final_message()


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.7, "top_k": 9}])
def test_an_answer_is_that_of_plain_decoding(
    client: anthropic.Anthropic, loaded: Loaded, sampling: dict[str, Any]
) -> None:
    expected = plain_text(loaded, QUESTION, 24, seed=5, **sampling)
    answer = ask(client, extra_body={"seed": 5, **sampling})
    assert [block.text for block in answer.content] == [expected]
    assert (answer.role, answer.type, answer.stop_reason) == ("assistant", "message", "max_tokens")
    assert answer.usage.output_tokens == 24


def test_a_stream_ends_as_the_whole_answer(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    kinds, final = stream(client)
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert final.stop_reason == whole.stop_reason
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    read = final.usage.input_tokens + final.usage.cache_read_input_tokens
    assert read == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert final.usage.output_tokens == 24


def test_a_stop_sequence_is_named(client: anthropic.Anthropic, loaded: Loaded) -> None:
    whole = plain_text(loaded, QUESTION, 24)
    stop = whole[12:16]
    answer = ask(client, stop_sequences=["never written", stop])
    assert answer.content[0].text == whole[: whole.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


def test_parts_of_a_text_are_paragraphs(client: anthropic.Anthropic) -> None:
    cached = {"type": "text", "text": "What is", "cache_control": {"type": "ephemeral"}}
    parts = ask(client, [cached, {"type": "text", "text": "a tuple?"}], system=[{"type": "text", "text": "Be short."}])
    assert parts.content == ask(client, "What is\n\na tuple?", system="Be short.").content


def test_a_tool_that_must_be_called(client: anthropic.Anthropic) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        answer = ask(client, tools=[WEATHER], tool_choice=choice, max_tokens=200)
        assert answer.stop_reason == "tool_use"
        (call,) = [block for block in answer.content if block.type == "tool_use"][:1]
        assert call.name == "weather"
        assert set(call.input) == {"city", "unit"}
        assert call.input["unit"] in "CF"


def test_a_streamed_call_is_that_of_the_whole_answer(client: anthropic.Anthropic) -> None:
    given: Any = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 200}
    whole = ask(client, **given)
    _, final = stream(client, **given)
    assert [block.input for block in final.content] == [block.input for block in whole.content]
    assert final.stop_reason == "tool_use"


def test_calls_and_their_results_are_read(client: anthropic.Anthropic, loaded: Loaded) -> None:
    """The prompt is the one that the template makes of the same turns in OpenAI's words."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome", "unit": "C"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]}
    messages: Any = [
        {"role": "user", "content": "How is Rome?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    counted = client.messages.count_tokens(model="demo", messages=messages, tools=[WEATHER])
    function = {"name": "weather", "description": "The weather of a city", "parameters": CITY_AND_UNIT}
    called = {"function": {"name": "weather", "arguments": {"city": "Rome", "unit": "C"}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "How is Rome?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [called]},
        {"role": "tool", "content": "sunny"},
        {"role": "user", "content": "Well?"},
    ]
    assert counted.input_tokens == prompt_length(loaded, turns, function)


def test_an_answer_that_matches_a_schema(client: anthropic.Anthropic) -> None:
    answer = ask(client, output_config={"format": {"type": "json_schema", "schema": NAMED}}, max_tokens=60)
    assert answer.content[0].text.startswith("{")
    assert '"name"' in answer.content[0].text


def test_errors_are_those_of_the_client(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="is not served here: ask for demo"):
        ask(client, model="claude-9")
    with pytest.raises(anthropic.BadRequestError, match="of type 'image'"):
        ask(client, [{"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}])
    with pytest.raises(anthropic.BadRequestError, match="this server runs no tools, and 'web_search' is of type"):
        ask(client, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    with pytest.raises(anthropic.BadRequestError, match="container: this server does not know the field"):
        ask(client, extra_body={"container": "c"})
