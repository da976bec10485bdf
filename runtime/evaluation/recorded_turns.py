"""Turns: what the model was asked, as token ids, and what it is on record to have said."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hdtool.data.chat import conversation_text, encode_text, speaks_chat
from hdtool.data.errors import PromptError, RecordError
from hdtool.data.prompts import Message
from hdtool.data.traces import Recorded, Trace
from hdtool.runtime.text_stream import text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RecordedTurn:
    """One recorded answer and the context that it was given in."""

    conversation: str
    category: str
    number: int
    """Within its conversation, from 0."""
    prompt: list[int]
    answer: list[int]
    """The last token is the end of the turn, unless the answer was cut off."""
    most: int | None = None
    """Tokens that the answer was allowed to have: near the end, the loop clips its trees to what is left."""


class TurnReader:
    """Rebuilds the contexts of conversations with the tokenizer of the model that was asked."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Container[int], end: int | None, chat: bool | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._end = end
        self._chat = speaks_chat(tokenizer) if chat is None else chat

    def turns(self, trace: Trace) -> list[RecordedTurn]:
        try:
            return [self._turn(trace, number, answer) for number, answer in enumerate(trace.answers)]
        except PromptError as error:
            raise RecordError(f"{trace.where}: {error}") from None

    def _turn(self, trace: Trace, number: int, recorded: Recorded) -> RecordedTurn:
        asked = conversation_text(self._tokenizer, trace.messages[: recorded.place], chat=self._chat)
        prompt = self._ids(asked)
        if not prompt:
            raise PromptError("nothing stands before the answer: leave the conversation out")
        if recorded.ids is None:
            answer, most = self._answer(asked, prompt, trace.messages[: recorded.place + 1]), None
        else:
            answer, most = self._checked(recorded.ids, trace.messages[recorded.place]["content"]), recorded.most
        return RecordedTurn(trace.id, trace.category, number, prompt, answer, most)

    def _answer(self, asked: str, prompt: list[int], messages: Sequence[Message]) -> list[int]:
        """The tokens of an answer that is known as text, which is taken to have ended by itself."""
        said = messages[-1]["content"]
        whole = conversation_text(self._tokenizer, messages, chat=True, answered=True) if self._chat else asked + said
        ids = self._ids(whole)
        answer = ids[len(prompt) :]
        ended = self._ending_of(answer)
        # A template may tell an answer otherwise once it is given, or not mark its end.
        if ids[: len(prompt)] != prompt or (self._chat and ended is None):
            answer = encode_text(self._tokenizer, said, special=False)
            ended = self._ending_of(answer)
        if ended is not None:
            return answer[: ended + 1]
        if self._end is None:
            raise PromptError("this tokenizer knows no token that ends an answer: name a model that has one")
        return [*answer, self._end]

    def _ids(self, text: str) -> list[int]:
        return encode_text(self._tokenizer, text, special=not self._chat)

    def _ending_of(self, answer: list[int]) -> int | None:
        return next((place for place, token in enumerate(answer) if token in self._stops), None)

    def _checked(self, ids: Sequence[int], said: str) -> list[int]:
        """Recorded ids; another tokenizer would read them otherwise."""
        if max(ids) >= len(self._tokenizer) or text_of(self._tokenizer, ids) != said:
            raise PromptError(
                "the ids of an answer do not spell its text with this tokenizer: name the model that answered, "
                "with --model"
            )
        return list(ids)
