"""One answer, iterated over while it is generated, and the conversation that contains it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hdtool.data.prompts import Message, Prompt
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.sequence import Finish, Step
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stats import Stats
from hdtool.runtime.stop_text import Piece, before_stop, cut
from hdtool.runtime.text_stream import TextStream, text_of


class Conversation:
    """The messages of a prompt, the answers to them and the user turns that follow."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.messages: list[Message] = list(prompt.messages)
        self.prediction = prompt.prediction
        """Of the next answer; empty if there is none."""
        self._later = iter(prompt.later_turns)

    def add_answer(self, text: str) -> bool:
        """Add an answer and the next user turn to the messages; return False if there is no further turn."""
        self.prediction = ""
        turn = next(self._later, None)
        if turn is None:
            return False
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn}]
        return True


class Answer:
    """One answer: iterating over it generates the answer and yields its text."""

    def __init__(
        self,
        loaded: Loaded,
        drafter: Drafter,
        conversation: Conversation,
        prompt_tokens: int,
        steps: Iterable[Step] = (),
        stop: Sequence[str] = (),
    ) -> None:
        """``stop`` holds the stop strings; the text ends before the first of them."""
        self.question = conversation.messages[-1]["content"]
        self.prompt = conversation.prompt
        self.prompt_tokens = prompt_tokens
        self.output_ids: list[int] = []
        self.stats = Stats()
        self.drafter = drafter
        self._tokenizer = loaded.tokenizer
        self._steps = steps
        self._stop = stop

    def __iter__(self) -> Iterator[str]:
        if not self._stop:  # as ``before_stop`` would, with fewer frames between a step and its text
            return (text for text in self._texts() if text)
        pieces = ((text, SourceName.NONE) for text in self._texts())
        return (text for text, _ in before_stop(pieces, self._stop))

    def by_source(self) -> Iterator[Piece]:
        """Generate the answer and yield the text of each token with the source that drafted it."""
        return before_stop(self._pieces_by_source(), self._stop)

    def _texts(self) -> Iterator[str]:
        text = TextStream(self._tokenizer)
        for step in self._counted():
            yield text.add(step.tokens)
        yield text.end()

    def _pieces_by_source(self) -> Iterator[Piece]:
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
        """End the answer here; the tokens generated so far remain."""
        self.stats.finish = Finish.INTERRUPT

    @property
    def text(self) -> str:
        return cut(text_of(self._tokenizer, self.output_ids), self._stop)


class CollectedAnswer(Answer):
    """An answer generated in a batch: the batch adds its steps, and iterating replays them."""

    def __init__(
        self,
        loaded: Loaded,
        drafter: Drafter,
        conversation: Conversation,
        prompt_tokens: int,
        stop: Sequence[str] = (),
    ) -> None:
        super().__init__(loaded, drafter, conversation, prompt_tokens, stop=stop)
        self._collected: list[Step] = []
        self._seconds_before = dict(drafter.seconds)

    def add(self, step: Step) -> None:
        self._collected.append(step)
        self.output_ids += step.tokens
        self.stats.add(step)
        if step.finish:
            self.stats.add_seconds(self._seconds_before, self.drafter.seconds)

    def _counted(self) -> Iterator[Step]:
        return iter(self._collected)
