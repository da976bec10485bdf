"""Conversations that are answered several at once, and told in the order of their prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from hdtool.data.errors import PromptError
from hdtool.data.prompts import Prompt
from hdtool.runtime.answer import Answer, CollectedAnswer, Conversation
from hdtool.runtime.batch import Request
from hdtool.runtime.decode import Step
from hdtool.runtime.drafter import Drafter

Seated = tuple["BatchedConversation", CollectedAnswer]
Start = Callable[[Conversation, Drafter], Request[CollectedAnswer]]
"""Makes a request of what a conversation has come to; refuses one that cannot be answered."""
Decode = Callable[[Callable[[], Request[Seated] | None]], Iterator[tuple[Request[Seated], Step]]]
"""Answers requests, as many at once as it likes, until there are none."""


class BatchedConversation(Conversation):
    """A conversation that others are waiting with."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.answers: list[CollectedAnswer] = []
        self.is_over = False
        self.error: PromptError | None = None

    def told(self) -> Iterator[Answer]:
        yield from self.answers
        if self.error:
            raise self.error


class SideBySide:
    """The answers to a list of prompts."""

    def __init__(self, prompts: Sequence[Prompt], start: Start, drafters: Sequence[Drafter]) -> None:
        """There must be a drafter for each conversation that is answered at once."""
        self._start = start
        self._free = list(drafters)
        self._untold = deque(BatchedConversation(prompt) for prompt in prompts)
        self._waiting = deque(self._untold)

    def answers(self, decode: Decode) -> Iterator[Answer]:
        """Prompt by prompt, turn by turn. After an interrupt, by Ctrl-C or of an answer, what there is by then."""
        try:
            for request, step in decode(self._ask):
                self._add(*request.key, step)
                for answer in self._told():
                    yield answer
                    if answer.interrupted:
                        raise KeyboardInterrupt
            yield from self._told()
        except KeyboardInterrupt:
            yield from self._cut_short()

    def _ask(self) -> Request[Seated] | None:
        """The next who can be answered: someone who has a further question, else someone new."""
        while self._waiting:
            talk = self._waiting.popleft()
            try:
                request = self._start(talk, self._free[-1])
            except PromptError as error:
                talk.error, talk.is_over = error, True
                self._waiting.clear()  # nothing behind an error is told
                continue
            self._free.pop()
            talk.answers.append(request.key)
            return Request((talk, request.key), request.prompt, request.sampler, request.drafter, request.stops)
        return None

    def _add(self, talk: BatchedConversation, answer: CollectedAnswer, step: Step) -> None:
        answer.add(step)
        if step.finish:
            self._free.append(answer.drafter)
            if talk.goes_on(answer.text):
                self._waiting.appendleft(talk)
            else:
                talk.is_over = True

    def _told(self) -> Iterator[Answer]:
        while self._untold and self._untold[0].is_over:
            yield from self._untold.popleft().told()

    def _cut_short(self) -> Iterator[Answer]:
        for talk in self._untold:
            for answer in talk.answers:
                if not answer.stats.finish:
                    answer.interrupt()
                yield answer
