"""The official client of OpenAI's API, through every parameter that the server has."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hdtool.data.chat import encode_conversation, encode_text
from hdtool.runtime.core.sampler import seed_of
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.integrations.server.logit_processors import AnswerPenalty, LogitBias
from hdtool.runtime.target.load import Loaded
from tests.server.plain import plain_ids, plain_text
from tests.server.schemas import CITY_AND_UNIT

if TYPE_CHECKING:  # imported by the worker that uses it, as that takes seconds
    import openai

QUESTION = "What is a list comprehension?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": CITY_AND_UNIT,
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def chat(client: openai.OpenAI, question: str = QUESTION, **options: Any) -> Any:
    given = {"model": "demo", "max_tokens": 24, "temperature": 0.0} | options
    create: Any = client.chat.completions.create
    return create(messages=[{"role": "user", "content": question}], **given)


def streamed(chunks: Any) -> tuple[str, list[Any]]:
    kept = list(chunks)
    return "".join(chunk.choices[0].delta.content or "" for chunk in kept if chunk.choices), kept


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_is_that_of_plain_decoding_with_the_same_seed(
    client: openai.OpenAI, loaded: Loaded, temperature: float
) -> None:
    expected = plain_text(loaded, QUESTION, 24, temperature=temperature, seed=5)
    answer = chat(client, temperature=temperature, seed=5)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    text, chunks = streamed(
        chat(client, temperature=temperature, seed=5, stream=True, stream_options={"include_usage": True})
    )
    assert text == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_a_seed_sampled_answers_differ(client: openai.OpenAI) -> None:
    texts = {chat(client, temperature=1.0).choices[0].message.content for _ in range(4)}
    assert len(texts) > 1


def test_several_choices_have_seeds_of_their_own(client: openai.OpenAI, loaded: Loaded) -> None:
    answer = chat(client, temperature=0.9, seed=7, n=3)
    texts = [choice.message.content for choice in answer.choices]
    seeds = [7, seed_of(7, 1), seed_of(7, 2)]
    assert texts == [plain_text(loaded, QUESTION, 24, temperature=0.9, seed=seed) for seed in seeds]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 72
    others = [choice.message.content for choice in chat(client, temperature=0.9, seed=8, n=3).choices]
    assert not set(texts) & set(others), "neighbouring seeds share no answer"


def test_sampling_parameters_are_those_of_generate(client: openai.OpenAI, loaded: Loaded) -> None:
    expected = plain_text(loaded, QUESTION, 24, temperature=1.2, seed=3, top_p=0.7, top_k=9, repetition_penalty=1.3)
    answer = chat(client, temperature=1.2, seed=3, top_p=0.7, extra_body={"top_k": 9, "repetition_penalty": 1.3})
    assert answer.choices[0].message.content == expected


def test_penalties_and_biases_change_the_scores(client: openai.OpenAI, loaded: Loaded) -> None:
    ids = encode_conversation(loaded.tokenizer, [{"role": "user", "content": QUESTION}])
    plain = plain_ids(loaded, ids, 24)
    penalty, bias = AnswerPenalty(len(ids), 0.5, 1.5), LogitBias({plain[0]: -100.0, plain[3]: 2.5})
    expected = text_of(loaded.tokenizer, plain_ids(loaded, ids, 24, first=[penalty, bias]))
    answer = chat(
        client,
        presence_penalty=0.5,
        frequency_penalty=1.5,
        logit_bias={str(plain[0]): -100, str(plain[3]): 2.5},
    )
    assert answer.choices[0].message.content == expected != text_of(loaded.tokenizer, plain)


def test_a_stop_string_ends_the_answer_and_is_cut_off(client: openai.OpenAI, loaded: Loaded) -> None:
    whole = plain_text(loaded, QUESTION, 24)
    stop = whole[12:16]
    expected = whole[: whole.index(stop)]
    answer = chat(client, stop=[stop, "never written"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected, "stop")
    assert streamed(chat(client, stop=stop, stream=True))[0] == expected


def test_both_limits_of_tokens(client: openai.OpenAI) -> None:
    import openai

    answer = chat(client, max_tokens=openai.omit, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 3


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_model(client: openai.OpenAI, loaded: Loaded, stream: bool) -> None:
    ids = encode_conversation(loaded.tokenizer, [{"role": "user", "content": QUESTION}])
    answer = plain_ids(loaded, ids, 12)
    with torch.inference_mode():
        logits = loaded.target.model(torch.tensor([ids + answer])).logits[0].float().log_softmax(-1)
    got = chat(client, max_tokens=12, logprobs=True, top_logprobs=2, stream=stream)
    chunks = [chunk.choices[0] for chunk in got] if stream else [got.choices[0]]
    entries = [entry for choice in chunks if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.token for entry in entries] == [loaded.tokenizer.decode([token]) for token in answer]
    for place, (token, entry) in enumerate(zip(answer, entries, strict=True)):
        row = logits[len(ids) + place - 1]
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)


def test_a_token_that_is_part_of_a_character_has_its_own_bytes(client: openai.OpenAI) -> None:
    got = chat(client, logprobs=True, top_logprobs=1, extra_body={"regex": "[é😀]{3}"})
    entries = got.choices[0].logprobs.content
    text = got.choices[0].message.content
    assert len(entries) > len(text) == 3
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == text
    for entry in entries:
        same = [one for one in entry.top_logprobs if one.token == entry.token and one.logprob == entry.logprob]
        assert all(one.bytes == entry.bytes for one in same)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_response_format_is_matched(client: openai.OpenAI, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = chat(client, max_tokens=80, response_format=form, temperature=temperature, seed=2)
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 99
    assert answer.choices[0].finish_reason == "stop"
    assert chat(client, extra_body={"regex": "ab+c"}).choices[0].message.content.startswith("ab")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_tool_is_called(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    got = chat(client, max_tokens=120, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, stream=stream)
    choices = [chunk.choices[0] for chunk in got] if stream else list(got.choices)
    calls = [call for one in choices for call in ((one.delta if stream else one.message).tool_calls or [])]
    assert [call.function.name for call in calls] == ["weather"]
    assert set(json.loads(calls[0].function.arguments)) == {"city", "unit"}
    assert choices[-1].finish_reason == "tool_calls"


def test_tools_may_be_presented_without_a_call_and_answered(client: openai.OpenAI) -> None:
    answer = chat(client, tools=[WEATHER])
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]},
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    got = client.chat.completions.create(model="demo", messages=messages, tools=[WEATHER], max_tokens=8)  # type: ignore[list-item]
    assert got.choices[0].message.content


def test_a_prediction_is_counted(client: openai.OpenAI, loaded: Loaded) -> None:
    expected = plain_text(loaded, QUESTION, 24)
    answer = chat(client, prediction={"type": "content", "content": expected})
    assert answer.choices[0].message.content == expected
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens >= 0


def test_the_next_turn_reads_its_end_only(client: openai.OpenAI, loaded: Loaded) -> None:
    question = "Tell me about dictionaries, sets and tuples, and when to use which of them in a program."
    first = chat(client, question).choices[0].message.content
    messages: list[Any] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And lists?"},
    ]
    got = client.chat.completions.create(model="demo", messages=messages, max_tokens=24, temperature=0)
    assert got.usage and got.usage.prompt_tokens_details
    cached = got.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= len(encode_text(loaded.tokenizer, question, special=False))
    ids = encode_conversation(loaded.tokenizer, messages)
    assert got.choices[0].message.content == text_of(loaded.tokenizer, plain_ids(loaded, ids, 24))


def test_completions_take_texts_and_tokens(client: openai.OpenAI, loaded: Loaded) -> None:
    texts = ["A list is", "def add(a, b):"]
    ids = [encode_text(loaded.tokenizer, text, special=True) for text in texts]
    expected = [text_of(loaded.tokenizer, plain_ids(loaded, one, 10)) for one in ids]
    for prompt in (texts, ids):
        got = client.completions.create(model="demo", prompt=prompt, max_tokens=10, temperature=0)
        assert [choice.text for choice in got.choices] == expected
    got = client.completions.create(model="demo", prompt=texts[0], max_tokens=10, temperature=0, echo=True)
    assert got.choices[0].text == texts[0] + expected[0]
    got = client.completions.create(model="demo", prompt=texts[0], max_tokens=10, temperature=0, logprobs=2)
    logprobs = got.choices[0].logprobs
    assert logprobs and logprobs.tokens and "".join(logprobs.tokens) == expected[0]
    assert logprobs.text_offset and logprobs.text_offset[0] == 0
    chunks = client.completions.create(model="demo", prompt=texts[1], max_tokens=10, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[1]


def test_models_are_listed(client: openai.OpenAI) -> None:
    import openai

    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="not served here"):
        chat(client, model="other")


def test_many_answers_at_once_are_those_given_alone(client: openai.OpenAI, loaded: Loaded) -> None:
    """More streams than the batch has slots; every third one is cut off."""
    questions = [f"What is the number {number} good for?" for number in range(18)]
    expected = [plain_text(loaded, question, 40) for question in questions]

    def answered(number: int) -> str:
        stream = chat(client, questions[number], max_tokens=40, stream=True)
        if number % 3:
            return streamed(stream)[0]
        begun = next(chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content)
        stream.close()
        return str(begun)

    with ThreadPoolExecutor(9) as pool:
        for number, text in enumerate(pool.map(answered, range(18))):
            assert text == expected[number] if number % 3 else expected[number].startswith(text)
