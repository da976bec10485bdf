"""Recorded turns as token ids: the context of each answer, and the answer."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hdtool.data.chat import conversation_text, encode_text, has_chat_template
from hdtool.data.conversations.rankings import Rankings
from hdtool.data.errors import PromptError, RecordError
from hdtool.data.prompts import Message
from hdtool.data.tally import Tally
from hdtool.data.traces import Recorded, Trace
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.model.load import load_stops, load_tokenizer
from hdtool.runtime.text_stream import text_of


@dataclass(frozen=True)
class RecordedTurn:
    """One recorded answer and its context."""

    conversation: str
    category: str
    number: int
    """Within its conversation, from 0."""
    prompt: list[int]
    answer: list[int]
    """Ends with the token that ends a turn, unless the answer was cut off."""
    most: int | None = None
    """The limit of the answer's length: near the limit, the loop clips draft trees."""
    rankings: Rankings | None = None
    """The target's best tokens at each position, if they were recorded."""


class TurnReader:
    """Rebuilds the contexts of recorded answers with the tokenizer of the model that gave them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Container[int], end: int | None, chat: bool | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._stops = stops
        self._end = end
        self._chat = has_chat_template(tokenizer) if chat is None else chat

    @classmethod
    def of_model(cls, model: ModelConfig, chat: bool | None = None) -> TurnReader:
        tokenizer = load_tokenizer(model)
        return cls(tokenizer, load_stops(model, tokenizer), tokenizer.eos_token_id, chat)

    def turns(self, trace: Trace) -> list[RecordedTurn]:
        try:
            return self._turns(trace)
        except PromptError as error:
            raise RecordError(f"{trace.where}: {error}") from None

    def usable(self, traces: Iterable[Trace], tally: Tally) -> Iterator[tuple[Trace, list[RecordedTurn]]]:
        """The traces with their turns; those whose contexts cannot be rebuilt are counted in ``tally``."""
        for trace in traces:
            try:
                yield trace, self._turns(trace)
            except PromptError as error:
                tally.refuse(trace.where, error)

    def _turns(self, trace: Trace) -> list[RecordedTurn]:
        return [self._turn(trace, number, answer) for number, answer in enumerate(trace.answers)]

    def _turn(self, trace: Trace, number: int, recorded: Recorded) -> RecordedTurn:
        asked = conversation_text(self.tokenizer, trace.messages[: recorded.place], chat=self._chat)
        prompt = self._ids(asked)
        if not prompt:
            raise PromptError("there is nothing before the answer: leave the conversation out")
        if recorded.ids is None:
            answer, most = self._answer(asked, prompt, trace.messages[: recorded.place + 1]), None
        else:
            answer, most = self._checked(recorded.ids, trace.messages[recorded.place]["content"]), recorded.most
        return RecordedTurn(trace.id, trace.category, number, prompt, answer, most, recorded.rankings)

    def _answer(self, asked: str, prompt: list[int], messages: Sequence[Message]) -> list[int]:
        """The tokens of an answer recorded as text, which counts as complete."""
        text = messages[-1]["content"]
        whole = conversation_text(self.tokenizer, messages, chat=True, answered=True) if self._chat else asked + text
        ids = self._ids(whole)
        answer = ids[len(prompt) :]
        ended = self._ending_of(answer)
        # A template may render a given answer differently, or not mark its end.
        if ids[: len(prompt)] != prompt or (self._chat and ended is None):
            answer = encode_text(self.tokenizer, text, special=False)
            ended = self._ending_of(answer)
        if ended is not None:
            return answer[: ended + 1]
        if self._end is None:
            raise PromptError("this tokenizer knows no token that ends an answer: name a model that has one")
        return [*answer, self._end]

    def _ids(self, text: str) -> list[int]:
        return encode_text(self.tokenizer, text, special=not self._chat)

    def _ending_of(self, answer: list[int]) -> int | None:
        return next((place for place, token in enumerate(answer) if token in self._stops), None)

    def _checked(self, ids: Sequence[int], text: str) -> list[int]:
        """The recorded ids; raises unless they decode to the recorded text."""
        if max(ids) >= len(self.tokenizer) or text_of(self.tokenizer, ids) != text:
            raise PromptError(
                "the ids of an answer do not spell its text with this tokenizer: name the model that answered, "
                "with --model"
            )
        return list(ids)
