"""The text of one answer while it is generated: stop strings, tool calls and log-probabilities."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hdtool.runtime.integrations.server.engine.logprobs import TokenLogprobs
from hdtool.runtime.integrations.server.preparation import Choice
from hdtool.runtime.integrations.server.protocol.delta import Delta
from hdtool.runtime.integrations.server.protocol.tool_calls import ToolCall, ToolCallReader, calls_of
from hdtool.runtime.sequence import Finish, Step
from hdtool.runtime.stats import Stats
from hdtool.runtime.stop_text import begun_length, first_stop
from hdtool.runtime.text_stream import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"


class AnswerText:
    """Turns the steps of an answer into what they add to it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, choice: Choice, ends: frozenset[int]) -> None:
        """``ends`` are the tokens that end answers; they are not part of the text."""
        self.stats = Stats()
        self._choice, self._ends = choice, ends
        tools = choice.asked.tools
        self._must_call = tools.grammar is not None
        self._reader = (
            ToolCallReader(tokenizer, tools.tools, choice.asked.prompt_text)
            if tools.tools and not self._must_call
            else None
        )
        # Tool calls may be marked by special tokens.
        self._stream = TextStream(tokenizer, skip_special_tokens=self._reader is None)
        self._held = ""
        self._is_cut = False
        self._calls = 0
        self._reported = 0
        self._required = ""

    def add(self, step: Step) -> Delta:
        """What a step adds; at the last one, with the reason for the end."""
        self.stats.add(step)
        finish = step.finish
        tokens = step.tokens[:-1] if finish is Finish.STOP and step.tokens[-1] in self._ends else step.tokens
        text = self._stream.add(tokens) + (self._stream.end() if finish else "")
        text = self._before_stop(text, is_last=finish is not None)
        reasoning: str = ""
        calls: list[ToolCall] = []
        if self._must_call:
            text, calls = self._required_calls(text, is_last=finish is not None)
        elif self._reader:
            text, reasoning, calls = self._reader.add(text)
            if finish:
                more = self._reader.end()
                text, reasoning, calls = text + more[0], reasoning + more[1], calls + more[2]
        self._calls += len(calls)
        return Delta(text, reasoning, calls, self._new_logprobs(len(tokens)), self._reason(finish))

    def _reason(self, finish: Finish | None) -> str | None:
        if finish is None:
            return None
        if finish is not Finish.STOP:
            return LENGTH
        return TOOL_CALLS if self._calls else STOP

    def _before_stop(self, text: str, *, is_last: bool) -> str:
        """The text that can be shown: up to a stop string, and without what may be the beginning of one."""
        stops = self._choice.stop_texts
        if not stops or self._is_cut:
            return "" if self._is_cut else text
        held = self._held + text
        end = first_stop(held, stops)
        self._is_cut = end is not None
        if end is None:
            end = len(held) - (0 if is_last else begun_length(held, stops))
        self._held = held[end:]
        return held[:end]

    def _required_calls(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """The calls of an answer that is a JSON array of them, at its end; else the text if it is incomplete."""
        self._required += text
        if not is_last:
            return "", []
        calls = calls_of(_json_of(self._required))
        return ("", calls) if calls else (self._required, [])

    def _new_logprobs(self, tokens: int) -> list[TokenLogprobs]:
        recorded = self._choice.recorded
        if recorded is None:
            return []
        first = self._reported
        self._reported += tokens
        return recorded[first : self._reported]


def _json_of(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
