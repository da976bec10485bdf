"""Answer the prompts of several dialogues in one batch, and yield the answers in the order of the prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from hdtool.data.errors import PromptError
from hdtool.data.prompts import Message, Prompt
from hdtool.runtime.answering.streamed_answer import Answer
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Dialogue:
    """A prompt whose user turns are answered in order: the messages so far, and the answers."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.messages: list[Message] = list(prompt.messages)
        self.prediction = prompt.prediction
        """Predicted text of the next answer; empty if there is none."""
        self.answers: list[Answer] = []
        self.error: PromptError | None = None
        """Why the next turn cannot be answered; None if it can."""
        self._later = iter(prompt.later_turns)

    def add_answer(self, text: str) -> bool:
        """Clear the prediction, and append an answer and the next user turn; return False if no turn is left."""
        self.prediction = ""
        turn = next(self._later, None)
        if turn is None:
            return False
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn}]
        return True


RequestMaker = Callable[[Dialogue, Drafter], Request[Dialogue]]
"""Makes a request for the next answer of a dialogue; raises PromptError if its prompt cannot be answered."""


class Dialogues:
    """Dialogues that are answered in one session."""

    def __init__(
        self,
        session: Session[Dialogue],
        prompts: Sequence[Prompt],
        drafters: Sequence[Drafter],
        make_request: RequestMaker,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
    ) -> None:
        """``drafters`` has a drafter for each dialogue of a batch; answers end before the strings in ``stop``."""
        self._session, self._steps = session, session.steps()
        self._make_request = make_request
        self._tokenizer, self._stop = tokenizer, stop
        self._free_drafters = list(drafters)
        self._drafter_of: dict[Dialogue, Drafter] = {}
        self._unreported = deque(Dialogue(prompt) for prompt in prompts)
        self._waiting = deque(self._unreported)

    def answers(self) -> Iterator[Answer]:
        """Yield the answers ordered by prompt and turn, each before its first token; iterating over one generates it.

        After an answer that the caller interrupts, the other unfinished answers follow, interrupted too. If a prompt
        cannot be answered, its PromptError is raised after the answers to its earlier turns, and no later prompt is
        started.
        """
        try:
            self._submit_next()
            while self._unreported:
                dialogue = self._unreported[0]
                for answer in dialogue.answers:  # grows by one answer for each turn
                    yield answer
                    while not answer.stats.finish:
                        self._advance()
                    if answer.interrupted:
                        self._interrupt()
                self._unreported.popleft()
                if dialogue.error:
                    raise dialogue.error
        finally:
            self._steps.close()

    def _advance(self) -> None:
        """Run the session for one step of an answer; if the step ends the answer, start the next turn or dialogue."""
        request, step = next(self._steps)
        dialogue = request.key
        answer = dialogue.answers[-1]
        answer.add(step)
        if step.finish:
            self._free_drafters.append(self._drafter_of.pop(dialogue))
            if dialogue.add_answer(answer.text):
                self._waiting.appendleft(dialogue)
            self._submit_next()

    def _submit_next(self) -> None:
        while self._waiting and self._free_drafters:
            dialogue = self._waiting.popleft()
            try:
                request = self._make_request(dialogue, self._free_drafters[-1])
            except PromptError as error:
                dialogue.error = error
                self._waiting.clear()  # no prompt after an error is answered
                return
            self._drafter_of[dialogue] = self._free_drafters.pop()
            dialogue.answers.append(
                Answer(
                    self._tokenizer,
                    request,
                    dialogue.prompt,
                    dialogue.messages[-1]["content"],
                    self._advance,
                    self._stop,
                )
            )
            self._session.submit(request)

    def _interrupt(self) -> None:
        """Interrupt all unfinished answers that have tokens, and drop the other unfinished ones."""
        for dialogue in self._unreported:
            dialogue.error = None
            if dialogue.answers and not (last := dialogue.answers[-1]).stats.finish:
                if last.output_ids:
                    last.interrupt()
                else:
                    dialogue.answers.pop()
