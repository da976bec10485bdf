"""Bodies of requests that each API refuses, by what is wrong with them."""

from __future__ import annotations

from typing import Any

Table = dict[str, dict[str, Any]]
ROME: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
BYTES: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{",
    "half a body": b'{"model": "demo", "max_tokens": 4, "mess',
    "not UTF-8": b'{"max_tokens": 4, "messages": [{"role": "user", "content": "\xff\xfe"}], "input": "\xff"}',
    "a list": b"[]",
    "a text": b'"hello"',
    "null": b"null",
    "a number": b"17",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "a body of 9 MiB": b'{"input": "' + b"a" * 9 * 2**20 + b'"}',
}
SHARED: Table = {
    "unknown model": {"model": "gpt-9"},
    "model a number": {"model": 3},
    "model a list": {"model": ["demo"]},
    "temperature a text": {"temperature": "warm"},
    "temperature negative": {"temperature": -0.1},
    "temperature too high": {"temperature": 2.5},
    "top_p 0": {"top_p": 0},
    "top_p above 1": {"top_p": 1.01},
    "top_p a list": {"top_p": [0.5]},
    "seed a text": {"seed": "1"},
    "seed too large": {"seed": 2**70},
    "stream a text": {"stream": "yes"},
    "stream a number": {"stream": 1},
    "tools an object": {"tools": {}},
    "tools of numbers": {"tools": [1]},
    "tool without a name": {"tools": [{"type": "function", "input_schema": ROME}]},
    "tool_choice without tools": {"tool_choice": {"type": "tool", "name": "f"}},
}
"""Fields that all APIs for conversations have."""
AGENTS: Table = {
    "metadata a text": {"metadata": "a"},
    "an unknown field": {"messages_of_others": []},
    "n": {"n": 2},
    "logit_bias": {"logit_bias": {"5": 1}},
    "service_tier": {"service_tier": "flex"},
    "container": {"container": "c"},
    "mcp_servers": {"mcp_servers": [{"type": "url", "url": "https://example.com"}]},
    "context_management": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
}
"""Fields of the APIs of agents, which refuse unknown ones."""


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


def bodies(whole: dict[str, Any], *tables: Table) -> dict[str, Any]:
    """What is no object, and a right body with wrong fields."""
    return BYTES | {name: whole | fields for table in tables for name, fields in table.items()}


CONVERSATIONS: Table = {
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens negative": {"max_tokens": -4},
    "max_tokens a text": {"max_tokens": "8"},
    "max_tokens a fraction": {"max_tokens": 1.5},
    "top_k a text": {"top_k": "4"},
    "messages empty": {"messages": []},
    "messages a text": {"messages": "Hi"},
    "messages an object": {"messages": {"role": "user", "content": "Hi"}},
    "message a text": {"messages": ["Hi"]},
    "message null": {"messages": [None]},
    "no role": {"messages": [{"content": "Hi"}]},
    "unknown role": said("Hi", "robot"),
    "no content": {"messages": [{"role": "user"}]},
    "content a number": said(5),
    "content null": said(None),
    "a part without text": said([{"type": "text"}]),
    "100,000 tokens": said("one two three " * 34_000),
}
"""Fields of chats and of the Messages API."""


def chat_form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


