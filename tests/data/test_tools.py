"""Tools: read from files and rows, and presented by the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hdtool.data.chat import encode_conversation
from hdtool.data.errors import PromptError
from hdtool.data.prompts import read_prompts, read_tools, tools_of
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load_tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.mark.parametrize("written", [[WEATHER], {"tools": [WEATHER]}])
def test_a_file_holds_a_list_or_a_request(written: Any, tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(written))
    assert read_tools(file) == (WEATHER,)


@pytest.mark.parametrize("value", [{}, "get_weather", [3], [{"function": {}}], [{"function": {"name": 3}}]])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(PromptError, match=r"row 3: `tools` must be a list of"):
        tools_of(value, "row 3")


def test_a_row_of_a_prompts_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "Rain?", "tools": [WEATHER]}) + "\n")
    (prompt,) = read_prompts(file)
    assert prompt.tools == (WEATHER,)


def test_the_chat_template_presents_them() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    tokenizer.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "Rain?"}]
    ids = encode_conversation(tokenizer, messages, tools=(WEATHER,))
    assert tokenizer.decode(ids) == "[get_weather]Rain?"
    assert tokenizer.decode(encode_conversation(tokenizer, messages)) == "Rain?"


def test_a_template_that_fails_refuses_the_conversation_in_a_line() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    for template in ("{{ messages[0] + 1 }}", "{{ raise_exception('no') }}", "{{ messages[0].content | int + [] }}"):
        tokenizer.chat_template = template
        with pytest.raises(PromptError, match="the model's chat template refuses the conversation: "):
            encode_conversation(tokenizer, [{"role": "user", "content": "Rain?"}])
