"""Tools for a model whose chat template presents none: as text in the conversation, and held by a grammar."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from llguidance import LLMatcher
from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedTokenizerBase

from hdtool.data import demo
from hdtool.data.chat import conversation_text, encode_conversation, encode_text
from hdtool.data.prompts import Grammar
from hdtool.runtime.generation.grammar import GrammarCompiler
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.integrations.server.call_grammar import arguments_schema, array_of_calls, marked_calls
from hdtool.runtime.integrations.server.generic_tools import GenericTools, tool_prompt
from hdtool.runtime.integrations.server.logit_processors import LogitBias
from hdtool.runtime.integrations.server.openai_formats import RequestError
from hdtool.runtime.integrations.server.openai_requests import ChatRequest, template_messages
from hdtool.runtime.integrations.server.request_preparation import Preparer
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import load, load_tokenizer
from tests.server.plain import plain_ids
from tests.server.templates import ALTERNATING, TURNS
from tests.support.server import ALWAYS_DRAFTS, RunningServer

if TYPE_CHECKING:  # imported by the worker that uses it, as that takes seconds
    import openai

Row = dict[str, Any]
USERS_FIRST = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ALTERNATING
NO_SYSTEM = TURNS.replace("in messages", "in messages if message.role != 'system'")
WITH_TOOLS = "{{ tools | tojson if tools }}" + TURNS


def tool(name: str, **properties: Any) -> Row:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("weather", unit={"$ref": "#/$defs/unit"}, days={"type": "integer", "minimum": 1, "maximum": 9})
WEATHER["function"]["parameters"]["$defs"] = {"unit": {"enum": ["C", "F"]}}
TIME = tool(
    "time", zone={"enum": ["CET", "UTC"], "propertyNames": {}, "description": "zone ::= a name, // or a number"}
)
TOOLS = [WEATHER, TIME]


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    unit: Literal["C", "F"]
    days: int


def called(name: str, arguments: Row) -> Row:
    return {"id": "a", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


HISTORY: list[Row] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "How is Rome?"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [called("weather", {"unit": "C", "days": 1})] * 2},
    {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    {"role": "tool", "tool_call_id": "a", "content": "rainy"},
    {"role": "assistant", "content": "It is both."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": None, "tool_calls": [called("time", {"zone": "é"})]},
    {"role": "tool", "tool_call_id": "a", "content": "noon"},
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig())


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[Row], tools: list[Row]) -> str:
    generic = GenericTools.of(tokenizer)
    assert generic
    given = template_messages(ChatRequest.of({"messages": messages}).messages)
    return conversation_text(tokenizer, generic.conversation(given, tools), chat=True)


def test_a_template_that_presents_tools_is_used(tokenizer: PreTrainedTokenizerBase) -> None:
    for template, is_generic in ((WITH_TOOLS, False), (None, False), (TURNS, True), (USERS_FIRST, True)):
        tokenizer.chat_template = template
        assert (GenericTools.of(tokenizer) is not None) is is_generic


def test_calls_and_results_are_text_of_the_assistant_and_of_a_user(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TURNS
    call = '<tool_call>\n{"name": "weather", "arguments": {"unit": "C", "days": 1}}\n</tool_call>'
    assert rendered(tokenizer, HISTORY, TOOLS) == (
        f"<system>Be short.\n\n{tool_prompt(TOOLS)}<user>How is Rome?<assistant>Let me look.\n{call}\n{call}"
        "<user><tool_response>\nsunny\n</tool_response>\n\n<tool_response>\nrainy\n</tool_response>"
        "<assistant>It is both.<user>And now?"
        '<assistant><tool_call>\n{"name": "time", "arguments": {"zone": "é"}}\n</tool_call>'
        "<user><tool_response>\nnoon\n</tool_response>"
    )
    assert all(json.dumps(one["function"], ensure_ascii=False) in tool_prompt(TOOLS).splitlines() for one in TOOLS)


@pytest.mark.parametrize("template", [TURNS, ALTERNATING, USERS_FIRST, NO_SYSTEM])
@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "no tools"])
@pytest.mark.parametrize("start", [0, 1], ids=["instructions", "no instructions"])
def test_a_conversation_keeps_its_beginning_as_it_grows(
    tokenizer: PreTrainedTokenizerBase, template: str, tools: list[Row], start: int
) -> None:
    """Whether templates take a system message, or demand that turns alternate."""
    tokenizer.chat_template = template
    whole = rendered(tokenizer, HISTORY[start:], tools)
    assert ("Be short." in whole) is not start
    assert (tool_prompt(TOOLS) in whole) is bool(tools)
    for length in range(2, len(HISTORY)):
        assert whole.startswith(rendered(tokenizer, HISTORY[start:length], tools))


CALL = '<tool_call>\n{"name": "weather", "arguments": {"unit": "C", "days": 3}}\n</tool_call>'
NEXT = '\n<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>'
BARE = '{"name": "weather", "arguments": {"unit": "C", "days": 3}}'
BLOCK = '```json\n{\n  "name": "time",\n  "arguments": {"zone": "UTC"}\n}\n```'
ARRAY = '[{"name": "weather", "arguments": {"unit": "C", "days": 3}}'
FREE: Row = {"is_required": False, "is_thinking": False}
REQUIRED, THINKING = FREE | {"is_required": True}, FREE | {"is_thinking": True}


@pytest.mark.parametrize(
    ("options", "answer", "followed"),
    [
        (FREE, "A text with <tool_cal, </tool_call>\n{ and ü", None),
        (FREE, f"Let me look.\n{CALL}{NEXT}", None),
        (FREE, CALL + NEXT, None),
        (FREE, "See <tool_call> there", "See <tool_call>"),
        (FREE, CALL.replace("weather", "whether"), '<tool_call>\n{"name": "w'),
        (FREE, CALL.replace("C", "K"), '<tool_call>\n{"name": "weather", "arguments": {"unit": "'),
        (FREE, CALL + " Well.", CALL),
        (FREE | {"max_calls": 1}, CALL + NEXT, CALL),
        (FREE, 'She is {"name": "Ada", "arguments": {"unit": "K"}}.', None),
        (FREE, f"So: {BARE}", None),
        (FREE, BLOCK, None),
        (FREE, BARE.replace("C", "K"), '{"name": "weather", "arguments": {"unit": "'),
        (REQUIRED, CALL + NEXT, None),
        (REQUIRED, "Well.", ""),
        (THINKING, f"Do I <tool_call>?</think>\n\nYes.{CALL}", None),
        (THINKING, f"</think>{CALL} Well.", f"</think>{CALL}"),
    ],
)
def test_answers_that_the_grammar_follows(
    tokenizer: PreTrainedTokenizerBase, options: Row, answer: str, followed: str | None
) -> None:
    """``followed`` is how far; None if the answer may end where it does."""
    end = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer, [end], len(tokenizer))
    given: Row = {"max_calls": None} | options
    guide = compiler.guide(marked_calls(TOOLS, **given))
    ids = encode_text(tokenizer, answer, special=False)
    allowed = guide.allowed(ids)
    assert tokenizer.decode(ids[:allowed]) == (answer if followed is None else followed)
    if followed is None:
        guide.extend(ids)
        assert not guide.forbidden(torch.device("cpu"), len(tokenizer))[end]


def test_an_array_of_calls_knows_the_definitions_of_each_tool(tokenizer: PreTrainedTokenizerBase) -> None:
    compiler = GrammarCompiler(tokenizer, [tokenizer.eos_token_id], len(tokenizer))
    for max_calls, end in ((1, "]"), (None, ', {"name": "time", "arguments": {"zone": "CET"}}]')):
        ids = encode_text(tokenizer, ARRAY + end, special=False)
        assert compiler.guide(array_of_calls(TOOLS, max_calls)).allowed(ids) == len(ids)


def test_requests_at_once_compile_their_grammar_once(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Grammar] = []
    usual = GrammarCompiler._compile

    def slowly(compiler: GrammarCompiler, grammar: Grammar) -> LLMatcher:
        compiled.append(grammar)
        time.sleep(0.1)
        return usual(compiler, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", slowly)
    compiler, grammar = GrammarCompiler(tokenizer, [0], len(tokenizer)), array_of_calls(TOOLS, 1)
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(compiler.guide, [grammar] * 4))) == 4
    assert compiled == [grammar]


@pytest.mark.parametrize(
    ("parameters", "is_closed"),
    [
        ({"properties": {"a": {}}, "required": ["a"]}, True),
        ({"properties": {"a": {}}}, True),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, False),
        ({"properties": {"a": {}}, "required": "b"}, False),
        ({"properties": {"a": {}}, "anyOf": [{}]}, False),
        ({"properties": {}}, False),
        ({}, False),
    ],
)
def test_arguments_are_closed_where_the_schema_lists_all_that_it_requires(parameters: Row, is_closed: bool) -> None:
    schema = arguments_schema({"function": {"name": "f", "parameters": parameters}})
    assert (schema.get("additionalProperties") is False) is is_closed


def test_a_required_argument_need_not_be_listed(tokenizer: PreTrainedTokenizerBase) -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["b"]}
    unlisted: Row = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    ids = encode_text(tokenizer, '[{"name": "f", "arguments": {"a": 1, "b": 2}}]', special=False)
    guide = GrammarCompiler(tokenizer, [tokenizer.eos_token_id], len(tokenizer)).guide(array_of_calls([unlisted], 1))
    assert guide.allowed(ids) == len(ids)


def test_a_schema_that_no_grammar_can_hold_is_refused_by_the_name_of_its_tool() -> None:
    preparer = Preparer(load(ModelConfig()), DecodeConfig("ar"), SamplingConfig())

    def refused(*tools: Row, choice: str = "auto") -> str:
        request = {"messages": [{"role": "user", "content": "Hi"}], "tools": list(tools), "tool_choice": choice}
        with pytest.raises(RequestError) as error:
            preparer.chat(ChatRequest.of(request), "")
        assert (error.value.status, error.value.param) == (400, "tools")
        return str(error.value)

    broken, number = tool("f", a={"type": "person"}), {"type": "function", "function": {"name": "g", "parameters": 3}}
    for choice in ("auto", "required"):
        message = refused(TIME, broken, choice=choice)
        assert message == "tools: f: the JSON schema cannot be used (Invalid type: person): correct it"
    assert refused(number) == "tools: the parameters of 'g' must be a JSON schema"


MARK = "<tool_call>"


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, whose template presents no tools, with a bias to call one."""
    folder = tmp_path_factory.mktemp("calling") / "demo"
    shutil.copytree(demo.MODEL, folder)
    ids = encode_text(load_tokenizer(ModelConfig()), MARK, special=False)
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["sequence_bias"] = [[ids[: length + 1], 200.0 if length else 50.0] for length in range(len(ids))]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def server(calling: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with RunningServer(log, str(calling), "--served-model-name", "demo", *ALWAYS_DRAFTS) as running:
        yield running
        assert "Traceback" not in running.log, running.log


def asked(
    client: openai.OpenAI, messages: list[Row], *, stream: bool = False, **options: Any
) -> tuple[str, list[Any], str]:
    """Return the text, the calls and the reason of the end."""
    create: Any = client.chat.completions.create
    given = {"model": "demo", "max_tokens": 90, "temperature": 0.0, "tools": TOOLS} | options
    got = create(messages=messages, stream=stream, **given)
    choices = [chunk.choices[0] for chunk in got] if stream else [got.choices[0]]
    said = [choice.delta if stream else choice.message for choice in choices]
    calls = [call.function for one in said for call in one.tool_calls or ()]
    return "".join(one.content or "" for one in said), calls, choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [{}, {"tool_choice": "required"}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.each_value
def test_a_call_matches_the_schema_of_its_tool(client: openai.OpenAI, stream: bool, options: Row) -> None:
    question = {"role": "user", "content": "How is Rome?"}
    text, calls, reason = asked(client, [question], stream=stream, parallel_tool_calls=False, **options)
    assert (text, len(calls), reason) == ("", 1, "tool_calls")
    given = {"type": "function", "function": {"name": "weather"}}
    text, (call,), _ = asked(client, [question], stream=stream, tool_choice=given)
    assert (text, call.name) == ("", "weather")
    assert 1 <= Weather.model_validate_json(call.arguments).days <= 9


def test_a_model_stays_free_to_answer_in_text(client: openai.OpenAI, calling: Path) -> None:
    """By a bias against the first token of a call; the answer has the tokens of plain decoding."""
    loaded = load(ModelConfig(str(calling), threads=1))
    first, generic = encode_text(loaded.tokenizer, MARK, special=False)[0], GenericTools.of(loaded.tokenizer)
    messages = [{"role": "user", "content": "How is Rome?"}]
    text, calls, reason = asked(client, messages, max_tokens=24, logit_bias={str(first): -100})
    assert (calls, reason) == ([], "length") and generic
    ids = encode_conversation(loaded.tokenizer, generic.conversation(messages, TOOLS))
    assert text == text_of(loaded.tokenizer, plain_ids(loaded, ids, 24, first=[LogitBias({first: -100.0})]))


def test_the_next_turn_is_read_from_the_cache(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    given: Row = {"model": "demo", "max_tokens": 90, "temperature": 0.0, "tools": TOOLS, "tool_choice": "required"}
    first = create(messages=HISTORY[:2], parallel_tool_calls=False, **given)
    (call,) = first.choices[0].message.tool_calls
    answered = [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = create(messages=[*HISTORY[:2], *answered], **given)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 2
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_of_anthropic_gets_blocks(server: RunningServer, stream: bool) -> None:
    import anthropic

    function = WEATHER["function"]
    tools = [{"name": function["name"], "input_schema": function["parameters"]}]
    used = {"type": "tool_use", "id": "a", "name": "weather", "input": {"unit": "C", "days": 1}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "sunny"}
    turns = [
        {"role": "user", "content": "How is Rome?"},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    given: Any = {"model": "demo", "max_tokens": 90, "tools": tools, "messages": turns}
    given["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    url = server.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(**given) as events:
                answer: Any = events.get_final_message()
        else:
            answer = client.messages.create(**given)
    (block,) = answer.content
    assert (answer.stop_reason, block.type) == ("tool_use", "tool_use")
    assert block.name == "weather" and Weather.model_validate(block.input)
