"""Tools for models whose chat template ignores tools: tools, calls and results become text of the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from hdtool.data.chat import conversation_text, has_chat_template
from hdtool.data.errors import PromptError, ToolsError
from hdtool.runtime.integrations.server.openai_formats import JsonDict
from hdtool.runtime.integrations.server.system_messages import SYSTEM, USER, join_changed, takes_instructions
from hdtool.runtime.integrations.server.tool_calls import CALL_CLOSING, CALL_OPENING, json_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESULT_OPENING, RESULT_CLOSING = "<tool_response>", "</tool_response>"
PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "Probe.", "parameters": {"type": "object", "properties": {}}},
}
TOOL_PROMPT = f"""\
# Tools

You answer with the help of functions. Each line describes one, with the JSON schema of its arguments:
{{tools}}

When a function helps, answer with a call of it and nothing after it:
{CALL_OPENING}
{{{{"name": "...", "arguments": {{{{...}}}}}}}}
{CALL_CLOSING}

Several calls may follow each other. You then get their results, in order. When no function helps, answer in words."""


class GenericTools:
    """Converts conversations with tools to plain messages; as a conversation grows, its beginning stays the same."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._takes_instructions = takes_instructions(tokenizer)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Self | None:
        """Return a converter for a tokenizer; None if it has no chat template, or one that presents tools itself."""
        return None if presents_tools(tokenizer) or not has_chat_template(tokenizer) else cls(tokenizer)

    def conversation(self, messages: Sequence[JsonDict], tools: Sequence[JsonDict]) -> list[JsonDict]:
        """Convert a conversation to system, user and assistant messages only, and present the tools in the first one.

        Tool results become user messages, joined with adjacent ones for templates that require alternating roles.
        """
        turns = [self._turn(message) for message in messages]
        if tools:
            prompt, _ = self._turn({"role": SYSTEM, "content": tool_prompt(tools)})
            turns.insert(int(messages[0]["role"] == SYSTEM), (prompt, True))
        return join_changed(turns)

    def _turn(self, message: JsonDict) -> tuple[JsonDict, bool]:
        """Convert a message to one that every template supports; return it, and whether its role has changed."""
        if message["role"] == SYSTEM and not self._takes_instructions:
            return {**message, "role": USER}, True
        if message["role"] == "tool":
            return {"role": USER, "content": f"{RESULT_OPENING}\n{message['content']}\n{RESULT_CLOSING}"}, True
        if calls := message.get("tool_calls"):
            shown = {name: value for name, value in message.items() if name != "tool_calls"}
            return shown | {"content": "\n".join([*filter(None, [message["content"]]), *map(_marked, calls)])}, False
        return message, False


def presents_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the chat template presents tools, or if it rejects a single user message."""
    try:
        conversation_text(tokenizer, [{"role": USER, "content": "question"}], chat=True, tools=[PROBE])
    except ToolsError:
        return False
    except PromptError:
        pass
    return True


def tool_prompt(tools: Sequence[JsonDict]) -> str:
    return TOOL_PROMPT.format(tools="\n".join(json_text(tool["function"]) for tool in tools))


def _marked(call: JsonDict) -> str:
    function = call["function"]
    return (
        f"{CALL_OPENING}\n{json_text({'name': function['name'], 'arguments': function['arguments']})}\n{CALL_CLOSING}"
    )
