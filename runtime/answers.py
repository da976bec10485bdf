"""Answers to prompts: conversations in, text out, one model and one set of settings for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hdtool.data.chat import encode_conversation
from hdtool.data.errors import PromptError
from hdtool.data.prompts import Message, Prompt
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig, ShelfConfig
from hdtool.runtime.decode import Finish, Step, decode, room_for
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.load import Loaded, load
from hdtool.runtime.methods import drafter_for
from hdtool.runtime.sampler import Sampler
from hdtool.runtime.shelf import Shelf
from hdtool.runtime.sources import SourceName
from hdtool.runtime.stats import Stats
from hdtool.runtime.text import TextStream, text_of


class Answer:
    """One answer while it is made: iterate over it for its text."""

    def __init__(
        self, loaded: Loaded, drafter: Drafter, asked: str, ids: list[int], steps: Iterator[Step], prompt: Prompt
    ) -> None:
        self.asked = asked
        self.prompt = prompt
        self.prompt_tokens = len(ids)
        self.output_ids: list[int] = []
        self.stats = Stats()
        self._tokenizer = loaded.tokenizer
        self._drafter = drafter
        self._steps = steps

    def __iter__(self) -> Iterator[str]:
        text = TextStream(self._tokenizer)
        for step in self._counted():
            yield text.add(step.tokens)
        yield text.end()

    def by_source(self) -> Iterator[tuple[str, SourceName]]:
        """The text token by token, each with the source that drafted it; instead of iterating."""
        text = TextStream(self._tokenizer)
        for step in self._counted():
            for token, source in zip(step.tokens, step.sources, strict=True):
                yield text.add([token]), source
        yield text.end(), SourceName.NONE

    def _counted(self) -> Iterator[Step]:
        for step in self.stats.counted(self._steps, self._drafter):
            self.output_ids += step.tokens
            yield step

    @property
    def interrupted(self) -> bool:
        return self.stats.finish is Finish.INTERRUPT

    def interrupt(self) -> None:
        """End the answer where it is; what there is of it stands."""
        self.stats.finish = Finish.INTERRUPT

    @property
    def text(self) -> str:
        return text_of(self._tokenizer, self.output_ids)


class Answerer:
    """A model with the settings that every answer of a command shares."""

    def __init__(
        self,
        model: ModelConfig,
        decoding: DecodeConfig,
        sampling: SamplingConfig,
        chat: bool | None = None,
        shelf: ShelfConfig | None = None,
    ) -> None:
        self.loaded = load(model)
        self.shelf = Shelf.for_tokenizer(self.loaded.tokenizer, shelf or ShelfConfig(), decoding.databases)
        self._drafter = drafter_for(decoding, self.loaded.target, self.shelf)
        self._decoding = decoding
        self._sampling = sampling
        self._chat = chat

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse a prompt that cannot be answered before the first one is."""
        for prompt in prompts:
            try:
                room_for(self.loaded.target, self._encode(prompt.messages), self._decoding.max_new_tokens)
            except PromptError as error:
                raise PromptError(f"prompt {prompt.id}: {error}" if len(prompts) > 1 else str(error)) from None

    def answers(self, prompt: Prompt) -> Iterator[Answer]:
        """The answer to each of the user's turns; every one must be iterated before the next is taken."""
        messages: list[Message] = list(prompt.messages)
        answer = self._answer(messages, prompt)
        yield answer
        for turn in prompt.later_turns:
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": turn}]
            answer = self._answer(messages, prompt)
            yield answer

    def _answer(self, messages: Sequence[Message], prompt: Prompt) -> Answer:
        ids = self._encode(messages)
        target = self.loaded.target
        sampler = Sampler(self._sampling, ids, target.model.generation_config)
        steps = decode(
            target,
            ids,
            sampler,
            max_new_tokens=self._decoding.max_new_tokens,
            stops=self.loaded.stops,
            drafter=self._drafter,
        )
        return Answer(self.loaded, self._drafter, messages[-1]["content"], ids, steps, prompt)

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        return encode_conversation(self.loaded.tokenizer, messages, chat=self._chat)
