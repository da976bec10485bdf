"""OpenAI's official client, through every parameter of the Responses API that the server has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hdtool.runtime.target.load import Loaded
from tests.server.plain import plain_text, prompt_length
from tests.server.schemas import CITY_AND_UNIT, NAMED

if TYPE_CHECKING:  # imported by the worker that uses it, as that takes seconds
    import openai

QUESTION = "What is a list comprehension?"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": CITY_AND_UNIT,
}


def ask(client: openai.OpenAI, given: Any = QUESTION, **options: Any) -> Any:
    create: Any = client.responses.create
    return create(**{"model": "demo", "input": given, "max_output_tokens": 24, "temperature": 0.0} | options)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.2, "top_p": 0.7}])
def test_an_answer_is_that_of_plain_decoding(client: openai.OpenAI, loaded: Loaded, sampling: dict[str, Any]) -> None:
    expected = plain_text(loaded, QUESTION, 24, seed=5, **sampling)
    answer = ask(client, extra_body={"seed": 5}, **sampling)
    assert answer.output_text == expected
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 24
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


def test_a_stream_ends_as_the_whole_answer(client: openai.OpenAI) -> None:
    whole = ask(client, metadata={"kind": "test"})
    events = list(ask(client, stream=True, metadata={"kind": "test"}))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    kept = {"id", "created_at", "output", "usage", "completed_at"}
    assert last.response.model_dump(exclude=kept) == whole.model_dump(exclude=kept)
    assert last.response.usage.total_tokens == whole.usage.total_tokens


def test_the_helper_of_the_client_reads_a_stream(client: openai.OpenAI) -> None:
    given: Any = {"text": {"format": {"type": "json_schema", "name": "person", "schema": NAMED}}}
    stream: Any = client.responses.stream
    with stream(model="demo", input=QUESTION, max_output_tokens=60, temperature=0.0, **given) as events:
        kinds = {event.type for event in events}
        final = events.get_final_response()
    whole = ask(client, max_output_tokens=60, **given)
    assert (final.status, final.output_text) == (whole.status, whole.output_text) == ("completed", whole.output_text)
    assert whole.output_text.startswith("{") and '"name"' in whole.output_text
    assert whole.text.format.name == "person"
    assert {"response.output_item.added", "response.content_part.done", "response.output_text.done"} <= kinds


def test_instructions_and_the_first_messages_are_one_system_message(client: openai.OpenAI) -> None:
    said: Any = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": QUESTION}]
    parts: Any = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    both = ask(client, said, instructions="Be kind.")
    assert both.usage.input_tokens == ask(client, parts, instructions="Be kind.\n\nBe short.").usage.input_tokens
    assert both.output_text == ask(client, parts, instructions="Be kind.\n\nBe short.").output_text


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = ask(client, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4)
    (part,) = answer.output[0].content
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * 4
    events = list(ask(client, include=["message.output_text.logprobs"], max_output_tokens=4, stream=True))
    streamed = [
        entry.token for event in events if event.type == "response.output_text.delta" for entry in event.logprobs
    ]
    assert streamed == [entry.token for entry in part.logprobs]


def test_a_function_that_must_be_called(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "name": "weather"}):
        answer = ask(client, tools=[WEATHER], tool_choice=choice, max_output_tokens=200)
        call = answer.output[0]
        assert (answer.status, call.type, call.name) == ("completed", "function_call", "weather")
        assert set(json.loads(call.arguments)) == {"city", "unit"}
    events = list(ask(client, tools=[WEATHER], tool_choice=choice, max_output_tokens=200, stream=True))
    assert events[-1].response.output[0].arguments == call.arguments
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.arguments == call.arguments


def test_calls_and_their_outputs_are_read(client: openai.OpenAI, loaded: Loaded) -> None:
    """The prompt is the one that the template makes of the same turns as a chat."""
    call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
    given: Any = [
        {"role": "user", "content": "How is Rome?"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "Wait."}]},
        call,
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    ]
    counted = client.responses.input_tokens.count(model="demo", input=given, tools=[WEATHER])
    called = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "How is Rome?"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [called]},
        {"role": "tool", "content": "sunny"},
    ]
    assert counted.input_tokens == prompt_length(loaded, turns, {"name": "weather", "parameters": CITY_AND_UNIT})


def test_what_needs_kept_responses_is_refused_by_name(client: openai.OpenAI) -> None:
    import openai

    kept: dict[str, Any] = {"previous_response_id": "resp_1", "conversation": "conv_1", "prompt": {"id": "p"}}
    for name, value in kept.items():
        with pytest.raises(openai.BadRequestError, match=f"{name}: this server keeps no responses"):
            ask(client, **{name: value})
    for option in ({"store": True}, {"background": True}, {"truncation": "auto"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(option))):
            ask(client, **option)
    with pytest.raises(openai.BadRequestError, match="moderation: this server does not know the field"):
        ask(client, extra_body={"moderation": {}})
    with pytest.raises(openai.BadRequestError, match="this one is of type 'web_search'"):
        ask(client, tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="of type 'input_image'"):
        ask(
            client,
            [{"role": "user", "content": [{"type": "input_image", "image_url": "https://example.com/a"}]}],
        )
