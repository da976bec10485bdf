"""One answer while it is made, and the conversation that it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hdtool.data.prompts import Message, Prompt
from hdtool.runtime.decode import Finish, Step
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stats import Stats
from hdtool.runtime.text_stream import TextStream, text_of


class Conversation:
    """A prompt, and what was said since."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.messages: list[Message] = list(prompt.messages)
        self._later = iter(prompt.later_turns)

    def goes_on(self, text: str) -> bool:
        """Hear an answer; whether the user has something to say to it, which is then part of the messages."""
        turn = next(self._later, None)
        if turn is None:
            return False
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn}]
        return True


class Answer:
    """One answer while it is made: iterate over it for its text."""

    def __init__(
        self,
        loaded: Loaded,
        drafter: Drafter,
        conversation: Conversation,
        prompt_tokens: int,
        steps: Iterable[Step] = (),
    ) -> None:
        self.asked = conversation.messages[-1]["content"]
        self.prompt = conversation.prompt
        self.prompt_tokens = prompt_tokens
        self.output_ids: list[int] = []
        self.stats = Stats()
        self.drafter = drafter
        self._tokenizer = loaded.tokenizer
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
        for step in self.stats.counted(self._steps, self.drafter):
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


class CollectedAnswer(Answer):
    """An answer that is made beside others: its steps come in from outside, and are looked at afterwards."""

    def __init__(self, loaded: Loaded, drafter: Drafter, conversation: Conversation, prompt_tokens: int) -> None:
        super().__init__(loaded, drafter, conversation, prompt_tokens)
        self._made: list[Step] = []
        self._seconds_before = dict(drafter.seconds)

    def add(self, step: Step) -> None:
        self._made.append(step)
        self.output_ids += step.tokens
        self.stats.add(step)
        if step.finish:
            self.stats.add_seconds(self._seconds_before, self.drafter.seconds)

    def _counted(self) -> Iterator[Step]:
        return iter(self._made)
