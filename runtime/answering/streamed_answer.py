"""An answer whose text is streamed while it is generated, with its tokens and statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hdtool.data.prompts import Prompt
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.step import Finish, Stats, Step
from hdtool.runtime.generation.stop_strings import TextPiece, before_stop, cut_at_stop
from hdtool.runtime.generation.text_stream import TextStream, pieces_of, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Answer:
    """An answer that is generated while the caller iterates over it; the iteration yields its text in pieces."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        request: Request[Any],
        prompt: Prompt,
        question: str,
        generate: Callable[[], None],
        stop: Sequence[str] = (),
    ) -> None:
        """``question`` is the user turn to answer. ``generate`` decodes further and calls ``add`` for each new step.

        ``stop`` holds the stop strings; the text ends before the first one that occurs.
        """
        self.prompt, self.question = prompt, question
        self.prompt_tokens = len(request.prompt)
        self.output_ids: list[int] = []
        self.stats = Stats()
        self.request = request
        self._tokenizer, self._stop = tokenizer, stop
        self._generate = generate
        self._steps: deque[Step] = deque()
        """Steps whose text has not been yielded yet."""
        self._add_seconds = self.stats.timing(request.drafter)

    def add(self, step: Step) -> None:
        self.output_ids += step.tokens
        self.stats.add(step)
        self._steps.append(step)
        if step.finish:
            self._add_seconds()

    def __iter__(self) -> Iterator[str]:
        text = TextStream(self._tokenizer, self._stop)
        while step := self._next_step():
            if piece := text.add(step.tokens):
                yield piece
        if rest := text.end():
            yield rest

    def by_source(self) -> Iterator[TextPiece]:
        """Generate the answer; yield the text of each token and the source that drafted that token."""
        steps = iter(self._next_step, None)
        drafted = (pair for step in steps for pair in zip(step.tokens, step.sources, strict=True))
        return before_stop(pieces_of(self._tokenizer, drafted), self._stop)

    def _next_step(self) -> Step | None:
        """Return the next step whose text has not been yielded, decoding if needed; None if the answer has ended."""
        while not self._steps and not self.stats.finish:
            self._generate()
        return self._steps.popleft() if self._steps else None

    @property
    def interrupted(self) -> bool:
        return self.stats.finish is Finish.INTERRUPT

    def interrupt(self) -> None:
        """Mark the answer as interrupted; the tokens generated so far remain."""
        if not self.stats.finish:
            self._add_seconds()
        self.stats.finish = Finish.INTERRUPT

    @property
    def text(self) -> str:
        return cut_at_stop(text_of(self._tokenizer, self.output_ids), self._stop)