CHAT_FIELDS: Table = {
    "min_p negative": {"min_p": -0.1},
    "max_completion_tokens a list": {"max_completion_tokens": [1]},
    "n 0": {"n": 0},
    "n too large": {"n": 1000},
    "n a bool": {"n": True},
    "stop a number": {"stop": 3},
    "stop empty": {"stop": ""},
    "too many stops": {"stop": [str(number) for number in range(100)]},
    "stop too long": {"stop": "a" * 2000},
    "stream_options a list": {"stream": True, "stream_options": []},
    "logprobs a number": {"logprobs": 3},
    "top_logprobs too many": {"logprobs": True, "top_logprobs": 99},
    "logit_bias a list": {"logit_bias": [1]},
    "logit_bias of a word": {"logit_bias": {"hello": 1}},
    "logit_bias of no token": {"logit_bias": {"99999999": 1}},
    "logit_bias too large": {"logit_bias": {"5": 1000}},
    "logit_bias of many digits": {"logit_bias": {"5" * 5000: 1}},
    "presence_penalty too large": {"presence_penalty": 3},
    "frequency_penalty a text": {"frequency_penalty": "1"},
    "response_format a text": {"response_format": "json"},
    "response_format unknown": {"response_format": {"type": "xml"}},
    "response_format without schema": {"response_format": {"type": "json_schema"}},
    "schema a number": chat_form(5),
    "schema of an unknown type": chat_form({"type": "person"}),
    "schema that nothing matches": chat_form(False),
    "schema with an endless reference": chat_form({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "schema with a reference to nothing": chat_form({"$ref": "#/$defs/a"}),
    "schema of another place": chat_form({"$ref": "https://example.com/schema"}),
    "schema of endless items": chat_form({"type": "array", "minItems": 10**9, "items": {"const": 1}}),
    "schema of endless properties": chat_form(
        {"type": "object", "required": [f"p{number}" for number in range(100_000)]}
    ),
    "regex broken": {"regex": "("},
    "regex bomb": {"regex": "(a{1000}){1000}{1000}"},
    "grammar broken": {"grammar": "start: ("},
    "grammar and regex": {"grammar": 'start: "a"', "regex": "a"},
    "tool_choice unknown": {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function", "function": {"name": "g"}},
    },
    "tool without a name": {"tools": [{"type": "function", "function": {}}]},
    "tool_choice without tools": {"tool_choice": "required"},
    "functions": {"functions": [{"name": "f"}]},
    "audio": {"modalities": ["audio"], "audio": {"voice": "a"}},
    "prediction empty": {"prediction": {"type": "content", "content": ""}},
    "prediction a number": {"prediction": 3},
    **{
        f"template variable {name}": {"chat_template_kwargs": {name: []}}
        for name in ("self", "messages", "conversations", "tools", "raise_exception")
    },
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
    "arguments that are no JSON": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]
    },
    "arguments that are a list": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]
    },
}
CHAT_BODIES = bodies(said("Hi"), SHARED, CONVERSATIONS, CHAT_FIELDS) | {
    "NaN": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "huge number": b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e400}',
    "no messages": {},
    "half a character": b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
}
COMPLETION_BODIES: dict[str, Any] = {
    "min_p above 1": {"prompt": "Hi", "min_p": 1.01},
    "no prompt": {},
    "prompt null": {"prompt": None},
    "prompt a number": {"prompt": 4},
    "prompt empty": {"prompt": []},
    "prompt of no tokens": {"prompt": [[]]},
    "token that does not exist": {"prompt": [10**9]},
    "token negative": {"prompt": [-1]},
    "texts and tokens": {"prompt": ["a", 1]},
    "too many prompts": {"prompt": ["a"] * 1000},
    "half a character": b'{"prompt": "\\udc00"}',
    "best_of": {"prompt": "a", "best_of": 4},
    "suffix": {"prompt": "a", "suffix": "b"},
    "logprobs a bool": {"prompt": "a", "logprobs": True},
    "echo and logprobs": {"prompt": "a", "echo": True, "logprobs": 0},
    "echo a text": {"prompt": "a", "echo": "yes"},
}
HI = {"model": "demo", "max_tokens": 4, **said("Hi")}
TOOL = {"name": "f", "input_schema": ROME}
MESSAGE_FIELDS: Table = {
    "max_tokens null": {"max_tokens": None},
    "role of OpenAI": said("Hi", "tool"),
    "content of numbers": said([1]),
    "a part without a type": said([{"text": "Hi"}]),
    "an image": said([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}]),
    "a document": said([{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}]),
    "a search in a result": said([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "search_result"}]}]),
    "thinking of no turn": {
        "context_management": {
            "edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}]
        }
    },
    "betas a text": {"betas": "a"},
    "speed": {"speed": "fast"},
    "a result of numbers": said([{"type": "tool_result", "tool_use_id": "a", "content": [3]}]),
    "a turn to be continued": said("The answer is", "assistant"),
    "a call without a name": {
        "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, *HI["messages"]]
    },
    "a call whose input is a text": {
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "b"}]},
            *HI["messages"],
        ]
    },
    "system a number": {"system": 4},
    "system an image": {"system": [{"type": "image"}]},
    "stop_sequences a text": {"stop_sequences": "a"},
    "stop_sequences of an empty text": {"stop_sequences": [""]},
    "stop_sequences too many": {"stop_sequences": [str(number) for number in range(100)]},
    "stop_sequences too long": {"stop_sequences": ["a" * 2000]},
    "temperature above 1": {"temperature": 1.5},
    "top_k negative": {"top_k": -1},
    "a tool of the makers": {"tools": [{"type": "bash_20250124", "name": "bash"}]},
    "a tool without input_schema": {"tools": [{"name": "f"}]},
    "a tool whose schema is a text": {"tools": [{"name": "f", "input_schema": "a"}]},
    "tool_choice a text": {"tools": [TOOL], "tool_choice": "auto"},
    "tool_choice unknown": {"tools": [TOOL], "tool_choice": {"type": "required"}},
    "tool_choice of no tool": {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
    "tool_choice any and a schema": {
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
        "output_config": {"format": {"type": "json_schema", "schema": ROME}},
    },
    "thinking a bool": {"thinking": True},
    "thinking unknown": {"thinking": {"type": "deep"}},
    "thinking without budget": {"thinking": {"type": "enabled", "budget_tokens": 0}},
    "output_config unknown": {"output_config": {"style": "plain"}},
    "schema without a type": {"output_config": {"format": {"schema": ROME}}},
    "schema that nothing matches": {"output_config": {"format": {"type": "json_schema", "schema": {"enum": []}}}},
    "schema broken": {"output_config": {"format": {"type": "json_schema", "schema": {"type": "person"}}}},
}
MESSAGE_BODIES = bodies(HI, SHARED, AGENTS, CONVERSATIONS, MESSAGE_FIELDS) | {
    "nothing": {},
    "no messages": {"max_tokens": 4},
    "no max_tokens": {"messages": HI["messages"]},
    "half a character": b'{"max_tokens": 4, "messages": [{"role": "user", "content": "\\ud83d"}]}',
}
FUNCTION = {"type": "function", "name": "f", "parameters": ROME}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def form(schema: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}


