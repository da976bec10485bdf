"""The answers to one request: its jobs in the engine, and what they deliver to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial

from hdtool.data.errors import HdtoolError
from hdtool.runtime.integrations.server.answer_text import AnswerText
from hdtool.runtime.integrations.server.engine.job import Job
from hdtool.runtime.integrations.server.engine.scheduler import OverloadError, Scheduler
from hdtool.runtime.integrations.server.metrics import Metrics
from hdtool.runtime.integrations.server.preparation import Choice, Preparer
from hdtool.runtime.integrations.server.protocol.delta import Delta
from hdtool.runtime.integrations.server.protocol.errors import OVERLOADED, SERVER, RequestError
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.sequence import Step
from hdtool.runtime.stats import Stats


class Answers:
    """The choices of one request while they are generated."""

    def __init__(
        self, engine: Scheduler, metrics: Metrics, loaded: Loaded, preparer: Preparer, choices: Sequence[Choice]
    ) -> None:
        self._engine, self._metrics, self._preparer, self._choices = engine, metrics, preparer, choices
        self._texts = [AnswerText(loaded.tokenizer, choice, loaded.stops) for choice in choices]
        self._queue: asyncio.Queue[tuple[int, Step | Exception]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._open: set[int] = set(range(len(choices)))
        self._jobs: list[Job] = []

    def submit(self, tenant: str) -> None:
        """Hand the choices to the engine; raise if it accepts no more."""
        self._jobs = [
            self._preparer.job(choice, tenant, partial(self._deliver, index))
            for index, choice in enumerate(self._choices)
        ]
        try:
            self._engine.submit(self._jobs)
        except OverloadError as error:
            raise _refusal(error) from None

    def _deliver(self, index: int, outcome: Step | Exception) -> None:
        """Called in the thread of the engine."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, outcome))
        except RuntimeError:  # the loop is closed: nobody waits
            self._jobs[index].is_cancelled = True

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What each step adds, with the index of its choice; the jobs are cancelled if the iteration ends early."""
        try:
            while self._open:
                index, outcome = await self._queue.get()
                if not isinstance(outcome, Step):
                    raise _refusal(outcome)
                text = self._texts[index]
                prompt = len(self._choices[index].asked.prompt)
                submitted, is_first = self._jobs[index].submitted, not text.stats.steps
                self._metrics.step(outcome, prompt, submitted, is_first=is_first)
                delta = text.add(outcome)
                if outcome.finish:
                    self._open.discard(index)
                if delta:
                    yield index, delta
        finally:
            self.cancel()
            self._jobs.clear()  # they refer to this object, and memory would wait for a full collection
            self._count_drafts()

    def cancel(self) -> None:
        """End the answers that are not complete."""
        for index in self._open:
            if index < len(self._jobs):
                self._jobs[index].is_cancelled = True

    @property
    def stats(self) -> Stats:
        return Stats.total(text.stats for text in self._texts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts; the choices of one prompt share it."""
        prompts = {id(choice.asked): len(choice.asked.prompt) for choice in self._choices}
        return sum(prompts.values())

    def _count_drafts(self) -> None:
        stats = self.stats
        for source in stats.sources:
            self._metrics.drafts(str(source), int(stats.drafted[source]), int(stats.accepted[source]))


def _refusal(error: Exception) -> RequestError:
    """An error of an answer, in words for its reader: those of the engine itself are for its log alone."""
    if isinstance(error, OverloadError):
        return RequestError(str(error), status=503, kind=OVERLOADED)
    if isinstance(error, HdtoolError):
        return RequestError(str(error))
    return RequestError("the answer failed inside the server; its log has the reason", status=500, kind=SERVER)
