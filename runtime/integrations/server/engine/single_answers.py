"""One answer at a time, by the loop that captures steps where the device allows it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic

from hdtool.data.errors import HdtoolError
from hdtool.runtime.batch import Key, Outcome, Request
from hdtool.runtime.decode import Step, decode
from hdtool.runtime.model.target import Target


class SingleReading(Generic[Key]):
    """A request whose prompt is read in its first step."""

    def __init__(self, request: Request[Key]) -> None:
        self.request = request

    def read(self, most: int | None = None) -> bool:
        return True

    def end(self) -> None:
        pass


class SingleAnswers(Generic[Key]):
    """What a batch is for several requests, for one; the KV cache of the last conversation is kept."""

    def __init__(self, target: Target, *, max_new_tokens: int, prefix_caching: bool) -> None:
        self._target, self._most, self._prefix_caching = target, max_new_tokens, prefix_caching
        self._running: tuple[Request[Key], Generator[Step]] | None = None
        self._owner: str | None = None
        """The tenant whose conversation is in the KV cache."""

    def __len__(self) -> int:
        return int(self._running is not None)

    @property
    def is_full(self) -> bool:
        return self._running is not None

    def start(self, request: Request[Key]) -> SingleReading[Key]:
        return SingleReading(request)

    def join(self, reading: SingleReading[Key]) -> Outcome[Key]:
        request = reading.request
        steps = decode(
            self._target,
            request.prompt,
            request.sampler,
            max_new_tokens=self._most if request.max_new_tokens is None else request.max_new_tokens,
            stops=request.stops,
            drafter=request.drafter,
            prediction=request.prediction,
            prefix_caching=self._prefix_caching and request.owner == self._owner,
        )
        self._running, self._owner = (request, steps), request.owner
        return self.step()[0]

    def step(self) -> list[Outcome[Key]]:
        assert self._running is not None
        request, steps = self._running
        outcome: Step | HdtoolError
        try:
            outcome = next(steps)
        except HdtoolError as error:
            outcome = error
        if isinstance(outcome, HdtoolError) or outcome.finish:
            self.end()
        return [(request, outcome)]

    def remove(self, request: Request[Key]) -> None:
        if self._running and self._running[0] is request:
            self.end()

    def end(self) -> None:
        if self._running:
            self._running[1].close()
            self._running = None