RESPONSE_FIELDS: Table = {
    "instructions a list": {"instructions": ["a"]},
    "max_output_tokens 0": {"max_output_tokens": 0},
    "max_output_tokens a text": {"max_output_tokens": "8"},
    "max_tokens of a chat": {"max_tokens": 8},
    "top_logprobs too many": {"top_logprobs": 99},
    "include unknown": {"include": ["file_search_call.results"]},
    "include a text": {"include": "reasoning.encrypted_content"},
    "verbosity": {"text": {"verbosity": "low"}},
    "reasoning a text": {"reasoning": "high"},
    "reasoning unknown": {"reasoning": {"mode": "pro"}},
    "stream_options unknown": {"stream_options": {"include_usage": True}},
    "a tool of the makers": {"tools": [{"type": "file_search", "vector_store_ids": ["a"]}]},
    "a free-form tool without a name": {"tools": [{"type": "custom"}]},
    "a namespace without tools": {"tools": [{"type": "namespace", "name": "a"}]},
    "a namespace of numbers": {"tools": [{"type": "namespace", "name": "a", "tools": [1]}]},
    "a namespace in a namespace": {
        "tools": [{"type": "namespace", "name": "a", "tools": [{"type": "namespace", "name": "b", "tools": []}]}]
    },
    "client_metadata a text": {"client_metadata": "a"},
    "a function in the form of chats": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "tool_choice unknown": {"tools": [FUNCTION], "tool_choice": "any"},
    "tool_choice of no tool": {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}},
    "tool_choice of the makers": {"tools": [FUNCTION], "tool_choice": {"type": "file_search"}},
    "format unknown": {"text": {"format": {"type": "xml"}}},
    "format without schema": {"text": {"format": {"type": "json_schema", "name": "a"}}},
    "input null": {"input": None},
    "input a number": {"input": 4},
    "input empty": {"input": []},
    "input of texts": {"input": ["Hi"]},
    "an item null": {"input": [None]},
    "no role": item(content="Hi"),
    "unknown role": item(role="robot", content="Hi"),
    "role of a chat": item(role="tool", content="Hi"),
    "content a number": item(role="user", content=4),
    "a part without a type": item(role="user", content=[{"text": "Hi"}]),
    "a part without text": item(role="user", content=[{"type": "input_text"}]),
    "a file": item(role="user", content=[{"type": "input_file", "file_data": "aGk="}]),
    "an item of another type": item(type="web_search_call", id="a"),
    "a reference": item(type="item_reference", id="a"),
    "a call without a name": item(type="function_call", call_id="a", arguments="{}"),
    "a call without an id": item(type="function_call", name="f", arguments="{}"),
    "a call whose arguments are no JSON": item(type="function_call", call_id="a", name="f", arguments="{"),
    "a call whose arguments are an object": item(type="function_call", call_id="a", name="f", arguments={}),
    "an output without an id": item(type="function_call_output", output="a"),
    "an output of a number": item(type="function_call_output", call_id="a", output=[4]),
    "an output of another type": item(type="function_call_output", call_id="a", output=[{"type": "link"}]),
    "a free-form call without an id": item(type="custom_tool_call", name="f", input="a"),
    "a free-form call whose input is an object": item(type="custom_tool_call", call_id="a", name="f", input={}),
    "tool_choice and a schema": form(ROME) | {"tools": [FUNCTION], "tool_choice": "required"},
    "schema broken": form({"type": "person"}),
    "schema that nothing matches": form({"enum": []}),
    "100,000 tokens": {"input": "one two three " * 34_000},
}
RESPONSE_BODIES = bodies({"model": "demo", "input": "Hi"}, SHARED, AGENTS, RESPONSE_FIELDS) | {
    "nothing": {},
    "no input": {"model": "demo"},
    "half a character": b'{"input": "\\udc00"}',
}
