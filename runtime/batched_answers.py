"""Conversations that are answered in one batch; their answers are yielded in the order of the prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from hdtool.data.errors import PromptError
from hdtool.data.prompts import Prompt
from hdtool.runtime.answer import Answer, CollectedAnswer, Conversation
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.loop import Request
from hdtool.runtime.sequence import Step

BatchKey = tuple["BatchedConversation", CollectedAnswer]
Start = Callable[["BatchedConversation", Drafter], Request[BatchKey]]
"""Makes a request for the next answer of a conversation; raises PromptError if it cannot be answered."""


class BatchedConversation(Conversation):
    """A conversation of a batch, with its answers so far."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.answers: list[CollectedAnswer] = []
        self.drafter: Drafter | None = None
        """The one that it holds until its answer ends."""
        self.is_over = False
        self.error: PromptError | None = None

    def all_answers(self) -> Iterator[Answer]:
        yield from self.answers
        if self.error:
            raise self.error


class BatchedAnswers:
    """The answers to a list of prompts."""

    def __init__(self, prompts: Sequence[Prompt], start: Start, drafters: Sequence[Drafter]) -> None:
        """``drafters`` are as many as conversations are answered at once."""
        self._start = start
        self._free = list(drafters)
        self._unreported = deque(BatchedConversation(prompt) for prompt in prompts)
        self._waiting = deque(self._unreported)

    def answers(self, steps: Iterable[tuple[Request[BatchKey], Step]]) -> Iterator[Answer]:
        """Yield answers prompt by prompt, turn by turn; after an interrupt, also the unfinished ones.

        ``steps`` decodes the requests of ``next_request``.
        """
        try:
            for request, step in steps:
                self._add(*request.key, step)
                for answer in self._finished():
                    yield answer
                    if answer.interrupted:
                        raise KeyboardInterrupt
            yield from self._finished()
        except KeyboardInterrupt:
            yield from self._interrupted()

    def next_request(self) -> Request[BatchKey] | None:
        """A request of the next conversation that can be answered: one with a further turn, else the next prompt."""
        while self._waiting:
            conversation = self._waiting.popleft()
            try:
                request = self._start(conversation, self._free[-1])
            except PromptError as error:
                conversation.error, conversation.is_over = error, True
                self._waiting.clear()  # no prompt after an error is answered
                continue
            conversation.drafter = self._free.pop()
            conversation.answers.append(request.key[1])
            return request
        return None

    def _add(self, conversation: BatchedConversation, answer: CollectedAnswer, step: Step) -> None:
        answer.add(step)
        if step.finish:
            assert conversation.drafter is not None
            self._free.append(conversation.drafter)
            if conversation.add_answer(answer.text):
                self._waiting.appendleft(conversation)
            else:
                conversation.is_over = True

    def _finished(self) -> Iterator[Answer]:
        while self._unreported and self._unreported[0].is_over:
            yield from self._unreported.popleft().all_answers()

    def _interrupted(self) -> Iterator[Answer]:
        for conversation in self._unreported:
            for answer in conversation.answers:
                if not answer.stats.finish:
                    answer.interrupt()
                yield answer
